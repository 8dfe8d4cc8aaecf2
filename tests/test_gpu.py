"""The path of a GPU, on CUDA tensors without a GPU: what a step asks of torch and of the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import pairwise
from fake_cuda import FakeCuda, FakeGroup, Noted, fake_cuda
from ranks import run_threads
from torch import nn, optim
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.comm.process_groups import abort, backend_of, new_communicator
from decent_optim_wrapper.ddp.backward_step import BackwardOptimizer
from decent_optim_wrapper.ddp.unscale_and_clip import UnscaleAndClip
from decent_optim_wrapper.extensions import identical_ranks

pytestmark = pytest.mark.slow

NCCL = "cpu:gloo,cuda:nccl"
# Four parameters of 4,000 bytes fit into a bucket.
CAP_MB = 0.016
PARAMETERS = 8
BUCKETS = 2
# Steps after which every kind of round was made, and nothing is compared any more to find ranks
# that are the same: these are rounds of up to two steps, and the host reads one a round later.
SETTLED = 8
COMPARED = SETTLED // 2 - 2
# Calls of a round, whatever the number of its buckets.
PER_ROUND = 8
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
WAITS = ("read", "copy", "spin", "wait")


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identical_ranks, "LONGEST_SEARCH", COMPARED)


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
def wrapped(
    kind: str,
    world: str = "pair",
    base: Callable[..., optim.Optimizer] = SGD,
    **options: Any,
) -> Iterator[Setup]:
    topology, size = WORLDS[world]
    with fake_cuda(kind, size) as (mode, group):
        params = [nn.Parameter(torch.empty(1000, device="cuda")) for _ in range(PARAMETERS)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = DecentOptimWrapper(
            base(params), topology=topology, process_group=group, bucket_cap_mb=CAP_MB, **options
        )
        yield Setup(mode, group, params, optimizer)


def waits(noted: Sequence[Noted]) -> list[Noted]:
    return [each for each in noted if each.kind in WAITS]


@pytest.mark.parametrize(
    ("kind", "world", "form"),
    pairwise({k: k for k in ("nccl", NCCL)}, {w: w for w in WORLDS}, {f: f for f in FORMS}),
)
def test_the_host_waits_for_nothing_in_a_step(kind: str, world: str, form: str) -> None:
    with wrapped(kind, world, **FORMS[form]) as setup:
        setup.step()
        assert setup.optimizer.stats().buckets == BUCKETS
        setup.mode.noted.clear()
        # Those that compare what arrives, too.
        setup.step(SETTLED)
        assert not waits(setup.mode.noted)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("tracking", "states")])
@pytest.mark.parametrize("world", ["pair", "group"])
def test_a_step_calls_torch_at_most_12_times_for_a_bucket(world: str, form: str) -> None:
    with wrapped(NCCL, world, **FORMS[form]) as setup:
        calls = [each for each in setup.noted() if each.kind == "call"]
        assert calls
        per_bucket = 14 if (world, form) == ("group", "skip") else 12
        assert len(calls) <= 2 * (per_bucket * BUCKETS + PER_ROUND)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_backward_pass_waits_for_nothing(views: bool, scaled: bool) -> None:
    """Without the autograd engine, which asks the driver for streams."""
    with fake_cuda(NCCL) as (mode, group):
        model = nn.Sequential(*(nn.Linear(31, 31, device="cuda") for _ in range(PARAMETERS)))
        base = optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cuda") if scaled else None
        optimizer = BackwardOptimizer(
            base,
            model,
            average_buffers=False,
            topology="ring",
            bucket_cap_mb=CAP_MB,
            param_as_bucket_view=views,
            process_group=group,
        )
        unscale_and_clip = UnscaleAndClip(scaler, 0.0, fused=base)
        for _ in range(SETTLED):
            mode.step += 1
            mode.noted.clear()
            for param in model.parameters():
                param.grad = torch.empty_like(param)
            if scaler is not None:
                scaler.scale(torch.ones((), device="cuda"))
            with optimizer.in_parts(unscale_and_clip.step_part) as advance:
                for bucket in optimizer.buckets:
                    advance(bucket)
            unscale_and_clip.end()
        assert len(optimizer.buckets) >= BUCKETS
        assert [each for each in mode.noted if each.kind == "call"]
        assert not waits(mode.noted)


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaled_step_reads_at_most_once_whether_there_was_an_overflow(fused: bool) -> None:
    with wrapped(NCCL, base=partial(optim.AdamW, lr=0.1, fused=fused)) as setup:
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(SETTLED):
            setup.mode.step += 1
            setup.mode.noted.clear()
            scaler.scale(torch.ones((), device="cuda"))
            scaler.step(setup.optimizer)
            scaler.update()
        reads = [each for each in waits(setup.mode.noted) if "grad_scale" not in each.where]
        assert len(reads) == (0 if fused else 1)


@pytest.mark.parametrize("kind", ["nccl", NCCL, "gloo"])
def test_an_average_reads_once_for_all_parameters(kind: str) -> None:
    with wrapped(kind) as setup:
        setup.step()
        for call, reads in (("global_avg", 1), ("revert_global_avg", 0), ("consensus_distance", 1)):
            setup.mode.noted.clear()
            setup.mode.step += 1
            getattr(setup.optimizer, call)()
            found = waits(setup.mode.noted)
            # Over gloo, the values themselves go to the CPU and back, bucket by bucket.
            crossing = 2 * BUCKETS if kind == "gloo" else 0
            assert len(found) <= reads + crossing, found


@pytest.mark.parametrize("world", ["pair", "group"])
@pytest.mark.parametrize("form", ["copies", "views", "bf16", "late", "tracking", "int8"])
def test_over_gloo_only_threads_wait_for_the_gpu(world: str, form: str) -> None:
    options = {"comm_dtype": torch.int8} if form == "int8" else FORMS[form]
    with wrapped("gloo", world, **options) as setup:
        setup.noted()
        # A thread may post the last round later.
        setup.step(2)
        found = waits(setup.mode.noted)
        assert found
        assert all(each.kind == "wait" and "streams.py:_run" in each.where for each in found)


def test_nccl_has_communicators_of_its_own_whose_first_call_all_ranks_make() -> None:
    with wrapped("nccl", "pair") as setup:
        setup.step(3)
        (own,) = setup.group.made
        assert not setup.group.calls
        on_gpu = [call for call, device in own.calls if device == "cuda"]
        assert on_gpu[0] == "allreduce"
        assert "exchange" in on_gpu
        assert "send" in [call for call, device in own.calls if device == "cpu"]


def test_all_ranks_make_the_first_call_also_on_a_gpu_that_comes_later() -> None:
    with fake_cuda(NCCL, 4) as (_, group):
        optimizer = DecentOptimWrapper(
            SGD([make_trained("cpu"), make_trained("cpu")]),
            topology="ring",
            process_group=group,
            sync_at_start=False,
        )
        optimizer.step()
        (own,) = group.made
        assert "cuda" not in [device for _, device in own.calls]
        for _ in range(2):
            optimizer.add_param_group({"params": [make_trained("cuda"), make_trained("cuda")]})
        optimizer.step()
        on_gpu = [call for call, device in own.calls if device == "cuda"]
        assert on_gpu[0] == "allreduce"
        assert on_gpu.count("allreduce") == 1
        assert "exchange" in on_gpu


def make_trained(device: str) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(1000, device=device))
    param.grad = torch.zeros_like(param)
    return param


def test_a_wrapper_that_is_dropped_waits_for_nccl_and_shuts_it_down() -> None:
    with fake_cuda("nccl", 4) as (_, group):
        params = [nn.Parameter(torch.empty(1000, device="cuda")) for _ in range(PARAMETERS)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = DecentOptimWrapper(SGD(params), topology="ring", process_group=group)
        optimizer.step()
        (own,) = group.made
        assert ("shutdown", "cuda") not in own.calls
        del optimizer
        gc.collect()
        assert ("shutdown", "cuda") in own.calls
        assert ("abort", "cuda") not in own.calls


def test_one_rank_needs_no_communicator() -> None:
    with fake_cuda("nccl", 1) as (mode, group):
        params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for param in params:
            param.grad = torch.ones(3)
        optimizer = DecentOptimWrapper(optim.SGD(params, lr=0.1), process_group=group)
        optimizer.step()
        assert params[0].eq(-0.1).all()
        assert mode.step == 0


def test_flags_travel_to_the_gpu_of_their_bucket() -> None:
    with fake_cuda(NCCL) as (mode, group):
        params = [nn.Parameter(torch.empty(1000, device=f"cuda:{i % 2}")) for i in range(8)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = DecentOptimWrapper(
            SGD(params), topology="ring", process_group=group, bucket_cap_mb=CAP_MB
        )
        for _ in range(SETTLED):
            mode.step += 1
            mode.noted.clear()
            optimizer.step()
        assert len(optimizer.buckets) == 2
        assert not waits(mode.noted)


def test_a_default_device_pins_nothing_on_the_gpu() -> None:
    with wrapped(NCCL) as setup, torch.device("cuda"):
        assert not waits(setup.noted())


def test_large_groups_send_small_messages_on_the_cpu() -> None:
    with wrapped(NCCL, "large group") as setup:
        setup.step(3)
        own = setup.group.made[0]
        assert ("allgather", "cpu") in own.calls
        assert ("allreduce", "cuda") in own.calls


class Options:
    """Those of NCCL."""

    _timeout = timedelta(0)


@pytest.mark.parametrize("name", ["nccl", "nccl2"])
def test_a_communicator_has_gloo_for_the_cpu_and_nccl_next_to_it(name: str) -> None:
    """With gloo in the place of NCCL, which needs a GPU."""
    like = SimpleNamespace(name=lambda: name)
    store, timeout = HashStore(), timedelta(seconds=30)
    ended: list[str] = []

    def nccl(store: Any, rank: int, size: int, options: Options) -> Any:
        assert options._timeout == timeout
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def main(rank: int, group: dist.ProcessGroup) -> float:
        made = new_communicator(like, store, rank, 2, timeout)
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        assert backend_of(made, cpu) is not backend_of(made, cuda)
        sent = torch.full((3,), float(rank + 1))
        made.allreduce([sent]).wait(timeout)
        waiting = made.recv([torch.empty(3)], 1 - rank, 7)
        abort(made)
        try:
            waiting.wait(timeout)
        except RuntimeError:
            ended.append("closed")
        return float(sent.sum())

    class Nccl:
        Options = Options

        def __new__(cls, *args: Any) -> Any:
            return nccl(*args)

    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", Nccl),
    ):
        assert run_threads(2, main) == [9.0, 9.0]
    assert ended == ["closed"] * 2


def test_another_backend_is_refused() -> None:
    like = SimpleNamespace(name=lambda: "mpi")
    with pytest.raises(ValueError, match="expected a gloo or nccl backend"):
        new_communicator(like, HashStore(), 0, 2, timedelta(seconds=1))
