"""How values travel: split updates, parameters as bucket views, memory, calls, statistics."""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, flatten, in_one_call, make_params, take_steps
from ranks import TIMEOUT, run_processes, run_threads
from torch import Tensor, nn, optim
from torch._C._distributed_c10d import HashStore
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.optim import AccumAdam, AccumAdamW, AdamW
from decent_optim_wrapper.optim.splittable import SPLITTABLE

wrap = partial(problem.wrap, topology="ring")

OWN: tuple[type[Optimizer], ...] = (AccumAdam, AccumAdamW, AdamW)

CASES = [
    *((kind, variant) for kind in (*SPLITTABLE, *OWN) for variant in ({}, {"foreach": True})),
    *((kind, {"fused": True}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)),
]


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_a_split_update_is_the_whole_one_bit_for_bit(
    kind: type[Optimizer], variant: dict[str, Any]
) -> None:
    wanted = {"lr": 0.05, "weight_decay": 0.01, **variant}
    known = inspect.signature(kind.__init__).parameters
    arguments: dict[str, Any] = {key: wanted[key] for key in wanted if key in known}

    def train(change: Callable[[Optimizer], Optimizer]) -> Tensor:
        params = make_params(dtype=torch.float32)
        groups: Any = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
        if kind is optim.Muon:
            groups = [param for param in params if param.ndim == 2]
        optimizer = wrap(params, base=change(kind(groups, **arguments)))
        take_steps(optimizer, params, 0, range(5))
        return flatten(params)

    split = train(lambda base: base)
    assert torch.equal(split, train(in_one_call))
    assert not torch.equal(split, flatten(make_params(dtype=torch.float32)))


def test_the_groups_survive_an_update_that_raises() -> None:
    params = make_params()
    optimizer = wrap(params)
    groups = optimizer.param_groups
    groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        take_steps(optimizer, params, 0, range(1))
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == len(params)


def set_data(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], object]:
    def replace(layer: nn.Linear) -> None:
        layer.weight.data = change(layer.weight.data)

    return replace


@pytest.mark.parametrize(
    "replace", [*map(set_data, (torch.clone, torch.t, torch.flatten)), nn.Linear.double]
)
def test_a_replaced_storage_is_named_by_whatever_comes_next(
    replace: Callable[[nn.Linear], object],
) -> None:
    last = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(nn.Linear(3, 2), last)
    base = optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(base, param_as_bucket_view=True, bucket_cap_mb=TINY_CAP_MB)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    replace(last)
    words = r"rank 0: .* storage of 1\.weight was replaced .*; move"
    for call in ("step", "global_avg", "consensus_distance", "synchronize"):
        with pytest.raises(RuntimeError, match=words):
            getattr(optimizer, call)()


def test_parameters_on_the_same_memory_are_named() -> None:
    whole = torch.zeros(10)
    params = [("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(whole[:6]))]
    DecentOptimWrapper(optim.SGD([*params, ("c", nn.Parameter(whole[6:]))]))
    base = optim.SGD([*params, ("c", nn.Parameter(whole[5:]))])
    for views in (True, False):
        with pytest.raises(ValueError, match="b and c overlap; tie them by using the same"):
            DecentOptimWrapper(base, param_as_bucket_view=views)


@pytest.mark.parametrize(("comm", "share"), [(None, 1.0), (torch.bfloat16, 0.25)])
def test_stats_describe_the_last_step_whatever_came_after(
    comm: torch.dtype | None, share: float
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, comm_dtype=comm)
        assert optimizer.stats() == (0, 0.0, 0.0, 0.0, 0, 0, 0, False)
        for step in range(3):
            take_steps(optimizer, params, rank, [step])
            stats = optimizer.stats()
            assert stats.bytes_sent == sum(param.nbytes for param in params) * share
            assert (stats.rounds, stats.buckets) == (step + 1, 3)
            assert min(stats.mix_seconds, stats.update_seconds) > 0
            assert (stats.wait_seconds > 0) == (step > 0)
        # The other rank waits, but in no step.
        time.sleep(0.1 * rank)
        with optimizer.averaged():
            optimizer.consensus_distance()
        optimizer.synchronize()
        assert optimizer.stats() == stats

    run_threads(2, main)


def ranges_in_a_profile(rank: int) -> set[str]:
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = wrap(params)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        take_steps(optimizer, params, rank, range(2))
    dist.destroy_process_group()
    return {event.key for event in recorded.key_averages()}


def test_the_threads_of_our_communicators_take_no_core_from_one_that_sends() -> None:
    policy, threads = os.sched_getscheduler(0), Path("/proc/self/task")
    before = set(threads.iterdir())
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        communicator = connect_gloo(HashStore(), 0, 1, TIMEOUT)
        made = set(threads.iterdir()) - before
        assert {os.sched_getscheduler(int(each.name)) for each in made} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    assert communicator.size() == 1


@pytest.mark.slow
def test_a_profile_shows_what_a_step_does() -> None:
    # In processes: a profile that is freed by another thread can crash.
    for names in run_processes(2, ranges_in_a_profile):
        assert {f"decent::{what}" for what in ("wait", "mix", "update", "launch")} <= names


def reachable(root: object) -> Iterator[object]:
    """The objects to which `root` refers, directly or not."""
    seen: set[int] = set()
    found = [root]
    while found:
        thing = found.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(thing))
        yield thing
        found += gc.get_referents(thing)


# Two packed messages, of which views need one less; sums of half precision are in float32.
INT8_PAIR = 2 * 65 / 64 / 4
BUFFERS = [
    ("ring", torch.float32, None, True, 1.0),
    ("complete", torch.float32, None, False, 2.0),
    ("complete", torch.bfloat16, None, True, 2.0),
    # Beside the codes a reference in float32 for each of two groups.
    ("ring", torch.float32, torch.int8, True, INT8_PAIR + 2),
    # One reference, and the error of this rank's quarter beside what it is sent as.
    ("complete", torch.float32, torch.int8, False, 1 + INT8_PAIR + 1 + (4 + 65 / 64) / 16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "dtype", "comm", "views", "limit"), BUFFERS)
def test_wire_buffers_stay_within_their_limit(
    topology: str, dtype: torch.dtype, comm: torch.dtype | None, views: bool, limit: float
) -> None:
    """Counts the bytes of every tensor of the rounds, beyond the parameters."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float, float]:
        params = [torch.zeros(50_000, dtype=dtype, requires_grad=True) for _ in range(4)]
        options = {"param_as_bucket_view": views, "comm_dtype": comm, "bucket_cap_mb": 0.4}
        optimizer = wrap(params, group, optim.SGD(params, lr=0.1), topology=topology, **options)
        own = {param.untyped_storage().data_ptr() for param in params}

        def beyond() -> float:
            tensors = [each for each in reachable(optimizer) if isinstance(each, Tensor)]
            storages = [tensor.untyped_storage() for tensor in tensors]
            sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            others = sum(nbytes for address, nbytes in sizes.items() if address not in own)
            return others / sum(param.nbytes for param in params)

        for _ in range(3):
            optimizer.step()
        rounds = beyond()
        optimizer.global_avg()
        averaged = beyond()
        optimizer.revert_global_avg()
        return rounds, averaged, beyond()

    for rounds, averaged, after in run_threads(4, main):
        assert 0 < rounds <= limit + 0.01
        assert averaged == pytest.approx(rounds + 1, abs=0.01)
        assert after == pytest.approx(rounds, abs=0.01)
