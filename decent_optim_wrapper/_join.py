"""Uneven numbers of batches: what a rank does whose data has ended before the others'."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook


class IdleRounds(JoinHook):
    """Takes part in the rounds of the others without local updates.

    Args:
        idle_step: one round without an update.
    """

    def __init__(self, idle_step: Callable[[], None]) -> None:
        self._idle_step = idle_step

    def main_hook(self) -> None:
        """Run once for every step that another rank still makes."""
        self._idle_step()
