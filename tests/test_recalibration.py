"""Batch norms that are recalibrated on an average, and what else stays as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, pairwise
from problem import wrap
from ranks import run_threads
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.ddp import DecentralizedDataParallel

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
        self.double().train()
        nn.init.constant_(self.frozen.get_buffer("running_mean"), 0.5)

    def train(self, mode: bool = True) -> Buffered:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        hidden = self.drop(self.norm(self.frozen(self.second(self.first(x)))))
        return self.instance(hidden.T.unsqueeze(0))[0].T + self.row  # type: ignore[no-any-return]

    def mean_at_norm(self, given: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The mean of the inputs of the norm that is recalibrated."""
        return torch.cat([self.frozen(self.second(self.first(x))) for x, _ in given]).mean(0)

    def modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.named_modules()}


def buffered() -> tuple[Buffered, DecentOptimWrapper]:
    """In a world of one."""
    model = built_from_one_seed(Buffered)
    return model, DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x + rank, x[:, :2]) for x in draw]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_statistics_stay_where_the_average_is_kept() -> None:
    """And random numbers go on as if dropout had drawn none."""
    model, optimizer = buffered()
    probe = batches(3, 2)
    random = torch.get_rng_state()
    with optimizer.averaged(recalibrate=(model, probe)):
        found = model.norm.get_buffer("running_mean")
        kept = found.clone()
        optimizer.global_avg(may_revert=False)
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
    ],
)
def test_what_does_not_recalibrate_leaves_batch_norms_as_they_were(
    given: Callable[[nn.Module], Any], error: type[Exception], words: str
) -> None:
    model, optimizer = buffered()
    model.eval()
    own, averaged = state_of(model), optimizer.averaged(recalibrate=given(model))
    with pytest.raises(error, match=words), averaged:
        pass
    assert model.norm.momentum == 0.1
    assert not model.training
    assert equal(state_of(model), own)


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
        base = torch.optim.SGD(params, lr=0.1)
        module = DecentralizedDataParallel(model, lambda _: base, process_group=group)
        # It makes no steps.
        module.set_accumulate_grad()
        options: Any = {"topology": "ring", "param_as_bucket_view": views}
        optimizer = wrap(params, group, base, buffers=buffers, **options)
        assert len(optimizer.buckets) > 1
        model.train()
        for x, _ in batches(rank, 3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        model.drop.eval()
        if evaluating:
            model.eval()
        own, modes, objects = state_of(model), model.modes(), dict(model.named_buffers())
        with optimizer.averaged():
            on_average = state_of(model)
        twin = built_from_one_seed(Buffered)
        twin.load_state_dict({n: v for n, v in on_average.items() if n != "row"}, strict=False)
        mean = twin.train().mean_at_norm(batches(7, 3))
        with optimizer.averaged(recalibrate=(model if evaluating else module, batches(7, 3))):
            assert model.modes() == modes
            inside = state_of(model)
            changed = {n for n, value in inside.items() if not torch.equal(value, on_average[n])}
            assert changed == {"norm.running_mean", "norm.running_var"}
            assert inside["norm.num_batches_tracked"] == 3
            torch.testing.assert_close(inside["norm.running_mean"], mean)
        assert equal(state_of(model), own)
        assert all(value is objects[name] for name, value in model.named_buffers())
        assert model.modes() == modes
        assert any(modes.values()) != evaluating

    run_threads(2, main)
