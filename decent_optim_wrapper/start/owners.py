"""The wrappers of this process by the parameters that they train; several may train the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from decent_optim_wrapper.gossip.gossip import Gossip


class Owners:
    """Lets a new wrapper find older ones of the same parameters, as long as they exist."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without wrappers: in a forked process those of its parent have no connections."""
        # Ranks may be threads.
        self._lock = threading.Lock()
        # Each wrapper with the newer ones of its parameters.
        self._newer = WeakKeyDictionary[Gossip, WeakSet[Gossip]]()

    def settle(self, tensors: Iterable[Tensor]) -> list[Gossip]:
        """Finish the rounds in flight of the wrappers of these tensors, and return the wrappers.

        Otherwise such a round would be mixed into the values with which a new wrapper starts. It is
        dropped if others have replaced the values that it sends, for example by better ones.
        """
        ids = set(map(id, tensors))
        with self._lock:
            known = [*self._newer]
        found = [each for each in known if not ids.isdisjoint(map(id, each.params))]
        for gossip in found:
            flying, transport = gossip.pipeline.in_flight, gossip.pipeline.session.transport
            # With an average in place, the next step drops the round.
            if flying and gossip.average.snapshot is None and not transport.is_closed:
                (gossip.discard if flying.is_outdated else gossip.synchronize)()
        return found

    def add(self, gossip: Gossip, older: Sequence[Gossip]) -> None:
        """Register a new wrapper; each one's steps change the parameters of the others."""
        with self._lock:
            self._newer[gossip] = WeakSet()
            for each in older:
                self._newer[each].add(gossip)
        for each in (gossip, *older) if older else ():
            for bucket in each.pipeline.buckets:
                bucket.note_flight(changed=True)

    def is_newest(self, gossip: Gossip) -> bool:
        """Return whether there is no newer wrapper of its parameters."""
        return not self._newer.get(gossip)


OWNERS = Owners()
os.register_at_fork(after_in_child=OWNERS.forget)
