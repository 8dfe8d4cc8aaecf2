"""Work that the host does later: on a thread, once a GPU has finished, or once there is room."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background

Action = Callable[[], None]
# A smaller window is preferred if its rounds take at most so many times as long as the best one's.
_TOLERANCE = 1.08
# In one of so many rounds, another window is tried.
_PERIOD = 8
# The time of a window rises by at most this factor in a round, and falls at once: a busy machine
# makes rounds longer, but never shorter. So a link that has become slower is noticed late.
_AGEING = 1.05


class AsyncHostCopy:
    """Values that the host reads later: they are copied without a wait.

    Args:
        values: computed on the current stream of their device.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._copied = mark(values.device)

    def read(self) -> list[Any]:
        """The values; waits until the GPU has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class PostingThread:
    """Runs actions one after the other on its own thread, each after its own wait.

    After an action has failed, no other one runs.
    """

    def __init__(self) -> None:
        # Each with what it waits for, and what is done after it; None ends the thread.
        self._actions = SimpleQueue[tuple[Action | None, Action, Future[None]] | None]()
        self._dropped = False
        # Locked while an action runs, but not while it waits.
        self._acting = threading.Lock()
        # Is done when the last action is, or one has failed.
        self.future = in_background(self._run)

    def add(self, action: Action, wait: Action | None = None) -> Future[None]:
        """Run an action.

        Args:
            action: the action.
            wait: waits for what it needs, such as an event of a GPU; None for nothing.

        Returns:
            Is done after the action; never if it has failed, or does not run.
        """
        done: Future[None] = Future()
        self._actions.put((wait, action, done))
        return done

    def seal(self, last: Action | None = None) -> None:
        """Accept no more actions, and run this one at the end."""
        if last is not None:
            self.add(last)
        self._actions.put(None)

    def abandon(self) -> None:
        """Run no more actions, and wait for the one that runs, but not for one that still waits."""
        self._dropped = True
        self.seal()
        with self._acting:
            pass

    def _run(self) -> None:
        while (queued := self._actions.get()) is not None and not self._dropped:
            wait, action, done = queued
            if wait is not None:
                wait()
            with self._acting:
                if not self._dropped:
                    action()
                    done.set_result(None)


class SendWindow:
    """Bounds the number of buckets of which codes are sent and the mean is not yet.

    Codes and means share connections, which send first what was posted first. If the codes of all
    buckets were posted at once, the first mean would wait for all of them, and a forward pass with
    it. With too few of them, a link with a long latency would stand idle. So the window is the
    smallest with which a round hardly takes longer than with a larger one.

    Each rank has its own. They may differ: all ranks post buckets in the same order, and a mean
    needs the codes of its own bucket only, so ranks cannot wait for each other in a circle.
    """

    def __init__(self) -> None:
        # Number of buckets at once.
        self.size = 1
        # The shortest seconds of a round by size.
        self._seconds: dict[int, float] = {}
        # How many rounds were timed, and the number of the present one.
        self._rounds, self._round = 0, -1
        # When its first mean was posted, and when the last one arrived.
        self._began, self._ended = math.inf, -math.inf
        # Of each bucket, what is done when its mean is posted.
        self._sent: deque[Future[None]] = deque()

    def wait(self) -> None:
        """Wait until there is room for a bucket; on the thread that posts."""
        while len(self._sent) >= self.size:
            self._sent.popleft().result()

    def enter(self, round: int) -> Future[None]:
        """Let a bucket of a round in; returns what `leave` takes."""
        if round != self._round:
            self._round = round
            # All have arrived, and nobody waits for room if all buckets are small.
            self._sent.clear()
            self._choose()
        self._sent.append(Future())
        return self._sent[-1]

    def leave(self, bucket: Future[None]) -> None:
        """Make room for another bucket: the mean of this one is posted, or will never be."""
        self._began = min(self._began, time.monotonic())
        bucket.set_result(None)

    def note_arrival(self) -> None:
        """Note that all means of a bucket have arrived."""
        self._ended = time.monotonic()

    def _choose(self) -> None:
        """Choose the size for the next round."""
        times, seconds = self._seconds, self._ended - self._began
        if seconds > 0:
            self._rounds += 1
            times[self.size] = min(seconds, _AGEING * times.get(self.size, seconds))
            longest = _TOLERANCE * min(times.values())
            # Now and then a larger and a smaller one, by turns.
            factor = {_PERIOD: 2.0, 0: 0.5}.get(self._rounds % (2 * _PERIOD), 1.0)
            self.size = int(min(n for n, each in times.items() if each <= longest) * factor) or 1
        self._began = math.inf


def mark(device: torch.device) -> torch.cuda.Event:
    """Record an event on the current stream of a GPU."""
    return torch.cuda.current_stream(device).record_event()  # type: ignore[no-any-return]
