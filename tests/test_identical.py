"""Ranks that stay the same although they train are warned of, and nobody else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, pairwise
from problem import MODES, TINY_CAP_MB, backward, flatten, make_params, wrap
from ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warned import warned_texts

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.codecs import CastCodec
from decent_optim_wrapper.extensions.identical_ranks import LONGEST_SEARCH, IdenticalRanks
from decent_optim_wrapper.wire.exchange import PlainPair

WORLDS = {name: (name, size) for name, size in (("ring", 4), ("complete", 5), ("greedy", 5))}
WIRES: dict[str, dict[str, Any]] = {
    **{name: MODES[name] for name in ("copies", "bf16-views")},
    # Sums of many ranks, which round.
    "half precision": {"dtype": torch.bfloat16},
    "double precision": {"dtype": torch.float64},
}
WORDS = "the peers have sent the same values as this rank"


def train(
    size: int,
    same: bool,
    steps: int = 4,
    lr: Callable[[int], float] = lambda step: 0.05,
    change: Callable[[Any], Tensor | None] = lambda grad: grad,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[Tensor], int]:
    """Train on the same data or on those of each rank; the parameters, and how many warnings."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=dtype)
        optimizer = wrap(params, group, torch.optim.SGD(params, lr=0.05), **options)
        assert len(optimizer.buckets) >= 2
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr(step)
            backward(params, 0 if same else rank, step)
            for param in params:
                param.grad = change(param.grad)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    with warned_texts() as texts:
        rows = run_threads(size, main)
    return rows, sum(WORDS in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "wire", "overlap", "same"),
    pairwise(WORLDS, WIRES, OVERLAP, {"same data": True, "own data": False}),
)
def test_the_same_data_on_every_rank_is_warned_of_once(
    world: tuple[str, int], wire: dict[str, Any], overlap: bool, same: bool
) -> None:
    topology, size = world
    rows, warned = train(size, same, topology=topology, overlap=overlap, **wire)
    assert warned == same
    for row in rows if same else ():
        torch.testing.assert_close(row, rows[0], rtol=1e-6, atol=0)
    start = flatten(make_params(dtype=wire.get("dtype", torch.float32)))
    assert not torch.equal(rows[0], start)


def test_the_warning_comes_with_the_third_round() -> None:
    for steps, expected in ((2, 0), (3, 1)):
        _, warned = train(2, same=True, steps=steps, overlap=False)
        assert warned == expected


# A reference would make the steps of the codes as small as the updates.
ROUNDING = CastCodec(torch.bfloat16, uses_reference=False)


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({"lr": lambda step: 0.01 * (step >= 1)}, True),
        ({"lr": lambda step: 0.01 * (step >= 22), "steps": 28}, True),
        ({"lr": lambda step: 1e-6, "comm_dtype": ROUNDING}, True),
        ({"change": lambda grad: None, "steps": 6}, False),
        ({"change": torch.zeros_like, "steps": 6}, False),
    ],
    ids=["warm-up", "long warm-up", "updates below the rounding", "no gradients", "zeros"],
)
def test_what_keeps_ranks_the_same_for_a_while_is_no_reason_to_warn(
    options: dict[str, Any], moves: bool
) -> None:
    rows, warned = train(2, same=False, **options)
    assert warned == 0
    assert torch.equal(rows[0], flatten(make_params(dtype=torch.float32))) != moves


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(kind, name)

    def counted(*args: Any) -> Any:
        calls.append(None)
        return method(*args)

    monkeypatch.setattr(kind, name, counted)
    return calls


def test_looking_ends_with_the_first_difference_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = count_calls(monkeypatch, PlainPair, "compare")
    train(2, same=False)
    assert len(looks) == 1
    looks.clear()
    train(2, same=False, steps=24, lr=lambda step: 0.0)
    assert 0 < len(looks) <= LONGEST_SEARCH * 3
    # Also where there is nobody to compare with.
    rounds = count_calls(monkeypatch, IdenticalRanks, "end_round")
    train(1, same=True, steps=LONGEST_SEARCH + 5)
    assert len(rounds) == LONGEST_SEARCH == 20


def train_under_ddp(rank: int) -> tuple[int, list[float]]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = DistributedDataParallel(nn.Linear(4, 6))
    base = torch.optim.SGD(network.parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(base, topology="ring", bucket_cap_mb=TINY_CAP_MB)
    generator = torch.Generator().manual_seed(rank)
    with warned_texts() as texts:
        for _ in range(6):
            optimizer.zero_grad()
            network(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
    dist.destroy_process_group()
    values: list[float] = flatten(list(network.parameters())).tolist()
    return sum(WORDS in text for text in texts), values


@pytest.mark.slow
def test_ddp_left_around_the_model_is_warned_of_on_rank_0() -> None:
    (first, one), (second, other) = run_processes(2, train_under_ddp)
    assert (first, second) == (1, 0)
    assert one == other
