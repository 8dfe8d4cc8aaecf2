"""Work that the host does later, on a thread or once a GPU has finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background

Action = Callable[[], None]


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
    """Runs actions one after the other on its own thread, each once a GPU has finished its input.

    After an action has failed, no other one runs.
    """

    def __init__(self) -> None:
        # Each with what it waits for on a GPU, and what is done after it; None ends the thread.
        self._actions: SimpleQueue[tuple[torch.cuda.Event | None, Action, Future[None]] | None]
        self._actions = SimpleQueue()
        self._dropped = False
        # Locked while an action runs, but not while it waits for the GPU.
        self._acting = threading.Lock()
        # Is done when the last action is, or one has failed.
        self.future = in_background(self._run)

    def add(self, action: Action, device: torch.device | None = None) -> Future[None]:
        """Run an action, once the GPU has finished what is on its current stream now.

        Args:
            action: the action.
            device: the GPU; None waits for none.

        Returns:
            Is done after the action; never if it has failed, or does not run.
        """
        done: Future[None] = Future()
        self._actions.put((None if device is None else mark(device), action, done))
        return done

    def seal(self, last: Action | None = None) -> None:
        """Accept no more actions, and run this one at the end."""
        if last is not None:
            self.add(last)
        self._actions.put(None)

    def abandon(self) -> None:
        """Run no more actions, and wait for the one that has begun, but for no GPU."""
        self._dropped = True
        self.seal()
        with self._acting:
            pass

    def _run(self) -> None:
        while (queued := self._actions.get()) is not None and not self._dropped:
            packed, action, done = queued
            if packed is not None:
                packed.synchronize()
            with self._acting:
                if not self._dropped:
                    action()
                    done.set_result(None)


def mark(device: torch.device) -> torch.cuda.Event:
    """Record an event on the current stream of a GPU."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
