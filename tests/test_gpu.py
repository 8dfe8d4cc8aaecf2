"""The path of a GPU, on CUDA tensors without a GPU: what a step asks of torch and of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from covering import pairwise
from fake_cuda import FakeCuda, FakeGroup, Noted, fake_cuda
from torch import nn, optim

from decent_optim_wrapper import DecentOptimWrapper, Schedule

NCCL = "cpu:gloo,cuda:nccl"
# Four parameters of 4,000 bytes fit into a bucket.
CAP_MB = 0.016
PARAMETERS = 8
BUCKETS = 2
# Steps after which nothing is compared any more to find ranks that are the same.
SETTLED = 24
# Calls of a round, whatever the number of its buckets.
PER_ROUND = 8
WAITS = ("read", "copy", "spin", "wait")

FORMS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"param_as_bucket_view": True},
    "bf16": {"comm_dtype": torch.bfloat16},
    "bf16-views": {"comm_dtype": torch.bfloat16, "param_as_bucket_view": True},
    "skip": {"on_nonfinite": "skip"},
    "ignore": {"on_nonfinite": "ignore"},
    "late": {"schedule": Schedule(gossip_every=2, staleness=2)},
    "exact": {"schedule": Schedule(global_avg_every=2)},
    "tracking": {"gradient_tracking": True},
    "states": {"schedule": Schedule(average_state=("momentum_buffer",))},
    "no-overlap": {"overlap": False},
}
WORLDS = {"pair": ("ring", 2), "group": ("complete", 4), "large group": ("complete", 20)}


class Setup(NamedTuple):
    """A wrapper on fake CUDA parameters."""

    mode: FakeCuda
    group: FakeGroup
    params: list[nn.Parameter]
    optimizer: DecentOptimWrapper

    def step(self, count: int = 1) -> None:
        """Make steps."""
        for _ in range(count):
            self.mode.step += 1
            self.optimizer.step()

    def noted(self) -> list[Noted]:
        """What two settled steps do."""
        self.step(SETTLED)
        self.mode.noted.clear()
        self.step(2)
        return list(self.mode.noted)


@contextmanager
def wrapped(kind: str, world: str = "pair", base: Any = None, **options: Any) -> Iterator[Setup]:
    topology, size = WORLDS[world]
    with fake_cuda(kind, size) as (mode, group):
        params = [nn.Parameter(torch.empty(1000, device="cuda")) for _ in range(PARAMETERS)]
        for param in params:
            param.grad = torch.empty_like(param)
        base = base or optim.SGD(params, lr=0.1, momentum=0.9)
        made = base(params) if isinstance(base, type) else base
        optimizer = DecentOptimWrapper(
            made, topology=topology, process_group=group, bucket_cap_mb=CAP_MB, **options
        )
        yield Setup(mode, group, params, optimizer)


def waits(noted: list[Noted]) -> list[Noted]:
    return [each for each in noted if each.kind in WAITS]


@pytest.mark.parametrize(
    ("kind", "world", "form"),
    pairwise({k: k for k in ("nccl", NCCL)}, {w: w for w in WORLDS}, {f: f for f in FORMS}),
)
def test_the_host_waits_for_nothing_in_a_step(kind: str, world: str, form: str) -> None:
    with wrapped(kind, world, **FORMS[form]) as setup:
        assert setup.optimizer.stats().buckets in (0, BUCKETS)
        assert not waits(setup.noted())


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("tracking", "states")])
@pytest.mark.parametrize("world", ["pair", "group"])
def test_a_step_calls_torch_at_most_12_times_for_a_bucket(world: str, form: str) -> None:
    with wrapped(NCCL, world, **FORMS[form]) as setup:
        calls = [each for each in setup.noted() if each.kind == "call"]
        assert calls
        per_bucket = 14 if (world, form) == ("group", "skip") else 12
        assert len(calls) <= 2 * (per_bucket * BUCKETS + PER_ROUND)
