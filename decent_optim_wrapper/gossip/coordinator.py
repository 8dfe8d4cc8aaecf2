"""Coordinates one rank with the others: calls between steps, and what happens if a rank fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.early_mixing import EarlyMixing
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.header import CollectiveCall, check_calls
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.round import Round, RoundState
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.session import Replica
from decent_optim_wrapper.wire.bucket import Bucket

Result = TypeVar("Result")


class Members(Protocol):
    """A membership that survives the loss of a rank."""

    def begin_step(self) -> None:
        """Admit ranks that come back, and join the recovery of ranks that have lost a peer."""

    def end_step(self) -> None:
        """Mark the step of this rank as complete."""

    def recover(self, reason: object) -> None:
        """Agree on the remaining ranks, drop the round in flight, and open a new session."""

    def meet(self, call: CollectiveCall, action: Callable[[], Result]) -> Result:
        """Make a call with all ranks; if one is lost, repeat it with the remaining ones."""

    def leave(self) -> None:
        """Leave the members for good."""

    def notify_change(self) -> None:
        """Call back if the members have changed."""


@dataclass(eq=False)
class Coordinator:
    """Makes the collective calls of one rank between steps, and handles ranks that fail.

    Every rank has its own, and none is central.

    Args:
        rounds: the rounds.
        local_update: steps the base optimizer and checks its parameters.
        average: puts the world average in place.
        replica: the ranks that share one copy of the model.
        members: manages ranks that are lost and come back; None if their loss is an error.
    """

    rounds: Rounds
    local_update: LocalUpdate
    average: WorldAverage
    replica: Replica
    members: Members | None = None

    def __post_init__(self) -> None:
        self.early = EarlyMixing(self.rounds, self.local_update)
        # The second one is locked by the thread that is in the middle of mixing.
        self._lock, self._mixing = threading.RLock(), threading.Lock()
        # The round that all ranks had launched when they last reached the same one.
        self._launched_by_all: int | None = None

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the base, in the order of its groups."""
        return self.local_update.params

    def resume(self) -> None:
        """Do what a loaded state has left to the next step."""
        self._agree()
        self.rounds.relaunch()

    def _agree(self) -> None:
        """Agree on how to continue if states were loaded; collective in that case.

        All ranks continue with the highest round. The states of extensions that belong to a rank
        are reset unless all ranks have loaded their own. Otherwise the corrections of gradient
        tracking would not sum to zero and would bias the training for good.

        Raises:
            CallOrderError: a rank has loaded nothing, or the state of another step.
        """
        rounds, session = self.rounds, self.rounds.session
        if (source := rounds.pending.source) is None:
            return
        # A rank that has loaded nothing is found by the ranks that mix with it, in its next round.
        # All headers are sent before any is received: that rank may wait for one of them first.
        plans = session.schedule.plan_each_group(rounds.mixing_rate)
        announced = [rounds.announce(CollectiveCall.LOADED, plan) for plan in plans]
        # The last one may be a collective of all ranks, in which more ranks notice an error.
        for round in reversed(announced):
            round.receive()
        own = torch.tensor([rounds.count, source == "own"], device="cpu")
        counts, owns = session.transport.all_gather(own).unbind(1)
        rounds.resume_at(int(counts.max()))
        if not owns.all():
            for extension in rounds.extensions.all:
                if extension.belongs_to_rank:
                    extension.restart()

    def check_idle(self) -> None:
        """Check that a state may be loaded.

        Raises:
            RuntimeError: a round is in flight that other ranks may not have launched yet.
        """
        rounds, transport = self.rounds, self.rounds.session.transport
        if rounds.policy.pacing.synchronous or rounds.in_flight is None:
            return
        together = self._launched_by_all == rounds.count or transport.is_closed
        if transport.world_size > 1 and not together:
            raise RuntimeError(
                f"rank {transport.initial_rank}: load_state_dict() expects no round in flight with "
                f"{rounds.policy.pacing!r}, since other ranks may be at another one; call "
                f"synchronize() on all ranks before"
            )

    def mix_early(self, params: Iterable[Tensor] | None = None) -> None:
        """Mix the buckets in flight of some parameters, if the pacing mixes between steps.

        Args:
            params: the parameters that are about to be read; None for all.

        Raises:
            CallOrderError: a signal handler has interrupted the mixing, or an extension reads them.
        """
        if not self.early.is_on:
            return
        # Modules may run on several threads, all of which need what one of them mixes.
        with self._lock:
            if self._mixing.locked():
                raise CallOrderError(
                    f"rank {self.rounds.session.transport.initial_rank}: parameters are read by "
                    f"name in their mixing, by a signal handler or an extension; set a flag in the "
                    f"handler, and act on it after step(), or read the members of the bucket"
                )
            if (round := self.rounds.in_flight) is None:
                return
            if self.replica.may_gather:
                self.replica.reshard()
            if wanted := self.early.wanted(round, params):
                if round.state is not RoundState.MIXING and round.is_outdated:
                    # Nothing is mixed yet: all ranks can go on from a checkpoint.
                    self.local_update.check(self.rounds)
                self.with_recovery(partial(self._mix_if_in_flight, round, wanted))

    def _mix_if_in_flight(self, round: Round, wanted: Sequence[Bucket]) -> None:
        # A recovery has dropped it.
        if self.rounds.in_flight is round:
            with self._mixing:
                self.early.mix_wanted(round, wanted)

    def commit_or_roll_back(self) -> None:
        """Mix the round in flight, or restore the mixed buckets of a dropped round.

        Do not call it in the forward pass: the backward pass may need the mixed values.
        """
        self.mix_early()
        self.early.roll_back()

    def synchronize(self) -> None:
        """Finish and mix the round in flight."""
        self._begin_call()
        self.with_recovery(partial(self._reach_same_round, CollectiveCall.SYNCHRONIZE))
        self.with_recovery(self._finish)

    def _begin_call(self) -> None:
        """Begin a collective call between steps: mix what is mixed early, and check everything."""
        self.rounds.session.transport.check_open()
        self.commit_or_roll_back()
        self.local_update.check(self.rounds)

    def drop_extension(self, extension: Extension) -> None:
        """Mix the round in flight, which needs the extension, and stop calling it; collective.

        Raises:
            NonFiniteError: the round must not be mixed, and is dropped; all ranks have stopped.
        """
        nonfinite: list[NonFiniteError] = []

        def drop() -> None:
            # Other groups do not notice.
            self._finish(nonfinite)
            self.rounds.extensions.drop(extension)

        self.meet(CollectiveCall.DROP_EXTENSION, drop)
        if nonfinite:
            raise nonfinite[0]

    def receive_and_abandon(self) -> None:
        """Wait for the round in flight, if there is one, and drop it without mixing."""
        self.early.commit()
        self.with_recovery(self.rounds.receive_and_abandon)

    def _finish(self, nonfinite: list[NonFiniteError] | None = None) -> None:
        """Finish the round in flight; note a `NonFiniteError` in the list, or raise it."""
        if self.replica.may_gather:
            self.replica.reshard()
        try:
            if self.rounds.pending.in_flight:
                self.rounds.relaunch()
            self.rounds.finish()
            # No step may follow that would check it.
            self.rounds.check_on_gpu()
        except NonFiniteError as error:
            if nonfinite is None:
                raise
            nonfinite.append(error)

    def global_avg(self, may_revert: bool) -> None:
        """Put the average in place; collective."""
        self._begin_call()
        if self.rounds.policy.pacing.synchronous:
            self.with_recovery(self._await_round)
        # If a rank is lost in it, the remaining ones average their own values again.
        may_repeat = self.members is not None
        self.meet(CollectiveCall.GLOBAL_AVG, lambda: self.average.apply(may_revert, may_repeat))
        if not may_revert:
            self.keep_average()

    def keep_average(self) -> None:
        """Accept the average in place as the ranks' own parameters; collective."""
        self.average.keep()
        self.receive_and_abandon()
        with self.propagating():
            if self.members and any(each.collective for each in self.rounds.extensions.all):
                self.members.meet(CollectiveCall.KEEP_AVERAGE, self.keep_state)
            else:
                self.keep_state()

    def keep_state(self) -> None:
        """Call the extensions when an average is kept; collective."""
        for extension in self.rounds.extensions.all:
            extension.kept(self.rounds.buckets, self.rounds.session.transport)

    def meet(self, call: CollectiveCall, action: Callable[[], Result]) -> Result:
        """Run a collective action; if a rank is lost, run it again with the remaining ones.

        Args:
            call: the method that this rank is in.
            action: the action; it may run several times.
        """
        self._begin_call()
        with self.propagating(TypeError, ValueError):
            if self.members:
                return self.members.meet(call, action)
            self.announce(call)
            return action()

    def announce(self, call: CollectiveCall, same_round: bool = False) -> None:
        """Check that the ranks of the next round's group are in the same method as this one.

        Args:
            call: the method.
            same_round: whether all ranks are known to be at the same round.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
        """
        if not same_round:
            self._reach_same_round(call)
        rounds = self.rounds
        # The group that this rank meets next, even if it is idle now.
        plan = rounds.session.schedule.next_plan(rounds.count, rounds.mixing_rate)
        rounds.announce(call, plan).receive()

    def all_gather(self, tensor: Tensor, same_round: bool = False) -> Tensor:
        """Stack a small tensor of every rank that takes part; collective."""
        self.rounds.session.transport.check_open()
        with self.propagating():
            self.announce(CollectiveCall.ALL_GATHER, same_round)
            gathered = tensor
            # The transport that stacks last makes the first dimension of the result.
            for transport in reversed(self.transports):
                gathered = transport.all_gather(gathered)
        return gathered.flatten(0, len(self.transports) - 1)

    def _reach_same_round(self, call: CollectiveCall) -> None:
        """Bring all ranks to the same round if they may be at different ones.

        A rank that gets here early takes part in the rounds of the others without local updates.
        Otherwise they would wait for each other. Afterwards every rank has launched the same round
        and mixed all rounds before it.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
            NonFiniteError: a round must not be mixed, and is dropped; all ranks are at one round.
        """
        rounds, transport = self.rounds, self.rounds.session.transport
        # While an average is in place, no rank makes steps.
        together = rounds.policy.pacing.synchronous or self.average.snapshot is not None
        if together or transport.world_size == 1:
            return
        self._agree()
        arrival, coming = transport.announce(torch.tensor([call], device="cpu"))
        nonfinite: list[NonFiniteError] = []
        rounds.launch()
        while not arrival.future.done():
            round = rounds.in_flight
            if round and round.arrives_before(arrival):
                self._make_round(nonfinite)
        check_calls(call, transport.read_all(arrival, coming), transport)
        # Not a collective: ranks that are behind still launch rounds, which may be collectives.
        launched = transport.announce(torch.tensor([rounds.count], device="cpu"))
        highest = max(number for (number,) in transport.read_all(*launched).values())
        while rounds.count < highest:
            self._make_round(nonfinite)
        self._launched_by_all = rounds.count
        if nonfinite:
            raise nonfinite[0]

    def _make_round(self, nonfinite: list[NonFiniteError]) -> None:
        """Finish the round in flight, note its error, and launch the next round."""
        self._finish(nonfinite)
        # At once, even after an error: the others wait for this rank in their next round.
        self.rounds.launch()

    def _await_round(self) -> None:
        """Wait for the round in flight, if there is one; nothing is mixed yet.

        Raises:
            NonFiniteError: the round must not be mixed; it stays in flight, and mixing it raises
                again.
        """
        if round := self.rounds.in_flight:
            round.receive()
            round.flags.check()

    @property
    def transports(self) -> Sequence[Transport]:
        """The connections to the ranks with which this one gossips, and to its replica."""
        return [self.rounds.session.transport, *self.replica.transports]

    def with_recovery(self, action: Callable[[], Result]) -> Result:
        """Run an action that waits for peers; if one is lost, run it again in a new session."""
        while True:
            try:
                return action()
            except BaseException as error:
                self.recover(error)

    def recover(self, error: BaseException) -> None:
        """Drop the round of a lost peer and go on in a new session; raise any other error."""
        with self.propagating():
            if self.members is None or not isinstance(error, PeerError):
                raise error
            self.members.recover(error)

    @contextmanager
    def propagating(self, *shared: type[Exception]) -> Iterator[None]:
        """Close the connections if the body fails, since the other ranks would wait for this one.

        Args:
            shared: further errors that all ranks raise together and that change nothing.
        """
        try:
            yield
        except (PeerError, CallOrderError) as error:
            self.early.roll_back()
            if self.replica.transports:
                # The ranks along the other dimensions wait for this one, too.
                for transport in self.transports:
                    transport.report_and_close(error)
            raise
        except BaseException as error:
            if not isinstance(error, (NonFiniteError, *shared)):
                self.report_and_close(error)
            raise

    def report_and_close(self, error: BaseException) -> None:
        """Close the connections for good, and leave the error in the store for the other ranks."""
        self.rounds.abandon()
        for transport in self.transports:
            transport.report_and_close(error)
        if self.members:
            self.members.leave()
