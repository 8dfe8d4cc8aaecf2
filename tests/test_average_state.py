"""What becomes of momenta when an average is kept, and of batch norms on an average."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from dense import due_matrix, mix, train_regression
from problem import TINY_CAP_MB, adamw, flatten, make_params, sgd, take_steps
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, Schedule, TopologyFactory
from decent_optim_wrapper.config import AverageState, OnNonfinite


def trained(
    rank: int, group: dist.ProcessGroup, make: Any, steps: int = 3, **options: Any
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params()
    optimizer = DecentOptimWrapper(
        make(params),
        topology="ring",
        bucket_cap_mb=TINY_CAP_MB,
        process_group=group,
        **options,
    )
    take_steps(optimizer, params, rank, range(steps))
    return params, optimizer


def momenta(optimizer: Optimizer, params: list[Tensor]) -> Tensor:
    """Everything that the base keeps per element, as one vector."""
    kept = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    tensors = [value for value in kept if isinstance(value, Tensor)]
    return flatten([value for value in tensors if value.dtype == torch.float64])


@pytest.mark.parametrize(
    ("policy", "make", "implicitly"),
    pairwise(
        named("average", "keep"),
        {"sgd": sgd, "adamw": adamw},
        {"by step": True, "by may_revert": False},
    ),
)
def test_momenta_are_averaged_if_asked_for_where_the_average_is_kept(
    policy: AverageState, make: Any, implicitly: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params, optimizer = trained(rank, group, make, schedule=Schedule(average_state=policy))
        own = momenta(optimizer, params)
        with optimizer.averaged():
            pass
        optimizer.global_avg(may_revert=implicitly)
        if implicitly:
            assert torch.equal(momenta(optimizer, params), own), "it may be reverted still"
            for param in params:
                param.grad = None
            optimizer.step()
        return own, momenta(optimizer, params)

    rows = run_threads(4, main)
    mean = torch.stack([own for own, _ in rows]).mean(dim=0)
    for own, after in rows:
        expected = mean if policy == "average" else own
        torch.testing.assert_close(after, expected, rtol=1e-13, atol=1e-14)
        assert not torch.allclose(own, mean)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize("policy", ["keep", "average"])
def test_scheduled_averages_follow_the_oracle(policy: AverageState, overlap: bool) -> None:
    steps, every = 8, 3
    topology = TopologyFactory.create("ring", 4)

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params, optimizer = trained(
            rank,
            group,
            sgd,
            steps,
            schedule=Schedule(global_avg_every=every, average_state=policy),
            overlap=overlap,
        )
        optimizer.synchronize()
        return flatten(params)

    worlds = [make_params() for _ in range(4)]
    bases = [sgd(params) for params in worlds]

    def land(step: int) -> None:
        matrix = due_matrix(topology, 1, every, 1.0, step)
        mix(worlds, matrix)
        if (step + 1) % every == 0 and policy == "average":
            pairs = zip(bases, worlds, strict=True)
            mix([[base.state[p]["momentum_buffer"] for p in own] for base, own in pairs], matrix)

    expected = train_regression(worlds, bases, steps, overlap, land)
    rows = torch.stack(run_threads(4, main))
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
    assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_the_bytes_of_averaged_momenta_are_counted() -> None:
    def main(rank: int, group: dist.ProcessGroup, policy: AverageState) -> int:
        _, optimizer = trained(
            rank,
            group,
            sgd,
            3,
            overlap=False,
            schedule=Schedule(global_avg_every=3, average_state=policy),
        )
        return optimizer.stats().bytes_sent

    copy_bytes = 8 * flatten(make_params()).numel()
    kept = run_threads(4, partial(main, policy="keep"))
    averaged = run_threads(4, partial(main, policy="average"))
    # As by a ring of 4, in whole bytes bucket by bucket: 2 * 3 / 4 copies of one momentum.
    for one, other in zip(kept, averaged, strict=True):
        assert other - one == pytest.approx(1.5 * copy_bytes, abs=8)


def test_what_one_rank_has_no_momentum_for_is_left_alone() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        params = make_params()
        base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        optimizer = DecentOptimWrapper(
            base,
            process_group=group,
            bucket_cap_mb=TINY_CAP_MB,
            schedule=Schedule(average_state="average"),
        )
        for index, param in enumerate(params):
            if rank == 0 or index > 1:
                param.grad = torch.full_like(param, 1.0 + rank)
        optimizer.step()
        optimizer.global_avg(may_revert=False)
        buffers = [
            base.state[p].get("momentum_buffer") if p in base.state else None for p in params
        ]
        return [float("nan") if b is None else b.mean().item() for b in buffers]

    first, second = run_threads(2, main)
    assert first == [1.0, 1.0, 1.5, 1.5, 1.5]
    assert torch.tensor(second[:2]).isnan().all()
    assert second[2:] == [1.5, 1.5, 1.5]


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


def average_at_once(optimizer: DecentOptimWrapper, rank: int, params: list[Tensor]) -> None:
    optimizer.global_avg(may_revert=False)


def average_in_a_step(optimizer: DecentOptimWrapper, rank: int, params: list[Tensor]) -> None:
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

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(dtype=torch.float32)
        base = adamw(params)
        optimizer = DecentOptimWrapper(
            base,
            bucket_cap_mb=TINY_CAP_MB,
            process_group=group,
            schedule=Schedule(average_state="average", global_avg_every=4),
            on_nonfinite=policy,
        )
        assert len(optimizer.buckets) > 1
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
                average(optimizer, rank, params)
            assert caught.value.ranks == (bad,)
            torch.testing.assert_close(moments(), own, rtol=0, atol=0, equal_nan=True)
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            average(optimizer, rank, params)
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
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params, optimizer = trained(
            rank, group, sgd, schedule=Schedule(average_state="average"), on_nonfinite="skip"
        )
        for param in params:
            optimizer.state[param]["momentum_buffer"].view(-1)[rank % param.numel()] = float("nan")
        own = momenta(optimizer, params)
        optimizer.global_avg(may_revert=False)
        return own, momenta(optimizer, params)

    for own, after in run_threads(2, main):
        torch.testing.assert_close(after, own, rtol=0, atol=0, equal_nan=True)
        assert own.isfinite().any()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6).double()
        self.norm = nn.BatchNorm1d(6).double()
        self.last = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x + rank, x[:, :2]) for x in draw]


@pytest.mark.parametrize("with_buffers", [True, False])
def test_batch_norms_are_recalibrated_on_the_average_and_restored(with_buffers: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = built_from_one_seed(Normed)
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(model.parameters(), lr=0.1),
            process_group=group,
            topology="ring",
            buffers=model.buffers() if with_buffers else (),
            bucket_cap_mb=TINY_CAP_MB,
        )
        for x, y in batches(rank, 4):
            optimizer.zero_grad()
            (model(x) - y).square().sum().backward()
            optimizer.step()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        probe = batches(7, 3)
        with optimizer.averaged(recalibrate=(model, probe)):
            assert model.training
            outputs = torch.cat([model.first(x) for x, _ in probe])
            mean = outputs.detach().view(3, 8, 6).mean(dim=1).mean(dim=0)
            torch.testing.assert_close(model.norm.running_mean, mean)
            assert model.norm.num_batches_tracked == 3
            assert not torch.allclose(model.first.weight, own["first.weight"])
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in own.items())
        optimizer.synchronize()

    run_threads(2, main)


def test_statistics_stay_where_a_step_keeps_the_average() -> None:
    model = built_from_one_seed(Normed)
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    (x, y), *_ = probe = batches(3, 2)
    with optimizer.averaged(recalibrate=(model, probe)):
        found = model.norm.running_mean
        assert found is not None
        kept = found.clone()
        model.eval()
        (model(x) - y).square().sum().backward()
        optimizer.step()
    assert torch.equal(found, kept)
    assert kept.abs().max() > 0.1


def test_a_batch_that_raises_leaves_batch_norms_as_they_were() -> None:
    model = built_from_one_seed(Normed).eval()
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    own = {name: value.clone() for name, value in model.state_dict().items()}

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield batches(0, 1)[0]
        assert not torch.equal(model.get_buffer("norm.running_mean"), own["norm.running_mean"])
        raise OSError("the disk")

    failing = optimizer.averaged(recalibrate=(model, broken()))
    with pytest.raises(OSError, match="the disk"), failing:
        pass
    assert model.norm.momentum == 0.1
    assert not model.training
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in own.items())


Built = TypeVar("Built", bound=nn.Module)
# Ranks are threads here and share torch's global generator.
BUILDING = threading.Lock()


def built_from_one_seed(kind: Callable[[], Built]) -> Built:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


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

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
            self.register_buffer("cache", x)
        hidden = self.drop(self.norm(self.frozen(self.second(self.first(x)))))
        return self.instance(hidden.T.unsqueeze(0))[0].T + self.row  # type: ignore[no-any-return]

    def buffer_values(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.named_buffers()}

    def modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.named_modules()}


class KeepsFrozen(Buffered):
    def train(self, mode: bool = True) -> KeepsFrozen:
        super().train(mode)
        self.frozen.eval()
        return self


@pytest.mark.parametrize(
    ("views", "with_buffers", "evaluating"),
    pairwise(VIEWS, {"buffers": True, "none": False}, {"training": False, "evaluating": True}),
)
def test_recalibration_leaves_everything_else_as_it_was(
    views: bool, with_buffers: bool, evaluating: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = built_from_one_seed(KeepsFrozen)
        model.frozen.running_mean.fill_(0.5)  # type: ignore[union-attr]
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(model.parameters(), lr=0.1),
            process_group=group,
            topology="ring",
            buffers=[b for b in model.buffers() if b is not model.row] if with_buffers else (),
            param_as_bucket_view=views,
            bucket_cap_mb=TINY_CAP_MB,
        )
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
        buffers, modes = model.buffer_values(), model.modes()
        objects = dict(model.named_buffers())
        with optimizer.averaged():
            on_average = model.buffer_values()
        with optimizer.averaged(recalibrate=(model, batches(7, 3))):
            assert model.modes() == modes
            inside = model.buffer_values()
            assert {n for n, value in inside.items() if not torch.equal(value, on_average[n])} == {
                "norm.running_mean",
                "norm.running_var",
            }
            assert inside["norm.num_batches_tracked"] == 3
            model.train()
            model(batches(8, 1)[0][0])
            model.eval()
            for name, module in model.named_modules():
                module.training = modes[name]
        after = model.buffer_values()
        assert after.keys() == buffers.keys()
        assert all(torch.equal(after[name], value) for name, value in buffers.items())
        assert all(value is objects[name] for name, value in model.named_buffers())
        assert model.modes() == modes
        assert any(modes.values()) != evaluating

    run_threads(2, main)


def test_a_model_whose_norms_are_all_frozen_is_not_run() -> None:
    model = built_from_one_seed(Normed)
    model.norm.eval()
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[object] = []
    model.register_forward_hook(lambda *_: calls.append(None))
    with optimizer.averaged(recalibrate=(model, batches(0, 2))):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in own.items())
    assert not calls
    assert model.training
    assert not model.norm.training


def test_counters_of_parameters_without_dimensions_are_not_averaged() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        params = [torch.tensor(1.0 + rank, requires_grad=True), torch.ones(3, requires_grad=True)]
        base = torch.optim.Adam(params, lr=0.1)
        optimizer = DecentOptimWrapper(
            base,
            process_group=group,
            schedule=Schedule(average_state="average"),
            bucket_cap_mb=4 / 2**20,
        )
        for step in range(3):
            for param in params:
                param.grad = None if (rank, step) == (0, 1) else torch.ones_like(param)
            optimizer.step()
        optimizer.global_avg(may_revert=False)
        return [base.state[param]["step"].item() for param in params]

    assert run_threads(2, main) == [[2.0, 2.0], [3.0, 3.0]]


def test_recalibration_leaves_the_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.BatchNorm1d(6)).double()
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    state = torch.get_rng_state()
    with optimizer.averaged(recalibrate=(model, batches(0, 2))):
        pass
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("given", [nn.Linear(1, 1), ([], nn.Linear(1, 1)), (nn.Linear(1, 1), 3)])
def test_what_cannot_be_recalibrated_is_refused(given: Any) -> None:
    optimizer = DecentOptimWrapper(sgd(make_params()))
    with (
        pytest.raises(TypeError, match=r"recalibrate expects \(model, batches\)"),
        optimizer.averaged(recalibrate=given),
    ):
        pass


def test_no_batches_are_refused() -> None:
    model = built_from_one_seed(Normed)
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(ValueError, match="reach every batch norm"),
        optimizer.averaged(recalibrate=(model, [])),
    ):
        pass
    assert all(torch.equal(model.state_dict()[name], value) for name, value in own.items())
