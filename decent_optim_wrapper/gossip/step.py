"""The algorithm: what every rank does in a step.

With x the parameters of this rank, W the mixing of the round that has been in flight since the last
step, and u the local update from the gradient at x, a step is

    x <- W x - u(x),    and the next round sends the new x.

Without overlap the next round is finished within the same step: x <- W (x - u(x)). With early
mixing, the default where the model is known, the forward pass after the step computes the same: see
`EarlyMixing`.

A round may also be in flight for several steps. With s the parameters of the step that launched it,
the step that mixes it does

    x <- x + (W s - s) - u(x),

and a step in between is x <- x - u(x). Only one round is in flight at a time, so this is stable
however long it takes, and mixing does not move the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import Bucket

Result = TypeVar("Result")


class Step:
    """One step, as a context: enter, advance part by part, exit.

    On entry it receives the round in flight, if it is to be mixed now, and begins the next one.
    Nothing is mixed before everything has arrived, so a round that fails does not change any
    parameter; what was mixed early is restored. No bucket is sent before that, either: a second
    round on the wire would slow down the older one, which all ranks are waiting for.

    Args:
        coordinator: coordinates the rounds, one of which may be in flight.
        in_backward: whether the parts come during a backward pass, and not right after each other.
    """

    def __init__(self, coordinator: Coordinator, in_backward: bool) -> None:
        self._coordinator = coordinator
        self._rounds = coordinator.rounds
        self._in_backward = in_backward
        # The buckets to advance, each once and in any order, once the step is entered.
        self.buckets: Sequence[Bucket] = ()
        self._arrived: Round | None = None
        self._launched: Round | None = None
        self._ready: set[Bucket] = set()
        # The buckets that are not sent yet.
        self._waiting: list[Bucket] = []

    def __enter__(self) -> Step:
        self._begin()
        # As with_recovery() does, which a step does not call as long as nothing fails.
        try:
            self._receive()
        except BaseException as error:
            self._coordinator.recover(error)
            self._coordinator.with_recovery(self._receive)
        self.buckets = self._rounds.buckets
        self._waiting = [*self.buckets]
        if self._launched and self._rounds.policy.in_backward_order:
            self._waiting = self._launched.order.apply(self._waiting)
        return self

    def _begin(self) -> None:
        """Check parameters, averages and members for changes since the last step."""
        coordinator, rounds = self._coordinator, self._rounds
        if coordinator.replica.may_gather and not self._in_backward:
            # A closure may have gathered the parameters.
            coordinator.replica.reshard()
        if not coordinator.early.is_on:
            rounds.policy.meter.reset()
        elif rounds.in_flight:
            # The buckets that no forward pass has needed.
            coordinator.mix_early()
        rounds.session.transport.check_open()
        coordinator.local_update.check(rounds)
        coordinator.local_update.check_outside()
        if rounds.pending.keeps_average or coordinator.average.snapshot is not None:
            coordinator.keep_average()
        if coordinator.members:
            coordinator.members.begin_step()
        if rounds.pending.source or rounds.pending.in_flight:
            coordinator.with_recovery(coordinator.resume)
        elif rounds.extensions.all:
            rounds.begin_extensions()

    def _receive(self) -> None:
        rounds = self._rounds
        # With early mixing the next forward pass checks it: a GPU may not have mixed it yet.
        if rounds.unchecked is not None and not self._coordinator.early.is_on:
            rounds.check_on_gpu()
        self._arrived = arrived = rounds.receive()
        if arrived:
            # Buckets that were replaced since the launch: their members are in others now, which
            # must be sent with mixed values.
            for bucket in tuple(arrived.unmixed):
                if bucket not in rounds.buckets:
                    arrived.mix(bucket)
        self._launched = rounds.begin()

    def advance(self, parts: Sequence[Bucket], update: Callable[..., Result], *args: Any) -> Result:
        """Mix some buckets, update their parameters, and send them.

        Args:
            parts: one bucket, or several that are updated by one call.
            update: the local update of their parameters.
            args: its arguments.

        Returns:
            The result of the update.
        """
        if self._arrived:
            for bucket in parts:
                self._arrived.mix(bucket)
        early = self._coordinator.early
        if early.is_on:
            # Restore what was mixed of a dropped round: the backward pass needed the mixed values.
            early.roll_back(parts)
        with self._rounds.policy.meter.update:
            result = update(*args)
        if self._launched:
            # The order on the wire must be the same on every rank, whatever the order of the
            # updates, or the sums of larger groups would add up different buckets.
            self._ready.update(parts)
            while self._waiting and self._waiting[0] in self._ready:
                self._launched.post(self._waiting.pop(0))
        return result

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        coordinator, launched = self._coordinator, self._launched
        if error is not None:
            # Whatever the error is, for example one that a closure raises: the others notice only
            # that the connections are closed.
            if launched:
                launched.abandon()
            coordinator.report_and_close(error)
            return
        try:
            if launched:
                if self._in_backward:
                    launched.end_backward()
                self._rounds.hand_over(launched)
            self._end()
        except BaseException as caught:
            # Without the round of a lost peer, nothing is left to finish.
            coordinator.recover(caught)
        meter = self._rounds.policy.meter
        meter.close(len(self._rounds.buckets), self._rounds.count)
        if coordinator.early.is_on:
            # The waits of the next forward pass belong to the next step.
            meter.reset()

    def _end(self) -> None:
        """Count the step; without overlap, finish its round, too."""
        coordinator, rounds = self._coordinator, self._rounds
        if coordinator.members:
            coordinator.members.end_step()
        mixes_now = rounds.policy.pacing.mixes_in_step(rounds.count)
        rounds.end_step()
        if mixes_now:
            if coordinator.replica.may_gather:
                # A closure may have gathered the parameters again.
                coordinator.replica.reshard()
            rounds.finish()
