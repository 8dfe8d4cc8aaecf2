"""Marks in the store that the process of a rank has ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.elastic.membership.heartbeat import beat_key, process_name
from decent_optim_wrapper.elastic.membership.liveness import ENDED, Beat


def mark_end(connect: Callable[[], Any], rank: int, pid: int) -> None:
    """Mark a process of a rank, a child of this one, as ended for the members of all wrappers.

    Otherwise they look for its heartbeat for `stale_after`.

    Args:
        connect: connects to the store; it may block.
        rank: the rank.
        pid: the process, on this host. If the store knows another one, such as a later one,
            nothing changes.
    """
    store, key, number, timeout = connect(), beat_key(rank), 0, timedelta(seconds=30)
    # A wrapper whose constructor has failed there may have sent no heartbeat.
    while (part := part_of_run(store, key_prefix(number), timeout, True)).add(starts_key(rank), 0):
        beat = part.find(key) or ENDED
        if Beat.parse(beat).process == process_name(pid):
            part.compare_set(key, beat, ENDED + Beat.parse(beat).text)
        number += 1


def key_prefix(number: int) -> str:
    """The prefix of the store's keys of this process's wrapper `number`, from 0."""
    return f"decent_optim_wrapper/rendezvous {number}"


def starts_key(rank: int) -> str:
    """How many processes have had this rank number."""
    return f"starts/{rank}"
