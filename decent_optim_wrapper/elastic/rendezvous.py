"""Agreement on the members through the store, epoch by epoch.

Every epoch has one list of members, written once by an atomic compare-and-set, and a gloo group of
exactly these ranks. Ranks that start, for the first time or again, open an epoch once all of them
are present. A rank that loses a peer closes its connections and enters the next epoch; its own
peers notice that and follow. A rank that comes back asks to join, and the members enter the next
epoch together with it.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from loguru import logger
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.state_transfer import difference
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import within
from decent_optim_wrapper.elastic.epoch import Epoch, Note, with_donor
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.errors import PeerError, text_of

_POLL_SECONDS = 0.02
# Members are alive when a group is made: they connect soon, or one of them has just died.
_CONNECT = timedelta(seconds=10)
# Before the others notice a rank that comes back, they may wait for a lost rank, for each other,
# for the connections of an epoch and for its first collective, each up to the timeout.
_NEWCOMER_TIMEOUTS = 4
_LEAST_ATTEMPTS = 2
# For notifying the others of a failure: this rank's own error must not be delayed much.
_TELL = timedelta(seconds=2)


class Rendezvous:
    """Agrees with the other ranks on the members.

    Args:
        store: shared by all ranks; it must outlive each of them.
        rank: this rank, as numbered at the start.
        world_size: number of ranks at the start.
        timeout: bound of every wait for the others.
        stale_after: seconds without a heartbeat after which a rank counts as dead.
    """

    # Keeps the keys of several wrappers apart; all processes build them in the same order.
    built = 0

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta, stale_after: float
    ) -> None:
        self._store = self._own_keys(store, timeout)
        self.rank = rank
        self._everyone = self._members = tuple(range(world_size))
        self._timeout = timeout
        self._epoch = 0
        # Whether this rank has been a member; and whether any epoch is known to have had members.
        self._took_part = self._founded = False
        self._life = 0
        self._heartbeat = Heartbeat(self._store, rank, world_size, stale_after)
        weakref.finalize(self, self._heartbeat.stop)

    @classmethod
    def tell_failure(cls, store: Any, rank: int, error: Exception) -> None:
        """Notify the ranks that start together with this one why it does not come.

        This counts as a rendezvous that was built: the next one has the same number on all ranks.
        """
        part = cls._own_keys(store, _TELL)
        try:
            if part.check(["epoch"]):
                # The others are training already and do not wait.
                return
            epoch, life = 1, part.add(_starts_key(rank), 1)
            while part.check([_members_key(epoch)]):
                epoch += 1
            failure = {"rank": rank, "life": life, "error": f"{type(error).__name__}: {error}"}
            part.claim(_members_key(epoch), json.dumps(failure))
        except DistError as silence:
            logger.warning("rank {}: the others could not be told: {}", rank, silence)

    @classmethod
    def _own_keys(cls, store: Any, timeout: timedelta) -> BoundedStore:
        """The store under a prefix that no other rendezvous of this process has."""
        part = PrefixStore(key_prefix(cls.built), store)
        cls.built += 1
        return BoundedStore(part, timeout)

    @property
    def wanted(self) -> bool:
        """Whether a rank asks for a new epoch: it lost a peer, or comes back."""
        return self._heartbeat.came

    def leave(self) -> None:
        """Send no more heartbeats."""
        self._heartbeat.stop()

    def agree(self, text: str, joins: bool) -> None:
        """Publish a description, or compare it with the one that the members have published.

        Raises:
            ValueError: this rank joins them with another description.
        """
        with _store_errors(self.rank):
            if not joins:
                self._store.set("agreement", text)
            elif (theirs := self._store.get("agreement")) != text:
                raise ValueError(
                    f"rank {self.rank}: this rank comes back with "
                    f"{difference(text, theirs, 'everyone else')}; build the same model, optimizer "
                    f"and wrapper as before"
                )

    def gather(self, note: Note) -> Epoch:
        """Enter epochs until the members of one are connected; every living member does the same.

        Raises:
            PeerError: the members could not connect, not all ranks came at the start, the store is
                gone, or another process has taken the place of this one.
            ValueError: a rank could not start; the text quotes its error. Or another process that
                is alive has the number of this rank.
        """
        # If a link between two ranks is dead, no attempt succeeds, and each takes its time.
        enough = time.monotonic() + _NEWCOMER_TIMEOUTS * self._timeout.total_seconds()
        with _store_errors(self.rank):
            if self._life == 0:
                self._begin()
            for attempt in range(2 * len(self._everyone) + 8):
                if attempt > _LEAST_ATTEMPTS and time.monotonic() > enough:
                    break
                epoch = self._enter(note)
                members = self._agree_on_members(epoch, note.needs_state)
                if self.rank not in members:
                    # The others continued without this rank: it comes back as a restarted one.
                    logger.warning("rank {}: the others have gone on, ask to join", self.rank)
                    note = note._replace(needs_state=True)
                elif connected := self._connect_epoch(epoch, members):
                    return connected
        raise PeerError(
            f"rank {self.rank}: the ranks agreed on the members {list(self._members)} several "
            f"times, but could not connect; look for ranks that fail one after the other and for "
            f"dead links between two ranks, and restart from a checkpoint"
        )

    def _begin(self) -> None:
        """Connect to the store, and take this rank's place there.

        Raises:
            ValueError: another process that is alive has it.
        """
        self._store.connect()
        if self._store.check([_starts_key(self.rank)]) and self._heartbeat.is_taken():
            raise ValueError(
                f"rank {self.rank}: another process with this rank number is alive on the same "
                f"store; give every process a rank number of its own, and restart a rank only "
                f"after its old process has ended"
            )
        self._life = self._store.add(_starts_key(self.rank), 1)
        self._heartbeat.start(self._life)

    def _enter(self, note: Note) -> int:
        if self._store.add(_starts_key(self.rank), 0) > self._life:
            # This one was stopped, given up, restarted elsewhere, and then continued.
            self.leave()
            raise PeerError(
                f"rank {self.rank}: a later process with this rank number has taken the place of "
                f"this one; end this one, and give every process a rank number of its own",
                self.rank,
            )
        if note.needs_state:
            self._skip_to_open()
        self._epoch += 1
        self._store.set(_note_key(self._epoch, self.rank), json.dumps(note))
        self._store.set(f"{self._epoch}/join_request", str(self.rank))
        return self._epoch

    def _skip_to_open(self) -> None:
        """Skip the epochs whose members have been written."""
        if self._store.check(["epoch"]):
            self._founded = True
            self._epoch = max(self._epoch, int(self._store.get("epoch")))
        while self._store.check([_members_key(self._epoch + 1)]):
            self._epoch += 1
            self._read_members(self._epoch)

    def _agree_on_members(self, epoch: int, needs_state: bool) -> tuple[int, ...]:
        """Wait for the members of the epoch to be written, or write them."""
        comes_back = needs_state and self._founded
        timeout = self._timeout * (_NEWCOMER_TIMEOUTS if comes_back else 1)
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check([_members_key(epoch)]):
            late = time.monotonic() > deadline
            if present := self._founders(epoch) if needs_state else self._survivors(epoch, late):
                self._store.claim(_members_key(epoch), json.dumps(present))
            elif late:
                here = filter(self._heartbeat.alive, self._present(epoch))
                absent = sorted({*self._everyone}.difference(here))
                raise PeerError(
                    f"rank {self.rank}: waited {timeout} for the other ranks, of which {absent} "
                    f"did not come; start every rank, with the same store"
                )
            else:
                time.sleep(_POLL_SECONDS)
        members = self._read_members(epoch)
        if self.rank in members:
            # All of them are known to be alive: they have just entered.
            self._heartbeat.expect(members)
            self._members = members
        return members

    def _founders(self, epoch: int) -> tuple[int, ...]:
        """All ranks, once all are present and none has any state that the others need."""
        if not self._entered(epoch, self._everyone):
            return ()
        has_state = any(not self._note(epoch, rank).needs_state for rank in self._everyone)
        return () if has_state else self._everyone

    def _survivors(self, epoch: int, late: bool) -> tuple[int, ...]:
        """The ranks that have entered, once every other member is dead or too late."""
        awaited = [rank for rank in self._members if self._heartbeat.alive(rank)]
        if not late and not self._entered(epoch, awaited):
            return ()
        return self._present(epoch)

    def _read_members(self, epoch: int) -> tuple[int, ...]:
        """The members of the epoch; there are none if a rank could not start.

        Raises:
            ValueError: a rank could not start, and this rank starts together with it.
        """
        written = json.loads(self._store.get(_members_key(epoch)))
        if not isinstance(written, dict):
            return tuple(written)
        if not self._took_part and self._life <= written["life"]:
            raise ValueError(
                f"rank {self.rank}: rank {written['rank']} could not start, and nobody goes on "
                f"without it: {written['error']}"
            )
        return ()

    def _connect_epoch(self, epoch: int, members: tuple[int, ...]) -> Epoch | None:
        """Connect the members; return None if one of them is lost meanwhile."""
        notes = with_donor({rank: self._note(epoch, rank) for rank in members})
        self._heartbeat.await_key(f"{epoch + 1}/join_request")
        try:
            transport = self._connect(epoch, members)
        except (RuntimeError, TimeoutError) as error:
            text = "rank {}: the members of epoch {} cannot connect: {}"
            logger.warning(text, self.rank, epoch, text_of(error))
            return None
        self._store.set("epoch", str(epoch))
        self._took_part = True
        return Epoch(notes=notes, transport=transport)

    def _connect(self, epoch: int, members: tuple[int, ...]) -> Transport:
        """Create the group and the store of the members, and check that all are connected."""
        place, heartbeat = members.index(self.rank), self._heartbeat
        world = store = None
        if len(members) > 1:
            timeout = min(self._timeout, _CONNECT)

            def connect() -> tuple[Any, Any]:
                store = PrefixStore(f"{epoch}", self._store.clone())
                world = connect_gloo(PrefixStore("world", store), place, len(members), timeout)
                world._set_default_timeout(self._timeout)
                return world, store

            world, store = within(
                timeout.total_seconds(),
                connect,
                lambda: heartbeat.came or not all(map(heartbeat.alive, members)),
            )
        return Transport(
            *(world, place, members, self._timeout, store), should_stop=lambda: heartbeat.came
        )

    def _present(self, epoch: int) -> tuple[int, ...]:
        return tuple(rank for rank in self._everyone if self._entered(epoch, [rank]))

    def _entered(self, epoch: int, ranks: Iterable[int]) -> bool:
        return self._store.check([_note_key(epoch, rank) for rank in ranks])

    def _note(self, epoch: int, rank: int) -> Note:
        return Note(*json.loads(self._store.get(_note_key(epoch, rank))))


def key_prefix(number: int) -> str:
    """The prefix of the store's keys of this process's wrapper `number`, from 0."""
    return f"decent_optim_wrapper/rendezvous {number}"


def _members_key(epoch: int) -> str:
    return f"{epoch}/members"


def _starts_key(rank: int) -> str:
    """How many processes have had this rank number."""
    return f"starts/{rank}"


def _note_key(epoch: int, rank: int) -> str:
    return f"{epoch}/note/{rank}"


@contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise PeerError(
            f"rank {rank}: the store in which the ranks agree does not answer ({text_of(error)}); "
            f"keep it in a process that outlives the ranks, on a link that holds"
        ) from error
