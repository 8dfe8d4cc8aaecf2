"""Looks for dead links while this rank waits long for others, whose heartbeats go on."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import WireError
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.links import Links


class LongWait:
    """Tells one wait for other members whether to give up, each time that it is called.

    Args:
        links: of this rank.
        members: the ranks that it may wait for.
        heartbeat: knows whether they must meet again.
        patience: seconds of waiting after which the links are tried; the next trials come after
            twice as long each, since a rank may also compute that long.
    """

    def __init__(
        self, links: Links, members: tuple[int, ...], heartbeat: Heartbeat, patience: float
    ) -> None:
        self._heartbeat = heartbeat
        self._find_dead = partial(links.find_dead_by_probe, members, heartbeat)
        self._patience = patience
        self._next = time.monotonic() + patience
        self._trial: Future[list[int]] | None = None

    def __call__(self) -> bool:
        """Whether the members must meet again.

        Raises:
            WireError: a link of this rank to another member, which is alive, is dead.
        """
        if self._heartbeat.is_over:
            return True
        if self._trial is None and time.monotonic() > self._next:
            self._trial = in_background(self._find_dead)
        elif self._trial is not None and self._trial.done():
            trial, self._trial = self._trial, None
            self._patience *= 2
            self._next = time.monotonic() + self._patience
            # Where the store did not answer, nothing is known.
            if trial.exception() is None and (dead := trial.result()):
                raise WireError(f"the link to ranks {dead} is dead")
        return False
