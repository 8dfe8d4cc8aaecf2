"""The path of a GPU, on CUDA tensors without a GPU: what a step asks of torch and of the host."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, cycle, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from fake_cuda import FakeCuda, FakeGroup, Noted, fake_cuda
from modules import Detached, wrap_base
from torch import nn, optim
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    GradientTracking,
    Late,
    PeerError,
    Schedule,
    StateGossip,
)
from decent_optim_wrapper.comm import background
from decent_optim_wrapper.comm.process_groups import abort, backend_of, new_communicator
from decent_optim_wrapper.ddp.unscale_and_clip import UnscaleAndClip
from decent_optim_wrapper.optim import AccumAdam

pytestmark = pytest.mark.slow

NCCL = "cpu:gloo,cuda:nccl"
# Four parameters of 4,000 bytes fit into a bucket.
CAP_MB = 0.016
PARAMETERS = 8
BUCKETS = 2
# Steps after which every kind of round was made.
SETTLED = 6
# Calls of a round, whatever the number of its buckets.
PER_ROUND = 8
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
WAITS = ("read", "copy", "spin", "wait")


FORMS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"param_as_bucket_view": True},
    "bf16": {"comm_dtype": torch.bfloat16},
    "bf16-views": {"comm_dtype": torch.bfloat16, "param_as_bucket_view": True},
    "int8": {"comm_dtype": torch.int8},
    "skip": {"on_nonfinite": "skip"},
    "ignore": {"on_nonfinite": "ignore"},
    "late": {"schedule": Schedule(gossip_every=2), "overlap": Late(2)},
    "exact": {"schedule": Schedule(global_avg_every=2)},
    "tracking": {"extensions": [GradientTracking()]},
    "states": {"extensions": [StateGossip("momentum_buffer")]},
    "no-overlap": {"overlap": False},
    "accum": {"base": partial(AccumAdam, lr=0.1, accum_iter=2)},
}
PLACES = [("nccl", "pair"), (NCCL, "group"), (NCCL, "pair"), ("nccl", "group")]
WORLDS = {"pair": ("ring", 2), "group": ("complete", 4), "large group": ("complete", 20)}


def make_trained(*devices: str) -> list[nn.Parameter]:
    """Parameters with gradients."""
    params = [nn.Parameter(torch.zeros(1000, device=device)) for device in devices]
    for param in params:
        param.grad = torch.zeros_like(param)
    return params


class Setup(NamedTuple):
    """A wrapper on fake CUDA parameters."""

    mode: FakeCuda
    group: FakeGroup
    optimizer: DecentOptimWrapper

    def calls(self, device: str = "cuda") -> list[str]:
        """What was called on the first communicator that the library has made."""
        return [call.name for call in self.mode.calls if call.group == 0 and call.device == device]

    def step(self, count: int = 1) -> None:
        """Make steps."""
        for _ in range(count):
            self.mode.step += 1
            self.optimizer.step()

    def noted(self, count: int) -> list[Noted]:
        """What so many steps do."""
        self.mode.noted.clear()
        self.step(count)
        return list(self.mode.noted)

    def sent(self) -> list[str]:
        """What the GPU is asked to send in a step."""
        self.mode.calls.clear()
        self.step()
        return self.calls()


@contextmanager
def wrapped(
    kind: str,
    topology: str = "ring",
    size: int = 2,
    base: Callable[..., optim.Optimizer] = SGD,
    devices: Sequence[str] = ("cuda",) * PARAMETERS,
    **options: Any,
) -> Iterator[Setup]:
    with fake_cuda(kind, size) as (mode, group):
        optimizer = DecentOptimWrapper(
            base(make_trained(*devices)),
            topology=topology,
            process_group=group,
            bucket_cap_mb=CAP_MB,
            **options,
        )
        yield Setup(mode, group, optimizer)


def waits(noted: Sequence[Noted]) -> list[Noted]:
    return [each for each in noted if each.kind in WAITS]


MESSAGE = ["coalesced", "send", "recv", "exchange"]
# What the GPU is asked to send in a round: one kernel for each bucket, and one for the flags.
SENT = {
    **dict.fromkeys([("pair", "copies"), ("pair", "int8")], MESSAGE * (BUCKETS + 1)),
    ("pair", "ignore"): MESSAGE * BUCKETS,
    ("group", "tracking"): ["allreduce"] * 2 * BUCKETS + ["allgather"],
    **dict.fromkeys(
        [("group", "views"), ("group", "no-overlap")], ["allreduce"] * BUCKETS + ["allgather"]
    ),
}


@pytest.mark.parametrize(
    ("kind", "world", "form"),
    [
        *((*place, form) for place, form in zip(cycle(PLACES), FORMS)),
        *((NCCL, "large group", form) for form in ("bf16-views", "tracking")),
    ],
)
def test_a_step_waits_for_nothing_and_calls_torch_at_most_12_times_for_a_bucket(
    kind: str, world: str, form: str
) -> None:
    with wrapped(kind, *WORLDS[world], **FORMS[form]) as setup:
        setup.step()
        assert setup.optimizer.stats().buckets == BUCKETS
        assert not waits(setup.noted(SETTLED))
        noted = setup.noted(2)
        assert not waits(noted)
        calls = [each for each in noted if each.kind == "call"]
        assert calls
        # Some send more, and a base of ours computes in these calls, too.
        more = form in ("tracking", "states", "int8", "accum") or world == "large group"
        per_bucket = 14 if (world, form) == ("group", "skip") else 12
        assert more or len(calls) <= 2 * (per_bucket * BUCKETS + PER_ROUND)
        # The user's NCCL is left alone, and small messages are sent by the CPU.
        assert {call.device for call in setup.mode.calls if call.group < 0} <= {"cpu"}
        assert {"send", "allgather"} & {*setup.calls("cpu")}
        assert {"exchange", "allreduce"} & {*setup.calls()}
        sent = setup.sent()
        assert SENT.get((world, form), sent) == sent


def make_detached(layers: int = PARAMETERS) -> nn.Sequential:
    return nn.Sequential(*(Detached(31, 31, device="cuda") for _ in range(layers)))


def step_in_parts(optimizer: Any, model: nn.Module, update: Any) -> None:
    """What a backward pass does, whose engine would ask the driver for streams."""
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    with optimizer.in_parts(update) as advance:
        for bucket in optimizer.buckets:
            advance(bucket)


@pytest.mark.parametrize(
    ("world", "views", "scaled", "overlap", "form"),
    pairwise(
        named("pair", "group"),
        *(VIEWS, {"scaled": True, "unscaled": False}, {"overlap": True, "forward": "forward"}),
        named("copies", "int8", "ignore"),
    ),
)
def test_a_backward_pass_waits_for_nothing(
    world: str, views: bool, scaled: bool, overlap: Any, form: str
) -> None:
    topology, size = WORLDS[world]
    with fake_cuda(NCCL, size) as (mode, group):
        model = make_detached()
        scaler = torch.amp.GradScaler("cuda") if scaled else None
        options = {"topology": topology, "param_as_bucket_view": views, "overlap": overlap}
        options |= {"bucket_cap_mb": CAP_MB, **FORMS[form]}
        base = partial(optim.AdamW, lr=0.1, fused=True)
        optimizer: Any = wrap_base(model, group, base, reverse=True, **options)
        unscale_and_clip = UnscaleAndClip(scaler, 0.0, fused=optimizer.optimizer)
        mixed: list[int] = []
        waited: list[set[str]] = []

        def look(*_: object) -> None:
            mixed.append(sum("round.py:_apply" in each.where for each in mode.noted))
            waited.append({each.what for each in mode.noted if each.kind == "order"})

        for module in model:
            module.register_forward_hook(look)
        for step in range(4):
            mode.step += 1
            mode.noted.clear()
            mixed.clear()
            waited.clear()
            model(torch.empty(3, 31, device="cuda"))
            # Bucket by bucket before it is read, or with the next update.
            by_bucket = overlap == "forward" and step > 0
            assert (0 < mixed[0] < mixed[-1]) == by_bucket
            # It waits for the messages of this bucket only, too.
            assert (0 < len(waited[0]) < len(waited[-1])) == by_bucket
            if scaler is not None:
                scaler.scale(torch.ones((), device="cuda"))
            step_in_parts(optimizer, model, unscale_and_clip.step_part)
            unscale_and_clip.update_scale()
        assert len(optimizer.buckets) >= BUCKETS
        assert [each for each in mode.noted if each.kind == "call"]
        assert not waits(mode.noted)


@pytest.mark.parametrize("form", ["copies", "views", "int8", "ignore"])
def test_over_gloo_nothing_is_received_where_the_gpu_may_still_read(form: str) -> None:
    with fake_cuda("gloo") as (mode, group):
        model = make_detached()
        options = {"bucket_cap_mb": CAP_MB, "overlap": "forward", **FORMS[form]}
        optimizer: Any = wrap_base(model, group, SGD, reverse=True, **options)
        for _ in range(SETTLED):
            mode.step += 1
            model(torch.empty(3, 31, device="cuda"))
            step_in_parts(optimizer, model, lambda *_: None)
        assert len(optimizer.buckets) >= BUCKETS
        assert mode.copied
        assert not [each for each in mode.noted if each.kind == "overwrite"]


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


@pytest.mark.parametrize(
    ("world", "form"),
    [
        *(("pair", form) for form in ("tracking", "int8")),
        *(("group", form) for form in ("views", "late")),
    ],
)
def test_over_gloo_only_threads_wait_for_the_gpu(world: str, form: str) -> None:
    with wrapped("gloo", *WORLDS[world], **FORMS[form]) as setup:
        setup.step(2)
        found: list[Noted] = []
        for _ in range(200):
            setup.noted(1)
            # A thread that comes later than the next step finds that the GPU has finished.
            time.sleep(0.01)
            found += waits(setup.mode.noted)
            if found:
                break
        assert found
        assert all(each.kind == "wait" and "streams.py:_run" in each.where for each in found)


@pytest.mark.parametrize(
    ("topology", "size", "firsts"),
    [
        # The world, then a pair in each phase, which needs no communicator of its own.
        ("one-peer-exp", 4, [(0, "allreduce"), (0, "exchange"), (0, "exchange")]),
        # The world, then a group of three in each phase.
        ("hypercuboid", 9, [(0, "allreduce"), (1, "allreduce"), (2, "allreduce")]),
        # Two phases of the same pair.
        ("ring", 2, [(0, "allreduce"), (0, "exchange")]),
        ("complete", 4, [(0, "allreduce")]),
    ],
)
def test_every_group_connects_in_the_constructor_in_the_order_of_the_phases(
    topology: str, size: int, firsts: list[tuple[int, str]]
) -> None:
    # What starts at the values of rank 0 is sent after that.
    with wrapped(NCCL, topology, size, sync_at_start=False) as setup:
        begun = [call for call in setup.mode.calls if call.name in ("allreduce", "exchange")]
        assert [(call.group, call.name) for call in begun if call.device == "cuda"] == firsts
        for kind in ("nccl", "gloo"):
            with wrapped(kind, topology, size) as other:
                other.step()
                assert len(other.group.made) == len({place for place, _ in firsts})


@pytest.mark.parametrize("kind", [NCCL, "gloo"])
def test_no_round_is_captured_in_a_cuda_graph(kind: str) -> None:
    with wrapped(kind) as setup:
        setup.step(2)
        with (
            mock.patch("torch.cuda.is_initialized", return_value=True),
            mock.patch("torch.cuda.current_device", return_value=0),
            mock.patch("torch.cuda.set_device"),
        ):
            setup.step()
            with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
                for call in ("step", "synchronize", "global_avg", "consensus_distance", "report"):
                    with pytest.raises(RuntimeError, match=r"call synchronize\(\) before the cap"):
                        getattr(setup.optimizer, call)()


@pytest.mark.parametrize(
    ("kind", "options", "minutes"),
    [
        ("nccl", {}, 2),
        (NCCL, {"schedule": Schedule(gossip_every=3), "overlap": Late(3)}, 4),
        ("nccl", {"overlap": AsItArrives(5)}, 6),
    ],
)
def test_the_watchdog_of_nccl_waits_longer_than_the_steps_of_a_round(
    kind: str, options: dict[str, Any], minutes: int
) -> None:
    with wrapped(kind, "hypercuboid", 9, timeout=60, **options) as setup:
        # All ranks, and three of them in each phase.
        timeouts = [each.options._timeout for each in setup.group.made]
        assert timeouts == [timedelta(minutes=minutes)] * 3
        assert setup.group.options._timeout == timedelta(minutes=1)


def test_a_wrapper_that_is_dropped_waits_for_nccl_and_shuts_it_down() -> None:
    with fake_cuda("nccl", 4) as (mode, group):
        base = SGD(make_trained("cuda", "cuda"))
        optimizer = DecentOptimWrapper(base, topology="ring", process_group=group)
        optimizer.step()
        ended = {"shutdown", "abort"}
        assert not ended & {call.name for call in mode.calls}
        del optimizer
        gc.collect()
        assert ended & {call.name for call in mode.calls} == {"shutdown"}


def test_flags_travel_to_the_gpu_of_their_bucket_whatever_the_default_device_is() -> None:
    with wrapped(NCCL, devices=("cuda:0", "cuda:1") * 4) as setup, torch.device("cuda"):
        assert not waits(setup.noted(SETTLED))
        assert len(setup.optimizer.buckets) == 2


@pytest.mark.parametrize(
    ("name", "kind", "is_lazy"),
    [
        ("nccl", "ProcessGroupNCCL", False),
        # One communicator for each pair would be hundreds of MB of memory each.
        ("nccl-lazy", "ProcessGroupNCCL2", True),
    ],
)
def test_a_communicator_has_gloo_for_the_cpu_and_next_to_it_the_nccl_of_the_user(
    name: str, kind: str, is_lazy: bool
) -> None:
    """With gloo in the place of NCCL, which needs a GPU."""
    bound = torch.device("cuda", 3)
    like = SimpleNamespace(name=lambda: name, bound_device_id=bound)
    timeout = timedelta(seconds=30)
    made: list[tuple[Any, ...]] = []

    def make(store: Any, rank: int, size: int, options: Any, *gpu: Any) -> dist.ProcessGroupGloo:
        assert options._timeout == timeout
        made.append((options.lazy_init, *gpu))
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    usual = partial(SimpleNamespace, _timeout=timedelta(0), lazy_init=False)
    nccl = mock.Mock(side_effect=make, Options=usual)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(dist, kind, nccl, create=True),
    ):
        group = new_communicator(like, HashStore(), 0, 1, timeout)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert backend_of(group, cpu) is not backend_of(group, cuda)
    assert made == [(True, bound) if is_lazy else (False,)]


def test_another_backend_is_refused() -> None:
    like = SimpleNamespace(name=lambda: "mpi")
    with pytest.raises(ValueError, match="expected a gloo or nccl backend"):
        new_communicator(like, HashStore(), 0, 2, timedelta(seconds=1))


def test_communicators_are_aborted_all_together_and_in_bounded_time() -> None:
    # Each waits for the kernels of the other; the third never ends.
    together, never, ended = threading.Barrier(2), threading.Event(), list[int]()
    backend = partial(SimpleNamespace, name=lambda: "nccl2")

    def meet() -> None:
        together.wait(timeout=60)
        ended.append(1)

    abort([backend(abort=meet), backend(abort=meet)], seconds=60)
    assert ended == [1, 1]
    abort([backend(abort=never.wait), backend(abort=lambda: ended.append(2))], seconds=0.2)
    assert not never.is_set()
    never.set()


@pytest.mark.parametrize("waits", [0, 3])
def test_an_exchange_that_torch_has_ended_is_a_lost_peer(waits: int) -> None:
    """Also if a wait of an earlier stream has found nothing."""
    # Torch's watchdog has ended it; it then counts as completed.
    failed = mock.Mock(**{"is_completed.return_value": True})
    ended = dist.DistBackendError("NCCL operation timed out")
    failed.wait.side_effect = chain([None] * waits, repeat(ended))
    with wrapped(NCCL) as setup:
        setup.step(3)
        # The first step mixes the round before, and launches the one that fails.
        with (
            mock.patch.object(setup.group.made[0], "_end_coalescing", return_value=failed),
            pytest.raises(PeerError, match="lost rank 1 in round 3,") as caught,
        ):
            setup.step(2)
        assert "NCCL operation timed out" in str(caught.value.__cause__)
        assert "abort" in setup.calls()


def test_a_thread_is_on_the_gpu_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    set_there: dict[str, int] = {}
    here = threading.current_thread().name

    def set_device(index: int) -> None:
        set_there[threading.current_thread().name] = index

    def look() -> tuple[str, dict[str, int]]:
        return threading.current_thread().name, dict(set_there)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    # Before CUDA is used nothing may start it.
    assert background.in_background(look).result(30)[1] == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # Threads are used again, on whatever GPU the next caller is.
    for index in (3, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        there, found = background.in_background(look).result(30)
        assert there != here
        assert found == {there: index}
