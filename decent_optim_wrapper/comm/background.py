"""Daemon threads for actions that block outside of Python; idle threads are reused."""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

# Its handler of forks runs before the one below, which drops what waiting actions know.
import decent_optim_wrapper.forks  # noqa: F401

Result = TypeVar("Result")

_THREAD_NAME = "decent-background"
# How long a thread waits for its next action before it ends.
_IDLE_SECONDS = 10.0
# How long the end of the process waits for all actions together.
_EXIT_SECONDS = 1.0
_EXIT_POLL_SECONDS = 0.005


def in_background(action: Callable[[], Result]) -> Future[Result]:
    """Run an action on a daemon thread, which does not delay the end of the process.

    It may block outside of Python. The action runs on the GPU of the caller.
    """
    future: Future[Result] = Future()
    # A new thread is on the first GPU, where its calls would make a context of their own.
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.current_device() if is_used else None
    # To start a thread takes until the system has run it: half a millisecond on a busy machine.
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    _busy.add(worker)
    worker.actions.put((future, action, gpu))
    return future


def is_background() -> bool:
    """Return whether this thread runs an action of `in_background`."""
    return threading.current_thread().name == _THREAD_NAME


class _Worker:
    """A thread that runs actions one after the other, and ends after some time without any."""

    def __init__(self) -> None:
        # Each with the GPU on which it runs; None before CUDA is used.
        self.actions: SimpleQueue[tuple[Future[Any], Callable[[], Any], int | None]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=_THREAD_NAME).start()

    def _run(self) -> None:
        while True:
            try:
                _run_next(*self.actions.get(timeout=_IDLE_SECONDS))
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    # It was taken at this moment, so an action comes.
                    continue
                return
            _busy.discard(self)
            _idle.append(self)


def _run_next(future: Future[Any], action: Callable[[], Any], gpu: int | None) -> None:
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        future.set_result(action())
    except BaseException as error:
        # Otherwise what they used, such as connections, stays until the next garbage collection:
        # often it refers to the future.
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    finally:
        # The error holds this frame.
        del future, action


# The one that became idle last is used first.
_idle: deque[_Worker] = deque()
_busy = set[_Worker]()
# Threads do not exist in a forked process.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_busy.clear)


def _end_with_process() -> None:
    """Wait until no thread of the library is in C++, for a limited time.

    A thread that returns from there to Python while Python is finalised ends the process with
    "terminate called without an active exception". Idle threads wait in Python.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    while _busy and time.monotonic() < deadline:
        time.sleep(_EXIT_POLL_SECONDS)


# Finalizers run in the reverse order of their creation: this one after the finalizers of the
# wrappers, which end what the threads wait for.
weakref.finalize(_end_with_process, _end_with_process)
