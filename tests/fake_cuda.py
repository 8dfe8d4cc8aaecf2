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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import decent_optim_wrapper
from decent_optim_wrapper.codecs import fused
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
    """Whether it is a file of the library, or of torch's optimizers."""
    return path.startswith(_PACKAGE) or "/torch/optim/" in path


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
    """Whether it is a fake tensor on a GPU."""
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
        # While the peers are played.
        self.muted = False
        # Counts the steps: an event of an earlier one is over by now.
        self.step = 0

    def note(self, kind: str, what: str) -> None:
        """Note something, unless the user's code or the base's update asks for it."""
        if self.muted:
            return
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
        copied = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        on_gpu = any(map(is_cuda, leaves))
        if on_gpu and func in _READS:
            self.note("read", str(func))
            return True if args[0].dtype == torch.bool else 1.0
        if func is aten._foreach_copy_.default and on_gpu and not all(map(is_cuda, copied)):
            # Torch makes one copy for each tensor; those by `copy_` come to `copy`.
            self.note("copy", str(func))
            return None
        if func is aten._to_copy.default and self._changes_device(args[0], device):
            return self._move(args[0], kwargs)
        if not (on_gpu or (device is not None and torch.device(device).type == "cuda")):
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

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a GPU copies to and from this memory by itself."""
        start = tensor.untyped_storage().data_ptr()
        return any(start == each.untyped_storage().data_ptr() for each in self._pinned)

    def copy(self, target: Tensor, source: Tensor, waits: bool) -> Tensor:
        """Copy between devices; what comes from a GPU are ones."""
        there = source if is_cuda(target) else target
        # Torch cannot copy to and from other memory while the host goes on.
        waits = waits or not self.is_pinned(there)
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

    @staticmethod
    def _changes_device(source: Tensor, device: Any) -> bool:
        return device is not None and (torch.device(device).type == "cuda") != is_cuda(source)

    def _move(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        free = kwargs.get("non_blocking") and not is_cuda(source) and self.is_pinned(source)
        self.note("call" if free else "copy", "to")
        if free:
            self.copied.append(source)
        dtype = kwargs.get("dtype") or source.dtype
        if is_cuda(source):
            with unset_fake_temporarily():
                return torch.ones(source.shape, dtype=dtype)
        return torch.empty(source.shape, dtype=dtype, device="cuda:0")


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
        super().__init__(rank, size)
        self._number = number
        self._mode, self._rank, self._size, self.kind = mode, rank, size, kind
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._receives: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        # What was called, with the kind of device.
        self.calls: list[tuple[str, str]] = []
        # The same on GPUs, of all communicators together: which of them, by its place in `made`.
        self.on_gpu: list[tuple[int, str]] = []
        # Those of the backend for GPUs.
        self.options = SimpleNamespace(_timeout=timedelta(minutes=1))
        # The communicators that the library has made of this group.
        self.made: list[FakeGroup] = []

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def get_group_store(self) -> Any:
        """Where communicators are built."""
        return self._store

    @property
    def _nccl(self) -> str:
        """What torch calls its newest implementation of NCCL."""
        return "nccl2"

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu" and "gloo" not in self.kind:
            raise RuntimeError("No backend type associated with device type cpu")
        on_nccl = torch.device(device).type == "cuda" and "nccl" in self.kind
        return SimpleNamespace(
            name=lambda: self._nccl if on_nccl else "gloo",
            supports_coalescing=on_nccl,
            options=self.options,
            abort=lambda: self.calls.append(("abort", "cuda")),
            shutdown=lambda: self.calls.append(("shutdown", "cuda")),
            rank=lambda: 0,
            size=lambda: 1,
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._called("coalesced", device)

    def _end_coalescing(self, device: torch.device) -> FakeWork:  # type: ignore[override]
        return self._called("exchange", device)

    def _called(self, call: str, device: torch.device) -> FakeWork:
        backend = self._get_backend(device)
        if backend.name() == "gloo" and device.type == "cuda":
            raise RuntimeError(f"{call} of CUDA tensors over gloo makes the host wait")
        self.calls.append((call, device.type))
        if device.type == "cuda":
            self.on_gpu.append((self._number, call))
        count = sum(each == call for _, each in self.on_gpu)
        return FakeWork(self._mode, backend.name() == self._nccl, f"{call} {count}")

    def _play(self, target: Tensor, source: Tensor) -> None:
        self._mode.muted = True
        target.copy_(source)
        self._mode.muted = False

    def allreduce(self, data: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """All ranks add the same."""
        if not is_cuda(data[0]):
            data[0].mul_(self._size)
        return self._called("allreduce", data[0].device)

    def broadcast(self, data: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """The source has the same."""
        return self._called("broadcast", data[0].device)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> FakeWork:  # type: ignore[override]
        """All ranks give the same."""
        for output in outputs[0]:
            self._play(output, inputs[0])
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
            self._play(self._receives[peer, tag].pop(0), data[0])
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
        made.on_gpu = group.on_gpu
        group.made.append(made)
        return made

    optimizer = torch.optim.Optimizer
    make, index, copy = torch.tensor, torch.Tensor.__getitem__, torch.Tensor.copy_
    item = torch.Tensor.item

    # Torch's own of these would ask the driver.
    def indexed(tensor: Tensor, key: Any) -> Tensor:
        if not is_cuda(tensor):
            return index(tensor, key)
        for dimension, part in reversed(list(enumerate(key if isinstance(key, tuple) else (key,)))):
            if isinstance(part, slice):
                start, stop, _ = part.indices(tensor.shape[dimension])
                tensor = tensor.narrow(dimension, start, stop - start)
            else:
                tensor = tensor.select(dimension, part)
        return tensor

    def read(tensor: Tensor) -> float:
        if not is_cuda(tensor):
            return item(tensor)
        mode.note("read", "item")
        return 0.0

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if is_cuda(target) and is_cuda(source):
            mode.note("call", "copy_")
            return target
        if (is_cuda(target) or is_cuda(source)) and "cpu" in (
            target.device.type,
            source.device.type,
        ):
            return mode.copy(target, source, waits=not non_blocking)
        return copy(target, source, non_blocking)

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        device = torch.device(kwargs.pop("device", None) or "cpu")
        made = make(data, device="cpu", **kwargs)
        return made.to(device) if device.type == "cuda" else made

    with (
        warnings.catch_warnings(),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.synchronize", return_value=None),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        mock.patch("torch.tensor", tensor),
        mock.patch.object(torch.Tensor, "__getitem__", indexed),
        mock.patch.object(torch.Tensor, "copy_", copied),
        mock.patch.object(torch.Tensor, "item", read),
        mock.patch.object(torch.Tensor, "__float__", read),
        mock.patch.object(optimizer, "_accelerator_graph_capture_health_check", return_value=None),
        mock.patch.object(connections, "new_communicator", communicator),
        mock.patch.object(streams, "mark", side_effect=lambda device: FakeEvent(mode)),
        mock.patch.object(parameters, "overlapping", return_value=None),
        # Torch would compile for a GPU that is not there.
        mock.patch.object(fused.FUSED, "serves", return_value=False),
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


def post_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets travel as if their values had to come from a GPU."""
    new_vector = storage.new_vector

    def unpinned(
        numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> Tensor:
        return new_vector(numel, dtype, device)

    for module in (storage, bucket, coded):
        monkeypatch.setattr(module, "new_vector", unpinned)
    monkeypatch.setattr(Bucket, "via_cpu", True)
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

        def waited_once(self: Transport, *args: Any, call: Any = call) -> list[WaitedOnce]:
            return [WaitedOnce(work) for work in call(self, *args)]

        monkeypatch.setattr(Transport, method, waited_once)
    monkeypatch.setattr(Bucket, "on_gpu", True)
    monkeypatch.setattr(Transport, "sends_alone", lambda self, device: False)


# How buckets leave a rank.
Way = Callable[[pytest.MonkeyPatch], None]
WAYS: dict[str, Way] = {
    "at once": lambda monkeypatch: None,
    "by a thread": post_by_a_thread,
    "on a GPU": check_on_a_gpu,
}
