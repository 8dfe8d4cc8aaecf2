"""The ranks that are still there: agreed on through the store, epoch by epoch.

Every epoch has one list of members, written once by an atomic compare-and-set, and a gloo group of
exactly these. Whoever loses a peer hangs up and enters the next epoch; its own peers notice the
closed connections and follow. A rank that comes back knocks, and the members enter the next epoch
together with it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed import DistError

from decent_optim_wrapper._backend import prefixed
from decent_optim_wrapper._pulse import Pulse
from decent_optim_wrapper.errors import PeerError

_POLL_SECONDS = 0.02
# Members are alive when a group is made, so it stands soon, or one of them has just died.
_CONNECT = timedelta(seconds=10)
# The others may first wait for a lost rank, for each other, for an epoch's connections and for the
# proof of these, each up to the timeout, before they notice one that comes back.
_NEWCOMER_TIMEOUTS = 4
# Wrappers in one process do not mix up their keys; all processes build them in the same order.
_numbers = itertools.count()


class Note(NamedTuple):
    """What a rank says of itself when it enters an epoch.

    Args:
        round: of the next launch.
        fresh: whether it has no parameters worth keeping, and wants those of another rank.
    """

    round: int
    fresh: bool


class Gathering(NamedTuple):
    """An epoch that stands.

    Args:
        notes: of every member, by rank and in that order.
        world: their group; None for a rank that is alone.
        store: theirs alone.
    """

    notes: dict[int, Note]
    world: Any | None
    store: Any

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks, as numbered at the very start."""
        return tuple(self.notes)


class Crew:
    """One rank's view of who is there.

    Args:
        store: shared by all ranks, and outliving each of them.
        rank: this one, as numbered at the start.
        world_size: number of ranks at the start.
        timeout: bounds every wait for the others.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = prefixed(f"decent_optim_wrapper/crew {next(_numbers)}", store)
        self.rank = rank
        self.members = tuple(range(world_size))
        self._everyone = self.members
        self._decides = False
        self._timeout = timeout
        self._epoch = 0
        # A rank that was here before has nothing left of it.
        self.reborn = self._store.add(f"starts/{rank}", 1) > 1
        self._pulse = Pulse(self._store, rank, world_size)

    @property
    def wanted(self) -> bool:
        """Whether a rank asks the others to gather again: it lost a peer, or comes back."""
        return self._pulse.came

    def leave(self) -> None:
        """Give no more signs of life."""
        self._pulse.stop()

    def publish(self, text: str) -> None:
        """Write down what all members have in common, for those that come later."""
        self._store.set("agreement", text)

    def published(self) -> str:
        """What the members have in common."""
        return str(self._store.get("agreement").decode())

    def gather(self, note: Note) -> Gathering:
        """Enter epochs until one stands; every living member does the same.

        Raises:
            PeerError: none stood, the ranks of the start did not all come, or the store is gone.
        """
        try:
            for _ in range(2 * len(self._everyone) + 8):
                epoch = self._enter(note)
                if self.rank in self._agree(epoch):
                    if gathering := self._stand(epoch):
                        return gathering
                else:
                    # The others went on without this rank: it comes back like a restarted one.
                    logger.warning("rank {}: the others have gone on, ask to join", self.rank)
                    note = note._replace(fresh=True)
        except DistError as error:
            raise PeerError(
                f"rank {self.rank}: the store in which the ranks agree does not answer ({error}); "
                f"keep it in a process that outlives the ranks"
            ) from error
        raise PeerError(
            f"rank {self.rank}: the ranks failed faster than they could agree on who is left"
        )

    def _stand(self, epoch: int) -> Gathering | None:
        """Connect the members; None if one of them is lost meanwhile."""
        self.members = tuple(json.loads(self._store.get(f"{epoch}/members")))
        notes = {rank: self._note(epoch, rank) for rank in self.members}
        store = prefixed(f"{epoch}", self._store)
        try:
            gathering = Gathering(notes, self._connect(store), store)
        except RuntimeError as error:
            logger.warning("rank {}: epoch {} does not stand: {}", self.rank, epoch, error)
            return None
        self._store.set("epoch", str(epoch))
        self._pulse.await_key(f"{epoch + 1}/knock")
        return gathering

    def _enter(self, note: Note) -> int:
        if note.fresh and self._store.check(["epoch"]):
            self._epoch = max(self._epoch, int(self._store.get("epoch")))
        self._epoch += 1
        self._store.set(f"{self._epoch}/note/{self.rank}", json.dumps(note))
        self._store.set(f"{self._epoch}/knock", str(self.rank))
        self._decides = not note.fresh
        return self._epoch

    def _agree(self, epoch: int) -> tuple[int, ...]:
        """Wait for the members of the epoch to be written, or write them.

        They are those who have entered, once everyone else is dead or too late.
        """
        key = f"{epoch}/members"
        comes_back = epoch > 1 and not self._decides
        patience = self._timeout * (_NEWCOMER_TIMEOUTS if comes_back else 1)
        deadline = time.monotonic() + patience.total_seconds()
        while not self._store.check([key]):
            absent = [rank for rank in self.members if not self._entered(epoch, rank)]
            late = time.monotonic() > deadline
            if late and (epoch == 1 or not self._decides):
                raise PeerError(
                    f"rank {self.rank}: waited {patience} for the other ranks, of which "
                    f"{absent} did not come; start every rank, with the same store"
                )
            # At the start nobody has given a sign of life yet, and all are waited for.
            awaited = absent if epoch == 1 else [r for r in absent if self._pulse.alive(r)]
            if self._decides and (late or not awaited):
                present = [rank for rank in self._everyone if self._entered(epoch, rank)]
                self._store.compare_set(key, "", json.dumps(present))
            time.sleep(_POLL_SECONDS)
        return tuple(json.loads(self._store.get(key)))

    def _entered(self, epoch: int, rank: int) -> bool:
        return bool(self._store.check([f"{epoch}/note/{rank}"]))

    def _note(self, epoch: int, rank: int) -> Note:
        return Note(*json.loads(self._store.get(f"{epoch}/note/{rank}")))

    def _connect(self, store: Any) -> Any | None:
        """Make the group of the members, and prove that all are in it."""
        if len(self.members) == 1:
            return None
        place = self.members.index(self.rank)
        patience = min(self._timeout, _CONNECT)
        world: Any = dist.ProcessGroupGloo(
            prefixed("world", store), place, len(self.members), patience
        )
        try:
            world.allreduce([torch.ones(1, device="cpu")]).wait(patience)
        except RuntimeError:
            # A collective that hangs holds the group until the timeout.
            threading.Thread(target=[world].clear, daemon=True).start()
            raise
        world._set_default_timeout(self._timeout)
        return world
