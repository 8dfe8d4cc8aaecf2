"""A pair sends first what is needed first, and receives in any order what the peer sends."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import fill, flat, sgd, train, wrap
from ranks import run_threads
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.comm import send_queue
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.send_queue import SendQueue
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.gossip import round
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.exchange import Wire

STEPS, COUNT = 3, 5
# Longer than anything here takes on a busy machine.
PATIENCE = 20.0
MIB = 2**20


class Line:
    """A connection on which a message is under way until the test lets it arrive."""

    def __init__(self) -> None:
        self.queue = SendQueue()
        self.queue.open()
        self.started: list[str] = []
        # The most messages that were under way together.
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()
        self._starts, self._arrivals = threading.Semaphore(0), threading.Semaphore(0)

    def add(self, name: str, position: int) -> Any:
        return self.queue.add(partial(self.send, name), position)

    def send(self, name: str) -> Line:
        with self._lock:
            self.started.append(name)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        self._starts.release()
        return self

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        assert self._arrivals.acquire(timeout=PATIENCE)
        with self._lock:
            self._under_way -= 1

    def is_completed(self) -> bool:
        return False

    def await_starts(self, count: int) -> None:
        for _ in range(count):
            assert self._starts.acquire(timeout=PATIENCE)

    def let_arrive(self, count: int) -> None:
        self._arrivals.release(count)


def wait_for(*works: Any) -> None:
    for work in works:
        work.wait(timedelta(seconds=PATIENCE))


def test_what_is_needed_first_is_started_first_and_two_are_under_way() -> None:
    line = Line()
    # Positions without a plan come in their order, and so do pieces of one message.
    for position, needed in ((0, 9), (2, 1), (3, 0)):
        line.queue.plan(position, needed)
    works = [line.add(name, 8) for name in "xy"]
    line.await_starts(2)
    works += map(line.add, "abcdefg", (0, 2, 3, 3, 5, 7, 2))
    for _ in works[2:]:
        line.let_arrive(1)
        line.await_starts(1)
    assert not all(work.is_completed() for work in works)
    line.let_arrive(2)
    wait_for(*works)
    assert line.started == [*"xycdbgefa"]
    assert line.most == 2
    assert all(work.is_completed() for work in works)


def test_a_queue_that_is_dropped_starts_nothing_more() -> None:
    line = Line()
    works = [line.add(str(each), each) for each in range(5)]
    line.await_starts(2)
    line.queue.drop()
    line.let_arrive(2)
    wait_for(*works[:2])
    for work in works[2:]:
        with pytest.raises(CancelledError):
            wait_for(work)
    assert line.started == ["0", "1"]


def test_a_message_that_cannot_be_started_fails_alone() -> None:
    def fail() -> Any:
        raise OSError("connection closed")

    line = Line()
    line.let_arrive(2)
    works = [line.add("a", 0), line.queue.add(fail, 0), line.add("b", 0)]
    with pytest.raises(OSError, match="connection closed"):
        wait_for(works[1])
    wait_for(works[0], works[2])
    assert line.started == ["a", "b"]


class Layers(nn.Module):
    """Layers with a bucket each, of which every pass calls all in an order of its own.

    Args:
        width: of each layer.
        rank: start values differ.
        order: gives the order of the next pass.
    """

    def __init__(self, width: int, rank: int, order: Callable[[], list[int]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, width) for _ in range(COUNT))).double()
        self.orders: list[list[int]] = []
        self._order = order
        fill(self, rank)

    def forward(self, inputs: Tensor) -> Tensor:
        self.orders.append(self._order())
        parts = [self.layers[index](inputs)[:, :3] for index in self.orders[-1]]
        return torch.stack(parts).sum(0)

    def wrapped(self, group: dist.ProcessGroup, **options: Any) -> DecentralizedDataParallel:
        cap_mb = sum(param.nbytes for param in self.layers[0].parameters()) / MIB
        options = {"topology": "ring", "overlap": "forward", "bucket_size_in_mb": cap_mb, **options}
        wrapped = wrap(self, group, **options)
        assert len(wrapped.optimizer.buckets) == COUNT
        return wrapped


class Recorder:
    """Notes what every rank, which is a thread, does in each of its rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rounds: dict[int, list[list[Any]]] = defaultdict(list)
        self._patch = monkeypatch.setattr
        self.after(Round, "open", lambda *_: self.rounds.append([]))

    @property
    def rounds(self) -> list[list[Any]]:
        """Those of this rank."""
        return self._rounds[threading.get_ident()]

    def after(self, owner: Any, method: str, note: Callable[..., object]) -> None:
        """Call a function with the result and the arguments of a method."""
        original = getattr(owner, method)

        def noted(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            note(result, *args)
            return result

        self._patch(owner, method, noted)


# With pieces of half a MiB of a bucket.
@pytest.mark.parametrize(("comm", "width", "pieces"), [(None, 40_000, 3), (torch.int8, 300, 1)])
def test_a_pair_sends_in_the_order_in_which_the_last_forward_pass_has_read(
    comm: Any, width: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here everything is posted before anything is sent, or the first ones would come first."""
    recorder = Recorder(monkeypatch)
    begun: dict[SendQueue, list[Callable[[], None]]] = defaultdict(list)
    tags: dict[Transport, list[int]] = defaultdict(list)

    wires: dict[int, Wire] = {}

    def note_wire(**parts: Any) -> Wire:
        made = wires[threading.get_ident()] = Wire(**parts)
        return made

    def send_all(*_: object) -> None:
        wire = wires[threading.get_ident()]
        assert wire.sends is not None
        for each in [in_background(run) for run in begun.pop(wire.sends)]:
            each.result(PATIENCE)
        recorder.rounds[-1] += tags.pop(wire.transport)

    monkeypatch.setattr(round, "Wire", note_wire)
    monkeypatch.setattr(*(send_queue, "in_background"), lambda run: begun[run.__self__].append(run))
    recorder.after(SendQueue, "add", lambda *_: recorder.rounds[-1].append("send"))
    recorder.after(Transport, "receive", lambda *_: recorder.rounds[-1].append("receive"))
    recorder.after(Transport, "send", lambda _, own, message, peer, tag: tags[own].append(tag))
    recorder.after(Round, "seal", send_all)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, list[list[int]], list[Any]]:
        model = Layers(width, rank, partial(Random(rank).sample, range(COUNT), COUNT))
        wrapped = model.wrapped(group, comm_dtype=comm, sync_at_start=False)
        buckets = wrapped.optimizer.buckets
        layer_of = {id(layer.weight): index for index, layer in enumerate(model.layers)}
        layers = [next(layer_of[id(m)] for m in b.members if id(m) in layer_of) for b in buckets]
        # Those of the last layers are complete first.
        assert layers == [*reversed(range(COUNT))]
        train(wrapped, rank, range(STEPS))
        wrapped.optimizer.synchronize()
        rounds = []
        for calls in recorder.rounds:
            # A peer in the middle of its backward pass may send all before this rank packs any.
            count = COUNT * pieces
            assert calls[: 2 * count] == ["receive"] * count + ["send"] * count
            sent = [layers[tag - min(calls[2 * count :])] for tag in calls[2 * count :]]
            assert sent == [layer for layer in sent[::pieces] for _ in range(pieces)]
            rounds.append(sent[::pieces])
        return flat(model), rounds, model.orders

    ends, rounds, orders = zip(*run_threads(4, main), strict=True)
    for (first, *sent), read in zip(rounds, orders, strict=True):
        # Nothing is known in the first round.
        assert first == [*reversed(range(COUNT))]
        assert sent == read[1:]
    # Pairs have mixed last, halves of both.
    for one, other in ((0, 1), (2, 3)):
        assert (ends[one] - ends[other]).abs().max() < (0.1 if comm else 1e-12)
    assert (ends[0] - ends[2]).abs().max() > 1e-3


def test_the_bucket_that_a_forward_pass_reads_first_is_about_1_mib() -> None:
    # Of a quarter of a MiB each, and a little.
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    whole = sum(param.nbytes for param in model.parameters()) / MIB

    def wrapped(cap: float = 25, **options: Any) -> DecentOptimWrapper:
        base = sgd(model.parameters())
        return DecentOptimWrapper(base, model=model, bucket_cap_mb=cap, **options)

    def sizes(optimizer: DecentOptimWrapper) -> list[float]:
        return [sum(m.nbytes for m in each.members) / MIB for each in optimizer.buckets]

    by_step = wrapped(overlap="forward")
    head, rest = sizes(by_step)
    assert 0.75 < head <= 1.0
    assert head + rest == whole
    assert [*map(id, by_step.buckets[0].members)] == [*map(id, model[:3].parameters())]
    # A backward pass reaches it last.
    assert sizes(DecentralizedDataParallel(model, sgd, bucket_size_in_mb=25).optimizer) == [
        rest,
        head,
    ]
    at_end = DecentralizedDataParallel(model, sgd, bucket_size_in_mb=25, update_in_backward=False)
    assert sizes(at_end.optimizer) == [head, rest]
    assert sizes(wrapped(overlap=True)) == [whole]
    # No smaller than all others.
    small = sizes(wrapped(0.3, overlap="forward"))
    assert max(small) <= 0.3
    assert len(small) == 12
