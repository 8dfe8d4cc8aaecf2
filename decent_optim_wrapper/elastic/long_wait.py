"""Looks for dead links while this rank waits long for others, whose heartbeats go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import WireError
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.links import Links


class LongWaits:
    """Tells the waits for other members, in one epoch, whether to give up.

    Args:
        links: of this rank.
        members: the ranks that it may wait for.
        heartbeat: knows whether they must meet again.
        patience: seconds of waiting after which the links are tried, for the first time. Each trial
            doubles it, since a rank may also compute that long: a link that dies later is found
            after at most twice the longest wait before.
    """

    def __init__(
        self, links: Links, members: tuple[int, ...], heartbeat: Heartbeat, patience: float
    ) -> None:
        self._heartbeat = heartbeat
        self._find_dead = partial(links.find_dead_by_probe, members, heartbeat)
        self._patience = patience
        # One at a time, with the start of the wait in which it began.
        self._trial: tuple[Future[list[int]], float] | None = None

    def begin(self) -> Callable[[], bool]:
        """Begin a wait; the result tells, each time that it is called, whether to give it up."""
        return partial(self._should_stop, time.monotonic())

    def _should_stop(self, start: float) -> bool:
        """Whether the members must meet again.

        Raises:
            WireError: a link of this rank to another member, which is alive, is dead.
        """
        if self._heartbeat.is_over:
            return True
        if self._trial is None:
            if time.monotonic() - start > self._patience:
                self._patience *= 2
                self._trial = in_background(self._find_dead), start
            return False
        trial, begun = self._trial
        if trial.done():
            self._trial = None
            # If that wait has ended, the link works again: TCP sends late what was lost in a short
            # cut. Where the store did not answer, nothing is known.
            if begun == start and trial.exception() is None and (dead := trial.result()):
                raise WireError(f"the link to ranks {dead} is dead")
        return False
