"""Runs the real wrapper on CUDA tensors without a GPU, and notes what would make the host wait.

Tensors on "cuda" are FakeTensors, without data and driver; those on the CPU are real. The peers of
a process group do what this rank does.
"""

from __future__ import annotations

import random
import re
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import decent_optim_wrapper
from decent_optim_wrapper.comm import connections, streams
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.wire import bucket, coded, parameters, storage
from decent_optim_wrapper.wire.bucket import Bucket

aten = torch.ops.aten
_PACKAGE = str(Path(decent_optim_wrapper.__file__).parent)
_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
# They start no kernel.
_FREE = re.compile("prim::|view|detach|alias|slice|select|split|unbind|expand|empty")


@cache
def _is_known(path: str) -> bool:
    """Return whether it is a file of the library, or of torch's optimizers."""
    return path.startswith(_PACKAGE) or "/torch/optim/" in path


# What torch calls its newest implementation.
NCCL = "nccl2"


class Call(NamedTuple):
    """What a group was asked for.

    Args:
        group: its place among the communicators made; -1 for the user's own.
        name: what was called.
        device: the kind of device.
    """

    group: int
    name: str
    device: str


class Noted(NamedTuple):
    """Something that the library asked of torch.

    Args:
        kind: "read" (of a CUDA value on the host), "copy" (between devices; the host waits), "spin"
            (a wait for a work of NCCL that keeps the host busy), "order" (the same by the present
            stream), "wait" (for an event of this step), "call" (of a kernel) or "overwrite" (of the
            host's memory, from which a GPU may still copy).
        where: the function of the library, and who called it.
        what: the operation.
    """

    kind: str
    where: str
    what: str


def is_cuda(value: object) -> bool:
    """Return whether it is a fake tensor on a GPU."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps CPU tensors real, and notes what is done with the others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.noted: list[Noted] = []
        # The host's memory to and from which a GPU copies by itself.
        self._pinned: list[Tensor] = []
        # What it copies from there, in this order, and how many of these copies are over for sure.
        self.copied: list[Tensor] = []
        self.over = 0
        # What groups were asked for.
        self.calls: list[Call] = []
        # Counts the steps: an event of an earlier one is over by now.
        self.step = 0

    def note(self, kind: str, what: str) -> None:
        """Note something, unless the user's code or the base's update asks for it."""
        # The innermost first, without their source lines, which would have to be read.
        codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
        known = [code for code in codes if _is_known(code.co_filename)]
        ours = [code for code in known if code.co_filename.startswith(_PACKAGE)]
        if ours and known[0] is ours[0]:
            names = (f"{code.co_filename.rpartition('/')[2]}:{code.co_name}" for code in ours[:5])
            self.noted.append(Noted(kind=kind, where=" < ".join(names), what=what))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", None):
            return self._pin(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        on_gpu = any(map(is_cuda, leaves))
        if on_gpu and func in _READS:
            self.note("read", str(func))
            return True if args[0].dtype == torch.bool else 1.0
        if func is aten._foreach_copy_.default and on_gpu and not all(map(is_cuda, tensors)):
            # Torch makes one copy for each tensor.
            self.note("copy", str(func))
            return None
        if func is aten.copy_.default and is_cuda(tensors[0]) != is_cuda(tensors[1]):
            return self._copy(*args)
        if func is aten._to_copy.default and device is not None and to_gpu != is_cuda(args[0]):
            with self:
                made = torch.empty(
                    args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device
                )
                return made.copy_(args[0], non_blocking=kwargs.get("non_blocking", False))
        if not (on_gpu or to_gpu):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not _FREE.search(func.name()):
            self.note("call", func.name())
        return func(*args, **kwargs)

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        with unset_fake_temporarily():
            made: Tensor = func(*args, **kwargs)
        self._pinned.append(made)
        return made

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between devices; what comes from a GPU are ones."""
        host = (source if is_cuda(target) else target).untyped_storage().data_ptr()
        # Torch cannot copy to and from other memory while the host goes on.
        pinned = any(host == each.untyped_storage().data_ptr() for each in self._pinned)
        waits = not (non_blocking and pinned)
        self.note("copy" if waits else "call", "copy_")
        if is_cuda(target) and not waits:
            self.copied.append(source)
        if not is_cuda(target):
            with unset_fake_temporarily():
                target.fill_(1)
        return target

    def check_unread(self, target: Tensor) -> None:
        """Note memory that is overwritten while a GPU may still copy it."""
        start, end = target.data_ptr(), target.data_ptr() + target.nbytes
        for each in self.copied[self.over :]:
            if each.data_ptr() < end and start < each.data_ptr() + each.nbytes:
                self.note("overwrite", f"{target.nbytes} bytes")


class FakeEvent:
    """An event behind the work of the present step."""

    def __init__(self, mode: FakeCuda) -> None:
        self._mode, self._step, self._copied = mode, mode.step, len(mode.copied)

    def synchronize(self) -> None:
        """Wait for it; only the wait of the same step makes the host wait for the GPU."""
        self._mode.over = max(self._mode.over, self._copied)
        if self._step == self._mode.step:
            self._mode.note("wait", "event")


class FakeWork:
    """A work that is done, under the name of its call."""

    def __init__(self, mode: FakeCuda, nccl: bool, name: str) -> None:
        self._mode, self._nccl, self._name = mode, nccl, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        """ProcessGroupNCCL keeps the host busy if there is a timeout."""
        if self._nccl:
            self._mode.note("order" if timeout is None else "spin", self._name)
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class FakeGroup(dist.ProcessGroup):
    """A process group whose other ranks do what this one does.

    Args:
        mode: notes the waits.
        rank: this rank.
        size: number of ranks.
        kind: "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        number: its place among the communicators made; -1 for the user's own.
    """

    def __init__(self, mode: FakeCuda, rank: int, size: int, kind: str, number: int = -1) -> None:
        super().__init__(dist.HashStore(), rank, size)  # type: ignore[attr-defined]
        self._mode, self._number, self.kind = mode, number, kind
        self._receives: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        # The options of the backend for GPUs.
        self.options = SimpleNamespace(_timeout=timedelta(minutes=1))
        # The communicators that the library has made of this group.
        self.made: list[FakeGroup] = []

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu" and "gloo" not in self.kind:
            raise RuntimeError("No backend type associated with device type cpu")
        on_nccl = torch.device(device).type == "cuda" and "nccl" in self.kind
        return SimpleNamespace(
            name=lambda: NCCL if on_nccl else "gloo",
            supports_coalescing=on_nccl,
            options=self.options,
            abort=lambda: self._called("abort", device),
            shutdown=lambda: self._called("shutdown", device),
            rank=lambda: 0,
            size=lambda: 1,
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._called("coalesced", device)

    def _end_coalescing(self, device: torch.device) -> FakeWork:  # type: ignore[override]
        return self._called("exchange", device)

    def _called(self, call: str, device: torch.device) -> FakeWork:
        name = self._get_backend(device).name()
        if name == "gloo" and device.type == "cuda":
            raise RuntimeError(f"{call} of CUDA tensors over gloo makes the host wait")
        calls = self._mode.calls
        calls.append(Call(self._number, call, device.type))
        return FakeWork(self._mode, name == NCCL, f"{call} {len(calls)}")

    def allreduce(self, data: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """All ranks add the same."""
        if not is_cuda(data[0]):
            data[0].mul_(self.size())
        return self._called("allreduce", data[0].device)

    def broadcast(self, data: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """The source has the same."""
        return self._called("broadcast", data[0].device)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """All ranks give the same."""
        for output in () if is_cuda(inputs[0]) else outputs[0]:
            output.copy_(inputs[0])
        return self._called("allgather", inputs[0].device)

    def recv(self, data: list[Tensor], peer: int, tag: int) -> FakeWork:  # type: ignore[override]
        """The peer sends what this rank does."""
        if not is_cuda(data[0]):
            self._mode.check_unread(data[0])
            self._receives[peer, tag].append(data[0])
        return self._called("recv", data[0].device)

    def send(self, data: list[Tensor], peer: int, tag: int) -> FakeWork:  # type: ignore[override]
        """The peer sends the same."""
        if self._receives[peer, tag]:
            self._receives[peer, tag].pop(0).copy_(data[0])
        return self._called("send", data[0].device)


@contextmanager
def fake_cuda(kind: str, size: int = 2) -> Iterator[tuple[FakeCuda, FakeGroup]]:
    """A process group on a machine with a GPU, as far as the wrapper can tell.

    Args:
        kind: as in `FakeGroup`.
        size: number of ranks.
    """
    mode = FakeCuda()
    group = FakeGroup(mode, 0, size, kind)

    def communicator(like: FakeGroup, store: Any, rank: int, size: int, *_: Any) -> FakeGroup:
        both = "cpu:gloo,cuda:nccl" if "nccl" in like.kind else "gloo"
        made = FakeGroup(mode, rank, size, both, number=len(group.made))
        group.made.append(made)
        return made

    with (
        warnings.catch_warnings(),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.synchronize", return_value=None),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        mock.patch.object(Optimizer, "_accelerator_graph_capture_health_check", return_value=None),
        # Torch does without a driver then.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(connections, "new_communicator", communicator),
        mock.patch.object(streams, "mark", side_effect=lambda device: FakeEvent(mode)),
        mock.patch.object(parameters, "overlapping", return_value=None),
        mode.fake,
        mode,
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield mode, group


# What follows puts the CPU in the place of a GPU: the values are real, and ranks are threads.


class LateEvent:
    """An event that comes late, and at another time on every rank."""

    draws = random.Random(0)

    def synchronize(self) -> None:
        time.sleep(self.draws.choice((0.0, 0.001, 0.005)))


def mark_buckets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Callable[[Bucket], bool] = lambda _: True
) -> None:
    """Replace an attribute of all buckets that are made from now on."""
    make = Bucket.__init__

    def make_and_mark(self: Bucket, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        setattr(self, name, value(self))

    monkeypatch.setattr(Bucket, "__init__", make_and_mark)


def post_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets travel as if their values had to come from a GPU."""
    new_vector = storage.new_vector

    def unpinned(numel: int, dtype: Any, device: Any, pinned: bool = False) -> Tensor:
        return new_vector(numel, dtype, device)

    for module in (storage, bucket, coded):
        monkeypatch.setattr(module, "new_vector", unpinned)
    mark_buckets(monkeypatch, "via_cpu")
    monkeypatch.setattr(streams, "mark", lambda device: LateEvent())


class WaitedOnce:
    """A work of gloo, which must be waited for once, in the place of one of a GPU."""

    def __init__(self, work: Any) -> None:
        self._work, self._done = work, False

    def wait(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        if not self._done:
            self._work.wait(timeout)
        self._done = True

    def is_completed(self) -> bool:
        return self._done


def check_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are exchanged and checked as on a GPU, over NCCL."""
    for method in ("exchange", "all_reduce"):
        call = getattr(Transport, method)

        def waited_once(self: Transport, *args: Any, call: Any = call, **named: Any) -> Any:
            return [WaitedOnce(work) for work in call(self, *args, **named)]

        monkeypatch.setattr(Transport, method, waited_once)
    mark_buckets(monkeypatch, "on_gpu")


# How buckets leave a rank.
Way = Callable[[pytest.MonkeyPatch], None]
WAYS: dict[str, Way] = {
    "at once": lambda monkeypatch: None,
    "by a thread": post_by_a_thread,
    "on a GPU": check_on_a_gpu,
}
