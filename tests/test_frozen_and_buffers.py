"""Frozen parameters and buffers of a model: how they start, and how they are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import CAP_MB, backward, batch, fill, flat, make_model, sgd
from modules import wrap as wrap_module
from problem import flatten, make_params, take_steps, wrap
from ranks import run_threads
from test_recalibration import built_from_one_seed
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError
from decent_optim_wrapper.integrations.wrapping import Wrapping

INF = math.inf


class WithState(nn.Module):
    """A trained trunk, and all else that a model may have; drawn anew on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        draw = partial(torch.randn, generator=generator)
        self.trunk = make_model(seed=0)
        self.features = nn.Linear(3, 3).requires_grad_(False)
        self.target = nn.Linear(4, 2)
        self.moving = nn.Parameter(draw(5), requires_grad=False)
        self.codes = nn.Parameter(torch.full((4,), rank, dtype=torch.uint8), requires_grad=False)
        self.table = nn.Buffer(draw(6), persistent=False)
        self.count = nn.Buffer(torch.tensor(rank))
        self.row = nn.Buffer(draw(1, 6).expand(8, 6))
        self.scale = nn.Buffer(torch.tensor([1.0 + rank]))
        for part in (self.features, self.target):
            fill(part, seed=rank)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.trunk(inputs)
        return out

    def state(self) -> dict[str, Tensor]:
        named = (*self.named_parameters(), *self.named_buffers())
        return {name: t.detach().clone() for name, t in named if not name.startswith("trunk")}


def trains_trunk(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return sgd([param for name, param in named if name.startswith("trunk")])


def start(
    way: str, model: WithState, group: dist.ProcessGroup, **options: Any
) -> DecentOptimWrapper:
    """Give a model to the wrapper, to the module, or to an integration."""
    if way == "module":
        return wrap_module(model, group, trains_trunk, **options).optimizer
    options |= {"process_group": group, "bucket_cap_mb": CAP_MB}
    base = trains_trunk(model.named_parameters())
    if way == "wrapper":
        return DecentOptimWrapper(base, model=model, **options)
    wrapping = Wrapping(options)
    wrapping.models.append(model)
    return wrapping.wrap(base)


@pytest.mark.parametrize("way", ["wrapper", "module", "integration"])
def test_all_tensors_of_a_model_start_as_on_rank_0_without_a_common_seed(way: str) -> None:
    def main(rank: int, group: dist.ProcessGroup, sync: bool) -> bool:
        model, first = WithState(rank), WithState(0).state()
        own = model.state()
        optimizer = start(way, model, group, sync_at_start=sync)
        assert len(optimizer.buckets) >= 2
        now = model.state()
        expected = first if sync else own
        assert all(torch.equal(now[name], value) for name, value in expected.items())
        return any(torch.equal(own[name], value) for name, value in first.items())

    for sync in (True, False):
        assert run_threads(3, partial(main, sync=sync)) == [True, False, False]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_another_shape_on_one_rank_stays_its_own_and_orders_may_differ() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model: Any = nn.Module()
        for name in ("one", "other") if rank else ("other", "one"):
            value = torch.full((3,), rank + len(name) + 0.5)
            model.register_parameter(name, nn.Parameter(value, requires_grad=name == "one"))
        model.personal = nn.Parameter(torch.full((1 + rank,), float(rank)), requires_grad=False)
        model.trunk = make_model()
        # What gossip cannot exchange: it has no values yet, or two kinds of them.
        model.lazy = nn.LazyLinear(3)
        codes = torch.quantize_per_tensor(torch.ones(2), 0.1 + rank, 0, torch.qint8)
        model.codes = nn.Buffer(codes)
        optimizer = wrap([], group, sgd(model.trunk.parameters()), model=model)
        assert model.one.tolist() == [3.5] * 3
        assert model.other.tolist() == [5.5] * 3
        with torch.no_grad():
            model.other += rank
        with optimizer.averaged():
            assert model.other.tolist() == [6.0] * 3
            assert model.personal.tolist() == [rank] * (1 + rank)

    run_threads(2, main)


@pytest.mark.parametrize("way", ["wrapper", "optimizer", "module", "module with buffers"])
def test_frozen_parameters_that_drift_apart_are_averaged_as_buffers_are(way: str) -> None:
    """Such as target networks, and the moving statistics of batch norms in Keras."""
    averages = way != "module"

    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = WithState(rank)
        if way == "wrapper":
            optimizer = start(way, model, group)
        elif way == "optimizer":
            named = [pair for pair in model.named_parameters() if pair[1].is_floating_point()]
            optimizer = wrap([], group, sgd(named))
        else:
            options = {"sync_buffer_in_global_avg": averages}
            optimizer = start("module", model, group, **options)
        # Thirds are rounded: this must not be summed.
        same = model.features.weight.data.fill_(0.1).clone()
        # Many change targets through .data, which counts no version.
        model.moving.data.fill_(float(rank))
        own = model.state()
        with optimizer.averaged():
            assert model.moving.tolist() == [1.0 if averages else rank] * 5
            assert torch.equal(model.features.weight, same)
            assert torch.equal(model.codes, own["codes"])
            model.moving.data.add_(5)
        if averages:
            assert torch.equal(model.moving, own["moving"])
        # It is trained now, by another optimizer.
        model.moving.requires_grad_()
        kept = model.moving.detach().clone()
        with optimizer.averaged():
            assert torch.equal(model.moving, kept)

    run_threads(3, main)


class Normalised(nn.Module):
    """A batch norm, and buffers of other kinds; only the first two have a mean over the ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk = make_model(seed=0)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.table = nn.Buffer(torch.full((3,), float(rank)), persistent=False)
        self.personal = nn.Buffer(torch.full((1 + rank,), float(rank)))
        self.codes = nn.Buffer(torch.full((2,), rank, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.trunk(self.norm(inputs))
        return out


@pytest.mark.parametrize("given", ["nothing", "none", "some", "no model"])
def test_averages_include_the_buffers_of_the_model_unless_others_are_given(given: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = Normalised(rank)
        ways: dict[str, dict[str, Any]] = {
            "nothing": {"model": model},
            "none": {"model": model, "buffers": ()},
            "some": {"model": model, "buffers": [model.table]},
            "no model": {},
        }
        base = sgd(model.trunk.parameters())
        optimizer = wrap([], group, base, sync_at_start=False, **ways[given])
        for step in range(1 + rank):
            model(batch(rank, step)).sum()
        assert model.norm.running_mean is not None
        own = {name: value.clone() for name, value in model.named_buffers()}
        mean = optimizer.all_gather(model.norm.running_mean).mean(dim=0)
        with optimizer.averaged():
            now = {name: value.clone() for name, value in model.named_buffers()}
        changed = {name for name, value in now.items() if not torch.equal(value, own[name])}
        # On one rank, the table has the value of the average.
        table = {"table"} if rank != 1 else set()
        statistics = {"norm.running_mean", "norm.running_var"}
        expected = {"nothing": statistics | table, "some": table}
        assert changed == expected.get(given, set())
        if given == "nothing":
            torch.testing.assert_close(now["norm.running_mean"], mean)
            assert now["table"].tolist() == [1.0] * 3
        assert all(torch.equal(value, own[name]) for name, value in model.named_buffers())

    run_threads(3, main)


def with_infinities(rank: int) -> list[Tensor]:
    """A statistic, a causal mask, a mask with other values, and an observer without a batch."""
    mask = torch.full((3, 3), -INF).triu(1)
    return [torch.full((2,), float(rank)), mask, mask + rank, torch.tensor(INF)]


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_infinities_that_all_ranks_have_in_the_same_places_are_kept(policy: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, buffers = make_params(seed=rank), with_infinities(rank)
        optimizer = wrap(params, group, buffers=buffers, sync_at_start=False, on_nonfinite=policy)
        own = [buffer.clone() for buffer in buffers]
        before = flatten(params)
        with optimizer.averaged():
            assert not torch.equal(flatten(params), before)
            assert buffers[0].tolist() == [1.0, 1.0]
            assert torch.equal(buffers[1], with_infinities(0)[1])
            assert torch.equal(buffers[2], with_infinities(1)[2])
            assert buffers[3] == INF
        assert all(map(torch.equal, buffers, own))

    run_threads(3, main)


class Observed(nn.Module):
    """A layer, and two statistics of which one has seen a batch on rank 0 alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = make_model(seed=0)
        self.lowest = nn.Buffer(torch.tensor([-1.0, 2.0]) if rank == 0 else torch.full((2,), INF))
        self.mean = nn.Buffer(torch.full((2,), 2.0 * rank))


def observed(rank: int, group: dist.ProcessGroup, policy: Any, names: bool) -> Any:
    model = Observed(rank)
    options: dict[str, Any] = {"model": model} if names else {}
    options |= {"sync_at_start": False, "on_nonfinite": policy, "bucket_cap_mb": CAP_MB}
    base = sgd(model.layer.parameters())
    return model, wrap([], group, base, buffers=model.buffers(), **options)


@pytest.mark.parametrize("names", [True, False])
def test_an_infinity_of_one_rank_is_an_error_that_names_the_buffer(names: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = observed(rank, group, "raise", names)
        name = "lowest" if names else "0"
        with pytest.raises(NonFiniteError, match=rf"rank {rank}: .* buffer {name} .* ranks \[1\]"):
            optimizer.global_avg()
        assert model.mean.tolist() == [2.0 * rank] * 2
        assert not optimizer.is_averaged
        model.lowest.fill_(float("nan"))[rank] = 0.0
        with pytest.raises(NonFiniteError, match=rf"buffer {name} .* ranks \[0, 1\]"):
            optimizer.global_avg()

    run_threads(2, main)


def test_a_buffer_that_one_rank_lacks_is_the_mean_of_the_others_and_takes_no_other_out() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = observed(rank, group, "skip", names=True)
        with optimizer.averaged():
            assert model.lowest.tolist() == [-1.0, 2.0]
            assert model.mean.tolist() == [2.0, 2.0]
        assert model.lowest.isinf().all() == (rank > 0)

    run_threads(3, main)


class Resizing(nn.Module):
    """Changes the shapes of its buffers in its first forward pass."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model(seed=0)
        self.observer = PerChannelMinMaxObserver(ch_axis=1)
        self.scale = nn.Buffer(torch.ones(1))
        self.last = nn.Buffer(torch.zeros(()))
        self.row = nn.Buffer(torch.arange(4.0).expand(3, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        self.observer(inputs)
        self.scale.resize_(4).copy_(inputs.mean(0))
        self.last = inputs.mean(0)
        out: Tensor = self.layer(inputs)
        return out


@pytest.mark.parametrize("way", ["wrapper", "without a model", "module"])
def test_buffers_that_change_their_shapes_are_averaged_in_the_shapes_they_have(way: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = Resizing()
        if way == "module":
            called: Any = wrap_module(model, group, sync_buffer_in_global_avg=True)
            called.set_accumulate_grad()
            optimizer = called.optimizer
        else:
            options: dict[str, Any] = {"model": model} if way == "wrapper" else {}
            base = sgd(model.parameters())
            options["bucket_cap_mb"] = CAP_MB
            optimizer = wrap([], group, base, buffers=model.buffers(), **options)
        inputs = batch(rank, 0).float()
        rows = torch.stack([batch(each, 0).float() for each in range(2)])
        # The first forward pass is on the average: what it makes of the buffers does not stay.
        with optimizer.averaged():
            model(inputs.double())
        assert model.observer.min_val.shape == (0,)
        assert model.scale.tolist() == [1.0]
        assert way == "without a model" or model.last.shape == ()
        model(inputs.double())
        own = {name: value.clone() for name, value in model.named_buffers()}
        with optimizer.averaged():
            means = rows.amin(1).mean(0), rows.mean(1).mean(0)
            torch.testing.assert_close(model.observer.min_val, means[0])
            torch.testing.assert_close(model.scale, means[1])
            if way != "without a model":
                torch.testing.assert_close(model.last.float(), means[1])
            model(2 * inputs.double())
        now = dict(model.named_buffers())
        known = own.keys() - ({"last"} if way == "without a model" else set())
        assert all(torch.equal(now[name], own[name]) for name in known)
        # Another shape on one rank: the others do not wait for it.
        model.scale.resize_(4 + rank).fill_(rank)
        with optimizer.averaged():
            assert model.scale.tolist() == [rank] * (4 + rank)
            torch.testing.assert_close(model.observer.min_val, means[0])

    run_threads(2, main)


class Spectral(nn.Module):
    """Both spectral norms of torch, and a unit vector in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 16))
        self.second = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.vector_u = nn.Parameter(torch.ones(1, 4) / 2, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(inputs).tanh())
        return out


def test_unit_vectors_stay_so_that_the_averaged_spectral_norms_are_about_one() -> None:
    def main(rank: int, group: dist.ProcessGroup, names: bool) -> None:
        model = built_from_one_seed(Spectral)
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"model": model} if names else {}
        options |= {"buffers": model.buffers(), "topology": "ring", "bucket_cap_mb": 1e-4}
        optimizer = wrap([], group, base, **options)
        assert len(optimizer.buckets) >= 2
        for step in range(8):
            inputs = batch(rank, step, dtype=torch.float32)
            optimizer.zero_grad()
            backward((model(inputs) - rank).square().mean())
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model.vector_u.copy_(torch.eye(4)[rank : rank + 1])
            # As good a pair of singular vectors.
            for vector in model.buffers():
                vector.mul_((-1) ** rank)
            own = {name: value.clone() for name, value in model.named_buffers()}
            moved = flat(model)
            with optimizer.averaged():
                assert not torch.equal(flat(model), moved)
                model(inputs)
                norms = [torch.linalg.matrix_norm(m.weight, 2) for m in (model.first, model.second)]
                assert all(0.9 < norm < 1.5 for norm in norms), norms
                assert torch.equal(model.vector_u[0], torch.eye(4)[rank])
        assert all(torch.equal(value, own[name]) for name, value in model.named_buffers())

    for names in (True, False):
        run_threads(4, partial(main, names=names))


def test_a_vector_of_another_length_is_averaged() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        params, buffer = make_params(), 1.01 * torch.eye(2)[rank]
        optimizer = wrap(params, group, buffers=[buffer], sync_at_start=False)
        take_steps(optimizer, params, rank, range(1))
        with optimizer.averaged():
            return buffer.tolist()

    for row in run_threads(2, main):
        assert row == pytest.approx([0.505, 0.505])


def test_a_buffer_that_was_replaced_in_inference_mode_is_averaged() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = Resizing()
        coarse = model.coarse = nn.Buffer(torch.full((2,), rank).to(torch.float8_e4m3fn))
        base = sgd(model.layer.parameters())
        buffers = [each for each in model.buffers() if each is not coarse]
        optimizer = wrap([], group, base, model=model, buffers=[*buffers, coarse])
        model.coarse.copy_(torch.full((2,), rank))
        with torch.inference_mode():
            model.last = torch.full((2,), float(rank))
        with optimizer.averaged():
            assert model.coarse.float().tolist() == [rank] * 2, "torch adds none of 8 bits"
            found: list[float] = model.last.tolist()
        assert model.last.tolist() == [rank] * 2
        return found

    assert run_threads(2, main) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("overlap", ["forward", True])
def test_a_frozen_parameter_that_was_replaced_is_averaged(overlap: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        student, teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        model = nn.ModuleList([student, teacher])
        base = sgd(student.parameters())
        optimizer = wrap([], group, base, model=model, overlap=overlap)
        loaded = {"weight": torch.full((2, 2), float(rank)), "bias": torch.zeros(2)}
        teacher.load_state_dict(loaded, assign=True)
        teacher.requires_grad_(False)
        student(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with optimizer.averaged():
            found: list[float] = teacher.weight.flatten().tolist()
        assert teacher.weight.tolist() == [[rank] * 2] * 2
        return found

    assert run_threads(2, main) == [[0.5] * 4] * 2
