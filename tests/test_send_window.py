"""Codes of few buckets are on the wire at once, so that means need not wait for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import PeerError
from decent_optim_wrapper.comm import streams, tags
from decent_optim_wrapper.comm.streams import SendWindow
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import WireError
from decent_optim_wrapper.wire import coded

# A bucket each, of a chunk for each of four ranks.
SHAPES = [(2000 + 7 * i,) for i in range(7)]


class Clock:
    """Time as the test tells it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def latency_bound(size: int) -> float:
    """The seconds of a round in which a window of buckets takes as long as one of them."""
    return 1.0 / size


def wire_bound(size: int) -> float:
    """The seconds of a round in which the wire is always busy."""
    return 1.0


def late(size: int) -> float:
    """The seconds of a round on a link with some latency: from four buckets on it is busy."""
    return 4.0 / min(size, 4)


def chosen(seconds: Callable[[int, int], float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of 400 rounds, of which each takes so many seconds by its number and size."""
    clock = Clock()
    monkeypatch.setattr(streams, "time", clock)
    window, sizes = SendWindow(), list[int]()
    for number in range(400):
        entry = window.enter(number)
        sizes.append(window.size)
        window.leave(entry)
        clock.now += seconds(number, window.size)
        window.note_arrival()
        clock.now += 5.0  # until the next round
    return sizes


def usual_of(sizes: list[int]) -> int:
    return max(set(sizes), key=sizes.count)


@pytest.mark.parametrize(
    ("seconds", "usual", "tried"),
    [(latency_bound, 16, {8, 32}), (wire_bound, 1, {1, 2}), (late, 4, {2, 8})],
)
def test_the_window_is_the_smallest_that_makes_a_round_no_longer(
    seconds: Callable[[int], float],
    usual: int,
    tried: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = chosen(lambda _, size: seconds(size), monkeypatch)[56:72]
    assert usual_of(last) == usual
    # Others are tried now and then, or it would not be found out that a link has changed.
    assert set(last) <= {usual, *tried}
    assert len(set(last)) > 1


def test_a_window_follows_a_link_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(number: int, size: int) -> float:
        return late(size) if number < 150 else wire_bound(size) + 10

    sizes = chosen(seconds, monkeypatch)
    assert usual_of(sizes[130:150]) == 4
    assert usual_of(sizes[-20:]) == 1


def test_a_bucket_waits_until_there_is_room() -> None:
    window = SendWindow()
    entries = [window.enter(0) for _ in range(window.size)]
    passed = threading.Event()

    def post() -> None:
        window.wait()
        passed.set()

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    window.leave(entries[0])
    assert passed.wait(60)
    thread.join(60)


def test_a_window_keeps_nothing_of_earlier_rounds() -> None:
    window = SendWindow()
    for number in range(5):
        window.leave(window.enter(number))
        kept = window.enter(number)
    assert len(window._sent) == 2  # noqa: SLF001
    window.leave(kept)


def train(size: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[list[int]]]:
    """The parameters of all ranks, and for each rank the tags of what it sends, in their order."""
    sent: list[list[int]] = [[] for _ in range(4)]
    send, enter = Transport.send, SendWindow.enter

    def noted(self: Transport, tensor: Tensor, peer: int, tag: int) -> Any:
        sent[self.rank].append(tag)
        return send(self, tensor, peer, tag)

    def of_this_size(self: SendWindow, round: int) -> Future[None]:
        entry = enter(self, round)
        self.size = size or self.size
        return entry

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank, shapes=SHAPES)
        optimizer = wrap(params, group, topology="complete", comm_dtype=torch.int8)
        assert len(optimizer.buckets) == len(SHAPES)
        take_steps(optimizer, params, rank, range(6))
        optimizer.synchronize()
        return flatten(params)

    with monkeypatch.context() as patched:
        patched.setattr(coded, "FEW", 0)
        patched.setattr(Transport, "send", noted)
        patched.setattr(SendWindow, "enter", of_this_size)
        return torch.stack(run_threads(4, main)), sent


def ahead(tags_sent: list[int]) -> int:
    """By how many buckets the codes of a rank were at most ahead of its means."""
    codes, means, most = set[int](), set[int](), 0
    for tag in tags_sent:
        if tag >= tags.MEAN:
            means.add(tag - tags.MEAN)
        else:
            if tag == tags.BUCKET:  # the first bucket of a round
                codes, means = set(), set()
            codes.add(tag - tags.BUCKET)
        most = max(most, len(codes - means))
    return most


def test_the_window_bounds_how_far_codes_are_ahead_of_means_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = {size: train(size, monkeypatch) for size in (1, 2, 100, None)}
    for size in (1, 2):
        assert all(1 <= ahead(each) <= size for each in results[size][1])
    # Without it, the codes of all buckets come first.
    assert max(map(ahead, results[100][1])) > 2
    params = results[1][0]
    start = torch.stack([flatten(make_params(seed=rank, shapes=SHAPES)) for rank in range(4)])
    assert (params - start).abs().min() > 0
    assert all(torch.equal(params, each) for each, _ in results.values())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_bucket_that_cannot_be_sent_is_a_lost_rank_at_once(
    size: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Transport.send

    def gone(self: Transport, tensor: Tensor, peer: int, tag: int) -> Any:
        if self.rank == 1 and tag == tags.BUCKET + failing:
            raise WireError("the connection is closed")
        return send(self, tensor, peer, tag)

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params(seed=rank, shapes=SHAPES)
        optimizer = wrap(params, group, topology="complete", comm_dtype=torch.int8, timeout=300)
        with pytest.raises(PeerError) as caught:
            take_steps(optimizer, params, rank, range(3))
        return str(caught.value)

    monkeypatch.setattr(coded, "FEW", 0)
    monkeypatch.setattr(Transport, "send", gone)
    monkeypatch.setattr(SendWindow, "_choose", lambda self: setattr(self, "size", size))
    start = time.monotonic()
    assert all("lost" in text for text in run_threads(4, main))
    assert time.monotonic() - start < 60
