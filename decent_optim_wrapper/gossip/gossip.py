"""The collective calls besides steps: averages, distances, new buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from decent_optim_wrapper.comm.announcements import read, send_to_all
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.gossip.average import consensus_distance
from decent_optim_wrapper.gossip.header import Call, check_calls
from decent_optim_wrapper.gossip.step import Result, Rounds


class Gossip(Rounds):
    """The rounds of one rank and its collective calls, for which all ranks come together."""

    def synchronize(self) -> None:
        """Finish and mix the round in flight."""
        self.check_parameters()
        with self.failing_together():
            self.surviving(partial(self._assemble, Call.SYNCHRONIZE))
            self.surviving(self.finish)
            # No step may come that would ask.
            self.check_on_gpu()

    def global_avg(self, may_revert: bool) -> None:
        """Put the average in place; collective."""
        self.check_parameters()
        if self.pacing.synchronous:
            with self.failing_together():
                self.surviving(self._arrive)
        self.meet(Call.GLOBAL_AVG, lambda: self.apply_average(may_revert))
        if not may_revert:
            self.keep_average()

    def apply_average(self, may_revert: bool) -> None:
        """Replace the parameters by their average; collective."""
        self.reshard()
        self.average.apply(self.buckets, self.session.transport, may_revert, self.replica)

    def revert_average(self) -> None:
        """Restore what was before the average."""
        self.reshard()
        self.average.revert()

    def consensus_distance(self) -> float:
        """Root mean square distance of the replicas to their average; collective."""
        return consensus_distance(self.buckets, self.session.transport, self.replica)

    def meet(self, call: Call, action: Callable[[], Result]) -> Result:
        """Run a collective action; if a rank is lost, run it again with the remaining ones.

        Args:
            call: the method that this rank is in.
            action: the action; it may run several times.
        """
        self.session.transport.check_open()
        self.check_parameters()
        with self.failing_together(TypeError, ValueError):
            if self.members:
                return self.members.meet(call, action)
            self.announce(call)
            return action()

    def announce(self, call: Call) -> None:
        """Check that the ranks of the next round's group are in the same method as this one.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
        """
        self._assemble(call)
        schedule = self.session.schedule
        plan = schedule.idle()
        if self.round >= schedule.first_round:
            # The group that this rank meets next, also while it is idle.
            plan = schedule.next_plan(self.round, self.mixing_rate)
        self.round_of(call, plan).receive()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack a small tensor of every rank that takes part; collective."""
        with self.failing_together():
            self._assemble(Call.ALL_GATHER)
            gathered = tensor
            # What is stacked last is the first dimension of the result.
            for transport in reversed(self.transports):
                gathered = transport.all_gather(gathered)
        return gathered.reshape(-1, *tensor.shape)

    def clip_grad_norm_(
        self, params: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip by the norm of the whole replica; collective over it.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        # The error is that of all ranks of the replica, and nobody else waits for them.
        with self.failing_together(RuntimeError):
            return self.replica.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def _assemble(self, call: Call) -> None:
        """Bring all ranks to the same round, where they may be at different ones.

        A rank that comes here early takes part in the rounds of the others, without local updates:
        they would wait for it otherwise, and it for them. Afterwards every rank has launched the
        same round, and mixed those before it.

        Raises:
            CallOrderError: a rank is in another method.
            PeerError: a rank does not answer.
            NonFiniteError: a round must not be mixed, and is dropped; all ranks are at one round.
        """
        transport = self.session.transport
        # While an average is in place, no rank makes steps.
        together = self.pacing.synchronous or self.average.snapshot is not None
        if together or transport.world_size == 1:
            return
        self.agree_on_loaded()
        coming = send_to_all(torch.tensor([call], device="cpu"), transport)
        nonfinite: list[NonFiniteError] = []
        self.launch()
        while not coming.arrival.is_over:
            if self.in_flight and self.in_flight.arrives(coming.arrival):
                # The next one at once: no rank may have mixed a round that is in flight on others.
                self._finish(nonfinite)
                self.launch()
        check_calls(call, read(coming, transport), transport)
        # No collective: those behind still launch rounds, which may be collectives of all ranks.
        launched = send_to_all(torch.tensor([self.round], device="cpu"), transport)
        highest = max(number for (number,) in read(launched, transport).values())
        while self.round < highest:
            self._finish(nonfinite)
            self.launch()
        self._assembled = True
        if nonfinite:
            raise nonfinite[0]

    def _finish(self, nonfinite: list[NonFiniteError]) -> None:
        """Finish the round in flight, and keep its error: the others wait for this rank."""
        try:
            self.finish()
        except NonFiniteError as error:
            nonfinite.append(error)

    def _arrive(self) -> None:
        """Wait for the round in flight, if there is one; nothing is mixed yet.

        Raises:
            NonFiniteError: the round must not be mixed; it stays in flight, and mixing it raises
                again.
        """
        if self.in_flight:
            self.in_flight.receive()
            self.in_flight.check_finite()
