"""What becomes of momenta when an average is kept, and of batch norms on an average."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from problem import adamw, flatten, make_params, sgd, take_steps, wrap
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, Schedule
from decent_optim_wrapper.config import AverageState, OnNonfinite


def trained(
    rank: int, group: dist.ProcessGroup, make: Any = sgd, **options: Any
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params()
    optimizer = wrap(params, group, make(params), topology="ring", **options)
    assert len(optimizer.buckets) > 1
    take_steps(optimizer, params, rank, range(3))
    return params, optimizer


def momenta(optimizer: Optimizer, params: list[Tensor]) -> Tensor:
    """Everything that the base keeps per element, as one vector."""
    kept = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    tensors = [value for value in kept if isinstance(value, Tensor)]
    return flatten([value for value in tensors if value.dtype == torch.float64])


def average_at_once(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    optimizer.global_avg(may_revert=False)


def average_by_a_step(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    own = momenta(optimizer, params)
    optimizer.global_avg()
    assert torch.equal(momenta(optimizer, params), own), "it may be reverted still"
    for param in params:
        param.grad = None
    optimizer.step()


@pytest.mark.parametrize(
    ("policy", "make", "average"),
    pairwise(
        named("average", "keep"),
        {"sgd": sgd, "adamw": adamw},
        {"by step": average_by_a_step, "by may_revert": average_at_once},
    ),
)
def test_momenta_are_averaged_if_asked_for_where_the_average_is_kept(
    policy: AverageState, make: Any, average: Any
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params, optimizer = trained(rank, group, make, schedule=Schedule(average_state=policy))
        own = momenta(optimizer, params)
        with optimizer.averaged():
            pass
        average(optimizer, params)
        return own, momenta(optimizer, params)

    rows = run_threads(4, main)
    mean = torch.stack([own for own, _ in rows]).mean(dim=0)
    for own, after in rows:
        expected = mean if policy == "average" else own
        torch.testing.assert_close(after, expected, rtol=1e-13, atol=1e-14)
        assert not torch.allclose(own, mean)


def test_the_bytes_of_averaged_momenta_are_counted() -> None:
    def main(rank: int, group: dist.ProcessGroup, policy: AverageState) -> int:
        schedule = Schedule(global_avg_every=3, average_state=policy)
        _, optimizer = trained(rank, group, overlap=False, schedule=schedule)
        return optimizer.stats().bytes_sent

    copy_bytes = 8 * flatten(make_params()).numel()
    kept, averaged = (run_threads(4, partial(main, policy=each)) for each in ("keep", "average"))
    # As by a ring of 4, in whole bytes bucket by bucket: 2 * 3 / 4 copies of one momentum.
    for one, other in zip(kept, averaged, strict=True):
        assert other - one == pytest.approx(1.5 * copy_bytes, abs=8)


def test_counters_and_what_one_rank_has_no_momentum_for_are_left_alone() -> None:
    """Also the counter of a parameter without dimensions, which has its shape."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[float, ...]]:
        params = make_params()
        base = torch.optim.Adam(params, lr=0.1, betas=(0.0, 0.999))
        optimizer = wrap(params, group, base, schedule=Schedule(average_state="average"))
        for step in range(3):
            for index, param in enumerate(params):
                missing = (rank == 1 and index < 2) or (rank, step) == (0, 1)
                param.grad = None if missing else torch.full_like(param, 1.0 + rank)
            optimizer.step()
        optimizer.global_avg(may_revert=False)
        states = [base.state.get(param, {}) for param in params]
        return [(s["exp_avg"].mean().item(), s["step"].item()) if s else () for s in states]

    first, second = run_threads(2, main)
    assert first == [(1.0, 2.0), (1.0, 2.0), (1.5, 2.0), (1.5, 2.0), (1.5, 2.0)]
    assert second == [(), (), (1.5, 3.0), (1.5, 3.0), (1.5, 3.0)]


def poison(base: Optimizer, params: list[Tensor]) -> None:
    """As a single bad batch may leave it: the parameters themselves stay finite."""
    for index, value in ((1, float("nan")), (2, float("inf"))):
        base.state[params[index]]["exp_avg"].view(-1)[0] = value


def overflow(base: Optimizer, params: list[Tensor]) -> None:
    """Make a step with finite gradients whose squares are not."""
    for param in params:
        param.grad = torch.full_like(param, 1e25)
    base.step()
    assert all(base.state[param]["exp_avg_sq"].isinf().all() for param in params)
    assert flatten(params).isfinite().all()


def average_in_a_step(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    # The fourth step launches the scheduled average, and synchronize() finishes it.
    for param in params:
        param.grad = None
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize(
    ("spoil", "average", "policy"),
    pairwise(
        {"poison": poison, "overflow": overflow},
        {"at once": average_at_once, "in a step": average_in_a_step},
        named("raise", "skip"),
    ),
)
def test_momenta_that_are_not_finite_reach_nobody(
    spoil: Any, average: Any, policy: OnNonfinite
) -> None:
    bad, world_size = 1, 3
    schedule = Schedule(average_state="average", global_avg_every=4)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(dtype=torch.float32)
        base = adamw(params)
        optimizer = wrap(params, group, base, schedule=schedule, on_nonfinite=policy)
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        if rank == bad:
            spoil(base, params)

        def moments() -> Tensor:
            kept = [base.state[param] for param in params]
            return flatten([each[name] for name in ("exp_avg", "exp_avg_sq") for each in kept])

        own = moments()
        if policy == "raise":
            refusal = r"finite momenta in average_state=.*those of ranks \[1\] hold NaN"
            with pytest.raises(NonFiniteError, match=refusal) as caught:
                average(optimizer, params)
            assert caught.value.ranks == (bad,)
            torch.testing.assert_close(moments(), own, rtol=0, atol=0, equal_nan=True)
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            average(optimizer, params)
        assert flatten(params).isfinite().all()
        return own, moments()

    rows = run_threads(world_size, main)
    assert not rows[bad][0].isfinite().all()
    if policy == "skip":
        good = torch.stack([own for rank, (own, _) in enumerate(rows) if rank != bad]).mean(dim=0)
        everyone = torch.stack([own for own, _ in rows]).mean(dim=0)
        for own, averaged in rows:
            assert torch.equal(averaged, rows[0][1])
            # A bucket that is finite everywhere is averaged over all.
            close = torch.isclose(averaged, good, rtol=1e-6)
            assert (close | torch.isclose(averaged, everyone, rtol=1e-6)).all()
            assert close[~rows[bad][0].isfinite()].all()
            assert not torch.equal(own, averaged)


def test_where_nobody_has_finite_momenta_each_keeps_its_own() -> None:
    options: Any = {"schedule": Schedule(average_state="average"), "on_nonfinite": "skip"}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, optimizer = trained(rank, group, **options)
        for param in params:
            optimizer.state[param]["momentum_buffer"].view(-1)[rank % param.numel()] = float("nan")
        own = momenta(optimizer, params)
        optimizer.global_avg(may_revert=False)
        torch.testing.assert_close(momenta(optimizer, params), own, rtol=0, atol=0, equal_nan=True)
        assert own.isfinite().any()

    run_threads(2, main)


Built = TypeVar("Built", bound=nn.Module)
# Ranks are threads here and share torch's global generator.
BUILDING = threading.Lock()


def built_from_one_seed(kind: Callable[[], Built]) -> Built:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


class Normed(nn.Module):
    """Its norm and its dropout are read in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))))  # type: ignore[no-any-return]


def normed() -> tuple[Normed, DecentOptimWrapper]:
    """In a world of one."""
    model = built_from_one_seed(Normed)
    return model, DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x + rank, x[:, :2]) for x in draw]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_batch_norms_are_recalibrated_on_the_average_and_restored() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = built_from_one_seed(Normed)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"topology": "ring", "buffers": model.buffers()}
        optimizer = wrap(list(model.parameters()), group, base, **options)
        for x, y in batches(rank, 4):
            optimizer.zero_grad()
            (model(x) - y).square().sum().backward()
            optimizer.step()
        own, probe = state_of(model), batches(7, 3)
        with optimizer.averaged(recalibrate=(model, probe)):
            assert model.training
            outputs = torch.cat([model.first(x) for x, _ in probe])
            mean = outputs.detach().view(3, 8, 6).mean(dim=1).mean(dim=0)
            torch.testing.assert_close(model.norm.running_mean, mean)
            assert model.norm.num_batches_tracked == 3
            assert not torch.allclose(model.first.weight, own["first.weight"])
        assert equal(state_of(model), own)
        optimizer.synchronize()

    run_threads(2, main)


def test_statistics_stay_where_a_step_keeps_the_average() -> None:
    """And random numbers go on as if dropout had drawn none."""
    model, optimizer = normed()
    (x, y), *_ = probe = batches(3, 2)
    random = torch.get_rng_state()
    with optimizer.averaged(recalibrate=(model, probe)):
        found = model.norm.running_mean
        assert found is not None
        kept = found.clone()
        model.eval()
        (model(x) - y).square().sum().backward()
        optimizer.step()
    assert torch.equal(found, kept)
    assert kept.abs().max() > 0.1
    assert torch.equal(torch.get_rng_state(), random)


def broken() -> Iterator[tuple[Tensor, Tensor]]:
    yield batches(0, 1)[0]
    raise OSError("the disk")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda model: (model, broken()), OSError, "the disk"),
        (lambda model: (model, []), ValueError, "reach every batch norm"),
        (lambda model: model, TypeError, r"recalibrate expects \(model, batches\)"),
        (lambda model: ([], model), TypeError, r"recalibrate expects \(model, batches\)"),
        (lambda model: (model, 3), TypeError, r"recalibrate expects \(model, batches\)"),
    ],
)
def test_what_does_not_recalibrate_leaves_batch_norms_as_they_were(
    given: Callable[[nn.Module], Any], error: type[Exception], words: str
) -> None:
    model, optimizer = normed()
    model.eval()
    own, averaged = state_of(model), optimizer.averaged(recalibrate=given(model))
    with pytest.raises(error, match=words), averaged:
        pass
    assert model.norm.momentum == 0.1
    assert not model.training
    assert equal(state_of(model), own)


def test_a_model_whose_norms_are_all_frozen_is_not_run() -> None:
    model, optimizer = normed()
    model.norm.eval()
    own, calls = state_of(model), list[object]()
    model.register_forward_hook(lambda *_: calls.append(None))
    with optimizer.averaged(recalibrate=(model, batches(0, 2))):
        assert equal(state_of(model), own)
    assert not calls
    assert model.training
    assert not model.norm.training


class Buffered(nn.Module):
    """All kinds of buffers that a forward pass in training mode changes, or replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.second = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.instance = nn.InstanceNorm1d(6, track_running_stats=True)
        self.frozen, self.norm = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("row", torch.arange(6.0).expand(8, 6))
        self.double()
        nn.init.constant_(self.frozen.get_buffer("running_mean"), 0.5)

    def train(self, mode: bool = True) -> Buffered:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
            self.register_buffer("cache", x)
        hidden = self.drop(self.norm(self.frozen(self.second(self.first(x)))))
        return self.instance(hidden.T.unsqueeze(0))[0].T + self.row  # type: ignore[no-any-return]

    def modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.named_modules()}


@pytest.mark.parametrize(
    ("views", "with_buffers", "evaluating"),
    pairwise(VIEWS, {"buffers": True, "none": False}, {"training": False, "evaluating": True}),
)
def test_recalibration_leaves_everything_else_as_it_was(
    views: bool, with_buffers: bool, evaluating: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = built_from_one_seed(Buffered)
        params: Sequence[Tensor] = list(model.parameters())
        buffers = [b for b in model.buffers() if b is not model.row] if with_buffers else ()
        options: Any = {"topology": "ring", "param_as_bucket_view": views}
        base = torch.optim.SGD(params, lr=0.1)
        optimizer = wrap(params, group, base, buffers=buffers, **options)
        assert len(optimizer.buckets) > 1
        model.train()
        for x, _ in batches(rank, 3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        del model._buffers["cache"]
        model.drop.eval()
        if evaluating:
            model.eval()
        own, modes, objects = state_of(model), model.modes(), dict(model.named_buffers())
        with optimizer.averaged():
            on_average = state_of(model)
        with optimizer.averaged(recalibrate=(model, batches(7, 3))):
            assert model.modes() == modes
            inside = state_of(model)
            changed = {n for n, value in inside.items() if not torch.equal(value, on_average[n])}
            assert changed == {"norm.running_mean", "norm.running_var"}
            assert inside["norm.num_batches_tracked"] == 3
            # In training mode this moves, and replaces, buffers that are restored as well.
            model(batches(8, 1)[0][0])
        assert equal(state_of(model), own)
        assert all(value is objects[name] for name, value in model.named_buffers())
        assert model.modes() == modes
        assert any(modes.values()) != evaluating

    run_threads(2, main)
