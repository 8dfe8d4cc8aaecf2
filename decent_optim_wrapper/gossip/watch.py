"""Waits on a thread for a round that may take several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from decent_optim_wrapper.comm.streams import Waitable
from decent_optim_wrapper.comm.waiting import Arrival, Awaited


class Expected(NamedTuple):
    """Works to wait for, and what is lost with them: a bucket, and one of some ranks.

    Args:
        works: the works.
        bucket: the position of the bucket that an error names.
        suspects: the ranks, by position.
        on_gpu: whether a stream waits for them.
    """

    works: list[Waitable]
    bucket: int
    suspects: tuple[int, ...]
    on_gpu: bool = False


class Watch:
    """Leaves works to a thread; nobody else waits for those that are not on a GPU.

    Args:
        expected: the works.
        further: called on the thread once these are done; None if there are no more.
    """

    def __init__(
        self, expected: Iterable[Expected], further: Callable[[], Iterable[Expected]] | None
    ) -> None:
        self._watched: list[Expected] = []
        works = self._take(expected)
        more = None if further is None else (lambda: self._take(further()))
        self.arrival = Arrival(works, more)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.arrival.is_over

    def lost(self) -> Expected | None:
        """What has not arrived, after the wait has failed; None if that is not known."""
        if not self._watched:
            return None
        # The last work may have ended since the wait was given up.
        return self._watched[min(self.arrival.finished, len(self._watched) - 1)]

    def _take(self, expected: Iterable[Expected]) -> list[Awaited]:
        awaited = []
        for each in expected:
            awaited += [Awaited(work, each.on_gpu) for work in each.works]
            self._watched += [each] * len(each.works)
            # A second wait for a work of gloo would last forever.
            if not each.on_gpu:
                each.works.clear()
        return awaited
