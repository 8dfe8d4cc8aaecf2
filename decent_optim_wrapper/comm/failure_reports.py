"""Notes in the store about which rank was lost and why, written before connections are closed.

A rank that loses a peer closes its own connections, so that no rank waits for it. Without a note,
its neighbours would then consider this healthy rank as lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore

from decent_optim_wrapper.comm import secret
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.errors import CallOrderError, PeerError, text_of

Result = TypeVar("Result")

# How long to wait for a note if a connection is closed: gloo closes it before it raises.
_CLOSED_SECONDS = 0.3
# The same if a rank did not answer in time, or if one of several is lost.
_SILENT_SECONDS = 1.5
_POLL_SECONDS = 0.02
# A store that does not answer is given up after this time, so that errors are not late.
_STORE_TIMEOUT = timedelta(seconds=1.5)
# Characters of an error in a note; longer ones are cut.
_LONGEST_ERROR = 500


class PeerLoss(NamedTuple):
    """The outcome of a search for the lost rank.

    Args:
        ranks: the lost rank, as numbered at the start; several if it is not known which one.
        error: the error that the rank itself has noted; empty if there is none.
        ended: whether it has closed its connections without an error of the library.
        out_of_order: whether its error is a `CallOrderError`: it is alive, but in another call.
        without_store: whether no store answers that would say so.
    """

    ranks: list[int]
    error: str = ""
    ended: bool = False
    out_of_order: bool = False
    without_store: bool = False

    def __str__(self) -> str:
        if len(self.ranks) != 1:
            return f"one of the ranks {self.ranks}"
        cause = f", which failed with {self.error}" if self.error else ""
        if self.ended:
            cause = ", which ended, or has made fewer calls,"
        return f"rank {self.ranks[0]}{cause}"

    @property
    def advice(self) -> str:
        """Where to look for the cause."""
        if self.ended:
            return (
                "look there for an error; if there is none, make the same number of calls on every "
                "rank, with torch.distributed.algorithms.Join if some have fewer batches"
            )
        if self.without_store:
            return (
                "look there for the first error, or for why it has ended before the others: no "
                "store answers in which it would have said so"
            )
        return "look there for the first error"

    def as_error(self, here: int, text: str, **place: int) -> PeerError | CallOrderError:
        """The error of a rank that has lost this one.

        Args:
            here: the rank.
            text: what was expected, what came, and what to do.
            place: the round and the bucket that failed, if any.
        """
        if self.out_of_order:
            # It closed its connections before the other had read that it is in another method.
            return CallOrderError(f"rank {here}: {self.error}")
        lost = self.ranks[0] if len(self.ranks) == 1 else None
        return PeerError(f"rank {here}: {text}", lost, **place)


class FailureReports:
    """Reads and writes the notes for one rank.

    Args:
        store: a connection of this transport to the store of its ranks; None if there is none.
        rank: this rank, as numbered at the start.
        place: which part of a store it is; a report that is copied to another part is none there.
    """

    def __init__(self, store: Any | None, rank: int, place: str = "") -> None:
        name = secret.named("failures")
        part, place = store and PrefixStore(name, store), f"{place}/{name}"
        self._store = None if part is None else BoundedStore(part, _STORE_TIMEOUT, place, ours=True)
        self._rank = rank

    def note_error(self, error: BaseException) -> None:
        """Note that this rank itself failed; only the first such note counts."""
        text = f"{type(error).__name__}: {text_of(error)}"[:_LONGEST_ERROR]
        note = PeerLoss([self._rank], text, out_of_order=isinstance(error, CallOrderError))
        self._try(lambda store: store.compare_set("error", "", json.dumps(note._asdict())))

    def note(self, suspects: Sequence[int]) -> None:
        """Note the ranks that may be lost, before the connections are closed; none at the end.

        Only the first note counts: a rank that ends may then lose others.
        """
        self._try(lambda store: store.compare_set(_key(self._rank), "", json.dumps([*suspects])))
        if suspects:
            self._try(lambda store: store.set("loss", "yes"))

    def is_lost(self) -> bool:
        """Return whether a rank has noted that it failed, or lost another one; on any thread."""
        try:
            # Over another connection: a store that is slow now may answer once a loss is found.
            store = None if self._store is None else self._store.another(_STORE_TIMEOUT)
            return store is not None and (store.check(["error"]) or store.check(["loss"]))
        except RuntimeError:
            return False

    def find(self, suspects: Sequence[int], silent: bool) -> PeerLoss:
        """Find the lost rank: one of the suspects, or one that their notes name.

        Args:
            suspects: the ranks one of which was lost, as numbered at the start.
            silent: whether they did not answer in time; otherwise a connection was closed.
        """
        several = len(suspects) > 1
        deadline = time.monotonic() + (_SILENT_SECONDS if silent or several else _CLOSED_SECONDS)
        loss = PeerLoss(sorted(suspects))
        while time.monotonic() < deadline:
            found = self._try(lambda store: self._look(store, suspects))
            if found is None:
                return loss._replace(without_store=True)
            loss = found
            if loss.error or loss.ended or (several and len(loss.ranks) == 1):
                break
            time.sleep(_POLL_SECONDS)
        return loss

    def error(self) -> PeerLoss | None:
        """The rank that itself failed, if there is a note of one."""
        return self._try(_read_error)

    def _look(self, store: BoundedStore, suspects: Sequence[int]) -> PeerLoss:
        """Follow the notes from rank to rank, up to the ranks without one."""
        if broken := _read_error(store):
            return broken
        seen, pending = {self._rank}, list(suspects)
        silent: list[int] = []
        while pending:
            rank = pending.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if (lost := json.loads(store.find(_key(rank)) or "null")) is None:
                silent.append(rank)
            elif lost:
                pending += lost
            else:
                return PeerLoss([rank], ended=True)
        # If two ranks waited for each other, both have left a note and none is silent.
        return PeerLoss(sorted(silent or suspects))

    def _try(self, call: Callable[[BoundedStore], Result]) -> Result | None:
        """Use the store, if there is one and it answers; the store itself may be lost."""
        try:
            return None if self._store is None else call(self._store)
        except RuntimeError:
            self._store = None
            return None


def _key(rank: int) -> str:
    return f"lost/{rank}"


def _read_error(store: BoundedStore) -> PeerLoss | None:
    found = store.find("error")
    return None if found is None else PeerLoss(**json.loads(found))
