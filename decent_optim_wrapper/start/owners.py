"""The wrappers of this process by the parameters that they train; several may train the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor

from decent_optim_wrapper.gossip.coordinator import Coordinator

# All that exist, by id, since a look at the values is safe beside other threads; and for each one
# the newer ones of its parameters.
_known = WeakValueDictionary[int, Coordinator]()
_newer = WeakKeyDictionary[Coordinator, WeakSet[Coordinator]]()
# In a forked process they have no connections.
os.register_at_fork(after_in_child=_known.clear)


def settle_owners(tensors: Iterable[Tensor]) -> None:
    """Finish the rounds in flight of the wrappers of these tensors.

    Otherwise such a round would be mixed into the values with which a new wrapper starts. It is
    dropped if others have replaced the values that it sends, for example by better ones.
    """
    for coordinator in _owners(tensors):
        round, transport = coordinator.rounds.in_flight, coordinator.rounds.session.transport
        # With an average in place, the next step drops the round.
        if round and coordinator.average.snapshot is None and not transport.is_closed:
            (coordinator.receive_and_abandon if round.is_outdated else coordinator.synchronize)()


def add_owner(coordinator: Coordinator) -> None:
    """Register a new wrapper; its steps change parameters of the older ones, and the reverse."""
    older = _owners(coordinator.params)
    _known[id(coordinator)] = coordinator
    for each in older:
        _newer.setdefault(each, WeakSet()).add(coordinator)
    for bucket in (b for each in (coordinator, *older) for b in each.rounds.buckets if older):
        bucket.note_flight(changed=True)


def _owners(tensors: Iterable[Tensor]) -> list[Coordinator]:
    ids, known = set(map(id, tensors)), [each() for each in _known.valuerefs()]
    return [each for each in known if each and not ids.isdisjoint(map(id, each.params))]


def has_newer(coordinator: Coordinator) -> bool:
    """Return whether there is a newer wrapper of its parameters."""
    return bool(_newer.get(coordinator))
