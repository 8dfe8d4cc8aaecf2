"""The collective calls between the steps of one rank, and what happens when a rank fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decent_optim_wrapper.comm.announcements import read, send_to_all
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.early_mixing import EarlyMixing
from decent_optim_wrapper.gossip.header import CollectiveCall, check_calls
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.members import Members
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.gossip.replica import Replica
from decent_optim_wrapper.gossip.resume import PendingResume, agree, relaunch

Result = TypeVar("Result")


class Gossip:
    """Makes the collective calls between steps, and handles ranks that fail.

    Args:
        pipeline: the rounds.
        local_update: steps the base optimizer and checks its parameters.
        average: puts the world average in place.
        replica: the ranks that hold one copy of the model together.
        members: manages ranks that are lost and come back; None if their loss is an error.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        local_update: LocalUpdate,
        average: WorldAverage,
        replica: Replica,
        members: Members | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.local_update = local_update
        self.average = average
        self.replica = replica
        self.members = members
        self.early = EarlyMixing(pipeline)
        # What a loaded state leaves to the next step.
        self.pending = PendingResume()
        # The second one is held by the thread that is in the middle of mixing.
        self._lock, self._mixing = threading.RLock(), threading.Lock()
        # The round that all ranks have launched, if it is still the last one.
        self._assembled_at: int | None = None

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the base, in the order of its groups."""
        return self.local_update.params

    def resume_at(self, round: int, pending: PendingResume | None = None) -> None:
        """Continue with this round, as all other ranks do; none is in flight.

        Args:
            round: number of the next round.
            pending: what a loaded state leaves to the next step; None if the ranks have agreed.
        """
        self.pending = pending or self.pending._replace(source=None)
        self.pipeline.resume_at(round)

    def resume(self) -> None:
        """Do what a loaded state has left to do between the ranks."""
        with self.propagating():
            self.with_recovery(self._resume)

    def _resume(self) -> None:
        self.pending = relaunch(self.pipeline, agree(self.pipeline, self.pending))

    def abandon_round(self) -> None:
        """Drop the round in flight, or the one to be launched again, without waiting for it."""
        self.pending = self.pending.without_round()
        self.pipeline.abandon()

    def check_idle(self) -> None:
        """Check that a state may be loaded.

        Raises:
            RuntimeError: a round is in flight that other ranks may not have launched yet.
        """
        pipeline, transport = self.pipeline, self.pipeline.session.transport
        if pipeline.policy.pacing.synchronous or pipeline.in_flight is None:
            return
        together = self._assembled_at == pipeline.round or transport.is_closed
        if transport.world_size > 1 and not together:
            raise RuntimeError(
                f"rank {transport.initial_rank}: load_state_dict() expects no round in flight with "
                f"{pipeline.policy.pacing!r}, since other ranks may be at another one; call "
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
                    f"rank {self.pipeline.session.transport.initial_rank}: parameters are read by "
                    f"name in their mixing, by a signal handler or an extension; set a flag in the "
                    f"handler, and act on it after step(), or read the members of the bucket"
                )
            if (flying := self.pipeline.in_flight) is None:
                return
            if flying.is_unmixed:
                # A step has launched it, and the parameters were not checked since.
                self.pipeline.check_parameters()
            if self.replica.may_gather:
                self.replica.reshard()
            with self.propagating():
                self.with_recovery(partial(self._mix_early, params))

    def _mix_early(self, params: Iterable[Tensor] | None) -> None:
        with self._mixing:
            self.early.mix(params)

    def settle(self) -> None:
        """Mix the round in flight, or restore the mixed buckets of a dropped round.

        Do not call it in the forward pass: the backward pass may need the mixed values.
        """
        self.mix_early()
        self.early.undo()

    def synchronize(self) -> None:
        """Finish and mix the round in flight."""
        self.pipeline.session.transport.check_open()
        self.settle()
        self.pipeline.check_parameters()
        with self.propagating():
            self.with_recovery(partial(self._assemble, CollectiveCall.SYNCHRONIZE))
            self.with_recovery(self._finish)
            # No step may follow that would check it.
            self.pipeline.check_on_gpu()

    def discard(self) -> None:
        """Wait for the round in flight, if there is one, and drop it without mixing."""
        self.pending = self.pending.without_round()
        self.with_recovery(self.pipeline.discard)
        self.early.settle()

    def _finish(self) -> None:
        if self.replica.may_gather:
            self.replica.reshard()
        if self.pending.in_flight:
            self.pending = relaunch(self.pipeline, self.pending)
        self.pipeline.finish()

    def global_avg(self, may_revert: bool) -> None:
        """Put the average in place; collective."""
        self.settle()
        self.pipeline.check_parameters()
        if self.pipeline.policy.pacing.synchronous:
            with self.propagating():
                self.with_recovery(self._arrive)
        self.meet(CollectiveCall.GLOBAL_AVG, lambda: self.average.apply(may_revert))
        if not may_revert:
            self.keep_average()

    def keep_average(self) -> None:
        """Accept the average in place as the ranks' own parameters; collective."""
        self.pending = self.pending._replace(keeps_average=False)
        self.average.keep()
        with self.propagating():
            self.discard()
            if self.members and any(each.collective for each in self.pipeline.extensions.all):
                self.members.meet(CollectiveCall.KEEP_AVERAGE, self.keep_state)
            else:
                self.keep_state()

    def keep_state(self) -> None:
        """Let the extensions follow an average that is kept; collective."""
        pipeline = self.pipeline
        for extension in pipeline.extensions.all:
            extension.kept(pipeline.buckets, pipeline.session.transport)

    def meet(self, call: CollectiveCall, action: Callable[[], Result]) -> Result:
        """Run a collective action; if a rank is lost, run it again with the remaining ones.

        Args:
            call: the method that this rank is in.
            action: the action; it may run several times.
        """
        self.pipeline.session.transport.check_open()
        self.settle()
        self.pipeline.check_parameters()
        with self.propagating(TypeError, ValueError):
            if self.members:
                return self.members.meet(call, action)
            self.announce(call)
            return action()

    def announce(self, call: CollectiveCall) -> None:
        """Check that the ranks of the next round's group are in the same method as this one.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
        """
        self._assemble(call)
        pipeline, schedule = self.pipeline, self.pipeline.session.schedule
        plan = schedule.idle()
        if pipeline.round >= schedule.first_round:
            # The group that this rank meets next, even if it is idle now.
            plan = schedule.next_plan(pipeline.round, pipeline.mixing_rate)
        pipeline.announce(call, plan).receive()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack a small tensor of every rank that takes part; collective."""
        self.pipeline.session.transport.check_open()
        with self.propagating():
            self.announce(CollectiveCall.ALL_GATHER)
            gathered = tensor
            # The transport that stacks last makes the first dimension of the result.
            for transport in reversed(self.transports):
                gathered = transport.all_gather(gathered)
        return gathered.reshape(-1, *tensor.shape)

    def _assemble(self, call: CollectiveCall) -> None:
        """Bring all ranks to the same round if they may be at different ones.

        A rank that gets here early takes part in the rounds of the others without local updates.
        Otherwise they would wait for each other. Afterwards every rank has launched the same round
        and mixed all rounds before it.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
            NonFiniteError: a round must not be mixed, and is dropped; all ranks are at one round.
        """
        pipeline, transport = self.pipeline, self.pipeline.session.transport
        # While an average is in place, no rank makes steps.
        together = pipeline.policy.pacing.synchronous or self.average.snapshot is not None
        if together or transport.world_size == 1:
            return
        self.pending = agree(pipeline, self.pending)
        coming = send_to_all(torch.tensor([call], device="cpu"), transport)
        nonfinite: list[NonFiniteError] = []
        pipeline.launch()
        while not coming.arrival.future.done():
            flying = pipeline.in_flight
            if flying and flying.arrives(coming.arrival):
                # Launch the next one at once: no rank may mix a round that is in flight on others.
                self._finish_keeping(nonfinite)
                pipeline.launch()
        check_calls(call, read(coming, transport), transport)
        # Not a collective: ranks that are behind still launch rounds, which may be collectives.
        launched = send_to_all(torch.tensor([pipeline.round], device="cpu"), transport)
        highest = max(number for (number,) in read(launched, transport).values())
        while pipeline.round < highest:
            self._finish_keeping(nonfinite)
            pipeline.launch()
        self._assembled_at = pipeline.round
        if nonfinite:
            raise nonfinite[0]

    def _finish_keeping(self, nonfinite: list[NonFiniteError]) -> None:
        """Finish the round in flight, and keep its error, since the others wait for this rank."""
        try:
            self._finish()
        except NonFiniteError as error:
            nonfinite.append(error)

    def _arrive(self) -> None:
        """Wait for the round in flight, if there is one; nothing is mixed yet.

        Raises:
            NonFiniteError: the round must not be mixed; it stays in flight, and mixing it raises
                again.
        """
        if flying := self.pipeline.in_flight:
            flying.receive()
            flying.flags.check()

    @property
    def transports(self) -> Sequence[Transport]:
        """The connections to the ranks with which this one gossips, and to its replica."""
        return [self.pipeline.session.transport, *self.replica.transports]

    def with_recovery(self, action: Callable[[], Result]) -> Result:
        """Run an action that waits for peers; if one is lost, run it again in a new session."""
        while True:
            try:
                return action()
            except PeerError as error:
                if self.members is None:
                    raise
                self.members.recover(error)

    @contextmanager
    def propagating(self, *shared: type[Exception]) -> Iterator[None]:
        """Tell the other ranks if the body fails here, since they would wait for this rank.

        Args:
            shared: further errors that all ranks raise together and that change nothing.
        """
        try:
            yield
        except BaseException as error:
            self.propagate(error, *shared)
            raise

    def propagate(self, error: BaseException, *shared: type[Exception]) -> None:
        """Close the connections, unless all ranks raise the error; see `propagating`."""
        if isinstance(error, (PeerError, CallOrderError)):
            self.early.undo()
            if self.replica.transports:
                # The ranks along the other dimensions wait for this one, too.
                for transport in self.transports:
                    transport.fail(error)
        elif not isinstance(error, (NonFiniteError, *shared)):
            self.close(error)

    def close(self, error: BaseException) -> None:
        """Close the connections for good, and tell the others why."""
        self.pipeline.abandon()
        for transport in self.transports:
            transport.fail(error)
        if self.members:
            self.members.leave()
