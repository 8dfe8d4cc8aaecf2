"""Who was lost, and why: what ranks leave in the store before they close their connections.

Whoever loses a peer closes its own connections, so that nobody waits for it in vain. Its neighbours
see a connection that was closed, and would take a healthy rank for the lost one without a note.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from decent_optim_wrapper.comm.store import BoundedStore

Result = TypeVar("Result")

# How long to wait for a note of a rank whose connection is closed: gloo closes before it raises.
_CLOSED_SECONDS = 0.3
# And of one that did not answer in time, or of several of which one is lost.
_SILENT_SECONDS = 1.5
_POLL_SECONDS = 0.02
# A store that does not answer is given up after this time: errors must not come late.
_STORE_PATIENCE = timedelta(seconds=1.5)
# A note is an explanation, not a transcript.
_LONGEST_ERROR = 500


class Loss(NamedTuple):
    """The outcome of a search for the lost rank.

    Args:
        ranks: as numbered at the start; several where it is not known which of them.
        error: what that rank itself says of it; empty where it says nothing.
    """

    ranks: list[int]
    error: str = ""

    def __str__(self) -> str:
        if len(self.ranks) != 1:
            return f"one of the ranks {self.ranks}"
        return f"rank {self.ranks[0]}" + (f", which failed with {self.error}" if self.error else "")


class Losses:
    """One rank's access to the notes of all.

    Args:
        store: shared by the ranks of one transport; None where there is none.
        rank: this one, as numbered at the start.
    """

    def __init__(self, store: Any | None, rank: int) -> None:
        self._store = None if store is None else BoundedStore(store, _STORE_PATIENCE)
        self._rank = rank

    def note_error(self, error: BaseException) -> None:
        """Tell the others that this rank broke by itself; the first rank to do so is heard."""
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        self._try(lambda store: self._note_error(store, text))

    def note(self, suspects: Sequence[int]) -> None:
        """Tell the others for whose sake this rank closes its connections."""
        self._try(lambda store: store.set(_key(self._rank), json.dumps(list(suspects))))

    def find(self, suspects: Sequence[int], silent: bool) -> Loss:
        """Find out which of the suspects was lost, or for whose sake they closed their connections.

        Args:
            suspects: as numbered at the start.
            silent: they did not answer in time; otherwise a connection was closed.
        """
        several = len(suspects) > 1
        patience = _SILENT_SECONDS if silent or several else _CLOSED_SECONDS
        deadline = time.monotonic() + patience
        loss = Loss(sorted(suspects))
        while time.monotonic() < deadline:
            found = self._try(lambda store: self._look(store, suspects))
            if found is None:
                break
            loss = found
            if loss.error or (several and len(loss.ranks) == 1):
                break
            time.sleep(_POLL_SECONDS)
        return loss

    def error(self) -> Loss | None:
        """The rank that broke by itself, if one has said so."""
        return self._try(_read_error)

    def _note_error(self, store: BoundedStore, text: str) -> None:
        if store.add("errors", 1) == 1:
            store.set("error", json.dumps([self._rank, text]))

    def _look(self, store: BoundedStore, suspects: Sequence[int]) -> Loss:
        """Follow the notes from rank to rank, up to those that left none."""
        if broken := _read_error(store):
            return broken
        seen, pending, silent = {self._rank}, list(suspects), []
        while pending:
            rank = pending.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if store.check([_key(rank)]):
                pending += json.loads(store.get(_key(rank)))
            else:
                silent.append(rank)
        # Two ranks that waited for each other in vain both left a note.
        return Loss(sorted(silent or suspects))

    def _try(self, call: Callable[[BoundedStore], Result]) -> Result | None:
        """Use the store, if there is one and it answers: it may be what was lost."""
        try:
            return None if self._store is None else call(self._store)
        except RuntimeError:
            self._store = None
            return None


def _key(rank: int) -> str:
    return f"lost/{rank}"


def _read_error(store: BoundedStore) -> Loss | None:
    if not store.check(["error"]):
        return None
    rank, text = json.loads(store.get("error"))
    return Loss(ranks=[rank], error=text)
