"""Agreement on the members through the store, epoch by epoch.

Every epoch has one list of members, written once by an atomic compare-and-set, and a gloo group of
exactly these ranks. Ranks that start, for the first time or again, open an epoch once all of them
are present. A rank that loses a peer closes its connections and enters the next epoch; its own
peers notice that and follow. A rank that comes back asks to join, and the members enter the next
epoch together with it.

If the network is torn, at most one part continues, whatever the store is: a list of members has at
least half of the previous members, and is written only if the previous list is still in place. If
both halves come, the compare-and-set decides between them.
"""

from __future__ import annotations

import json
import operator
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn

from loguru import logger
from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.state_transfer import difference
from decent_optim_wrapper.comm.store import (
    WARN_AFTER_SECONDS,
    BoundedStore,
    part_of_run,
    store_errors,
    warn_of,
)
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import within
from decent_optim_wrapper.elastic.membership.ended import key_prefix, starts_key
from decent_optim_wrapper.elastic.membership.epoch import Epoch, Note, with_donor
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat, request_key
from decent_optim_wrapper.elastic.membership.links import LinkTrial
from decent_optim_wrapper.errors import PeerError, text_of

_POLL_SECONDS = 0.02
# Each look names the keys of all ranks: the work of the store would grow with their square.
_POLL_SECONDS_PER_RANK = 1e-4
# Members are alive when a group is made: they connect soon, or one of them has just died. Several
# connections over links of 150 ms that lose packets take some 10 s.
_CONNECT = timedelta(seconds=20)
# Before the others notice a rank that comes back, they may wait for a lost rank, for each other,
# for the connections of an epoch and for their first messages, each up to the timeout. Members that
# send no heartbeats may have finished: then one timeout is enough.
_NEWCOMER_TIMEOUTS = 4
_LEAST_ATTEMPTS = 2
# Bound for telling the others of a failure, which must not delay this rank's own error much.
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

    # Separates the keys of several wrappers; all processes build them in the same order.
    built = 0

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta, stale_after: float
    ) -> None:
        with _store_errors(rank):
            self._store = self._own_keys(store, timeout)
        self.rank = rank
        self._everyone = self._members = tuple(range(world_size))
        self._others = [other for other in self._everyone if other != rank]
        self._timeout = timeout
        self._epoch = self._life = 0
        # Whether this rank has been a member.
        self._took_part = False
        self._heartbeat = Heartbeat(self._store, rank, stale_after)
        # Send this text with every heartbeat from now on; send none, because this rank has failed.
        self.say, self.leave = self._heartbeat.say, self._heartbeat.leave
        # Return whether a new epoch is due: a member is dead, has lost a peer, or comes back.
        self.is_due = self._heartbeat.is_over
        weakref.finalize(self, self._heartbeat.close)

    @classmethod
    def tell_failure(cls, store: Any, rank: int, error: Exception) -> None:
        """Send the ranks that start together with this one the reason why it does not come.

        This counts as a rendezvous, so that the next one has the same number on all ranks.

        Raises:
            DistError, TimeoutError: the store is gone, or does not answer.
        """
        part = cls._own_keys(store, _TELL)
        if part.check(["epoch"]):
            # The others are training already and do not wait.
            return
        epoch, life = 1, part.add(starts_key(rank), 1)
        while part.check([_members_key(epoch)]):
            epoch += 1
        failure = {"rank": rank, "life": life, "error": f"{type(error).__name__}: {error}"}
        part.compare_set(_members_key(epoch), "", json.dumps(failure))

    @classmethod
    def _own_keys(cls, store: Any, timeout: timedelta) -> BoundedStore:
        """The part of the run, under a prefix that no other rendezvous of this process has."""
        name, cls.built = key_prefix(cls.built), cls.built + 1
        return within(timeout.total_seconds(), lambda: part_of_run(store, name, timeout))

    def heard(self) -> dict[int, str]:
        """The texts of the last heartbeats of the other ranks, as far as they have sent any."""
        with _store_errors(self.rank):
            return {rank: text for rank in self._others if (text := self._heartbeat.heard(rank))}

    def agree(self, text: str, joins: bool) -> None:
        """Publish a description, or compare it with the one that the members have published.

        Raises:
            ValueError: this rank joins them with another description.
        """
        with _store_errors(self.rank):
            if not joins:
                self._store.set("agreement", text)
            elif (theirs := self._store.get("agreement")) != text:
                self.leave()
                raise ValueError(
                    f"rank {self.rank}: this rank comes back with "
                    f"{difference(text, theirs, 'everyone else')}; build all as before"
                )

    def gather(self, note: Note) -> Epoch:
        """Enter epochs until the members of one are connected; every living member does the same.

        Raises:
            PeerError: the members could not connect, this newcomer has a dead link to one of them,
                not all ranks came at the start, all with a state were lost, the store is gone, or
                another process has taken the place of this one.
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
                    continue
                notes = self._notes(epoch, members)
                if all(each.needs_state for each in notes.values()):
                    self._begin_run(note)
                if connected := self._connect_epoch(epoch, notes):
                    return connected
                LinkTrial(self._store, epoch, notes, self._heartbeat, self._timeout).run()
        raise PeerError(
            f"rank {self.rank}: the ranks agreed on the members {list(self._members)} several "
            f"times, but could not connect; look for ranks that fail one after the other and for "
            f"dead links between two ranks, and restart from a checkpoint"
        )

    def _begin_run(self, note: Note) -> None:
        """Begin a new run, since no member has a state.

        Raises:
            PeerError: this rank may have received part of one.
        """
        if self._took_part and note.round == 0:
            self.leave()
            raise PeerError(
                f"rank {self.rank}: all ranks with a state were lost; restart this one, too"
            )
        # What it said in an earlier run in the same store is not true of this one.
        self._heartbeat.forget()

    def _begin(self) -> None:
        """Connect to the store, and register as this rank.

        Raises:
            ValueError: another process that is alive has this rank number.
        """
        self._store.connect()
        if self._store.add(starts_key(self.rank), 0) and self._heartbeat.is_taken():
            raise ValueError(
                f"rank {self.rank}: another process with this rank number is alive on the same "
                f"store; give every process a rank number of its own, and restart a rank only "
                f"after its old process has ended"
            )
        self._life = self._store.add(starts_key(self.rank), 1)
        self._heartbeat.start(self._life)

    def _enter(self, note: Note) -> int:
        if self._store.add(starts_key(self.rank), 0) > self._life:
            self._give_way()
        if note.needs_state:
            self._skip_to_open()
        else:
            self._check_last_members()
        self._epoch += 1
        self._store.set(_note_key(self._epoch, self.rank), json.dumps(note, default=operator.index))
        self._store.set(request_key(self._epoch), str(self.rank))
        return self._epoch

    def _give_way(self) -> NoReturn:
        """End this process, which was stopped or cut off, and was replaced meanwhile."""
        self.leave()
        raise PeerError(
            f"rank {self.rank}: a later process with this rank number has taken the place of "
            f"this one; end this one, and give every process a rank number of its own",
            self.rank,
        )

    def _check_last_members(self) -> None:
        """Check that the store still has the last list of members.

        Raises:
            PeerError: it has another list or none; others may continue with the store that had it.
        """
        key, last = _members_key(self._epoch), json.dumps(self._members)
        if self._took_part and self._store.find(key) != last:
            self.leave()
            raise PeerError(
                f"rank {self.rank}: the store no longer knows that {list(self._members)} were the "
                f"last members, so it cannot decide which ranks go on; use a store that does not "
                f"lose its values, and restart all ranks from a checkpoint"
            )

    def _skip_to_open(self) -> None:
        """Skip the epochs whose members have been written."""
        self._epoch = max(self._epoch, self._last_epoch())
        while self._store.check([_members_key(self._epoch + 1)]):
            self._epoch += 1
            self._read_members(self._epoch)

    def _last_epoch(self) -> int:
        """The last epoch whose members were connected; 0 before the first one."""
        return int(self._store.find("epoch") or 0)

    def _agree_on_members(self, epoch: int, needs_state: bool) -> tuple[int, ...]:
        """Wait until the members of the epoch are written, or write them."""
        begun, timeout, warns = time.monotonic(), self._timeout, epoch == 1
        # How often a rank that comes back may wait for as long again.
        more = _NEWCOMER_TIMEOUTS - 1 if needs_state else 0
        while not self._store.check([_members_key(epoch)]):
            if self._heartbeat.is_replaced:
                self._give_way()
            late = time.monotonic() > begun + timeout.total_seconds()
            if warns and time.monotonic() > begun + WARN_AFTER_SECONDS:
                warns, present = False, self._present(epoch)
                if present[0] == self.rank:
                    warn_of(sorted({*self._everyone} - {*present}), self.rank)
            if late and more:
                hears = self._heartbeat.hears_members(self._others, max(1, self._last_epoch()))
                timeout, more = (timeout + self._timeout, more - 1) if hears else (timeout, 0)
                # The members may have been written meanwhile.
                continue
            if present := self._founders(epoch) if needs_state else self._survivors(epoch, late):
                self._store.compare_set(_members_key(epoch), "", json.dumps(present))
            elif late and needs_state:
                notes = self._notes(epoch, self._present(epoch))
                starting = {rank for rank, note in notes.items() if note.needs_state}
                # Unless the last one has just come.
                if missing := sorted({*self._everyone} - starting):
                    raise PeerError(
                        f"rank {self.rank}: waited {timeout} for the other ranks, of which "
                        f"{missing} did not come or have ended since; start every rank with the "
                        f"same store and DECENT_SECRET, unless the others have finished"
                    )
            elif late:
                self.leave()
                raise PeerError(
                    f"rank {self.rank}: waited {timeout} for at least half of the last members "
                    f"{list(self._members)}, of which only {list(self._present(epoch))} came; "
                    f"the others may train on where this rank cannot see them; restart "
                    f"those that have ended meanwhile, or all ranks from a checkpoint"
                )
            else:
                time.sleep(max(_POLL_SECONDS, _POLL_SECONDS_PER_RANK * len(self._everyone)))
        members = self._read_members(epoch)
        if self.rank in members:
            # They are known to be alive, since they have just entered.
            self._heartbeat.watch(members, epoch)
            self._members = members
        return members

    def _founders(self, epoch: int) -> tuple[int, ...]:
        """All ranks, when all are present and none has a state that the others need."""
        if not self._entered(epoch, self._everyone):
            return ()
        notes = self._notes(epoch, self._everyone)
        return self._everyone if all(note.needs_state for note in notes.values()) else ()

    def _survivors(self, epoch: int, late: bool) -> tuple[int, ...]:
        """The ranks that have entered, when every other member is dead or too late.

        They are at least half of the last members, or none. A new process of a member counts, too,
        because it is started after the old one has ended.
        """
        awaited = [rank for rank in self._members if self._heartbeat.alive(rank)]
        if not late and not self._entered(epoch, awaited):
            return ()
        present = self._present(epoch)
        returned = {*self._members}.intersection(present)
        return present if 2 * len(returned) >= len(self._members) else ()

    def _read_members(self, epoch: int) -> tuple[int, ...]:
        """The members of the epoch; there are none if a rank could not start.

        Raises:
            ValueError: a rank could not start, and this rank starts together with it.
        """
        written = json.loads(self._store.get(_members_key(epoch)))
        if isinstance(written, list):
            return tuple(written)
        if not self._took_part and self._life <= written["life"]:
            raise ValueError(
                f"rank {self.rank}: rank {written['rank']} could not start, and no rank goes on "
                f"without it: {written['error']}"
            )
        return ()

    def _connect_epoch(self, epoch: int, notes: dict[int, Note]) -> Epoch | None:
        """Connect the members, who wrote the notes; return None if one is lost meanwhile."""
        members, timeout = tuple(notes), min(self._timeout, _CONNECT)
        place, is_over = members.index(self.rank), self._heartbeat.is_over

        def connect() -> tuple[Any, Any]:
            store = PrefixStore(f"{epoch}", self._store.clone())
            world = connect_gloo(PrefixStore("world", store), place, len(members), timeout)
            world._set_default_timeout(self._timeout)
            return world, store

        world = store = None
        try:
            if len(members) > 1:
                world, store = within(timeout.total_seconds(), connect, is_over)
        except (RuntimeError, TimeoutError) as error:
            text = "rank {}: the members of epoch {} cannot connect: {}"
            logger.warning(text, self.rank, epoch, text_of(error))
            return None
        self._store.set("epoch", str(epoch))
        self._took_part = True
        parts = (world, place, members, self._timeout, store, f"{self._store.place}/{epoch}")
        return Epoch(notes=with_donor(notes), transport=Transport(*parts, should_stop=is_over))

    def _present(self, epoch: int) -> tuple[int, ...]:
        """The ranks that have entered."""
        came = [rank for rank in self._everyone if self._store.exist([_note_key(epoch, rank)])]
        texts = self._store.look([_note_key(epoch, rank) for rank in came])
        return tuple(rank for rank, text in zip(came, texts, strict=True) if text)

    def _entered(self, epoch: int, ranks: Iterable[int]) -> bool:
        return self._store.check([_note_key(epoch, rank) for rank in ranks])

    def _notes(self, epoch: int, ranks: Sequence[int]) -> dict[int, Note]:
        """The notes of ranks that have entered."""
        texts = self._store.get_all([_note_key(epoch, rank) for rank in ranks])
        return {one: Note(*json.loads(text)) for one, text in zip(ranks, texts, strict=True)}


def _members_key(epoch: int) -> str:
    return f"{epoch}/members"


def _note_key(epoch: int, rank: int) -> str:
    return f"{epoch}/note/{rank}"


def _store_errors(rank: int) -> AbstractContextManager[None]:
    remedy = "keep it in a process that outlives the ranks, and check the link to it"
    return store_errors(rank, "the store in which the ranks agree", remedy)
