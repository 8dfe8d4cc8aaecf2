"""What was loaded, until the ranks have agreed on how to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.header import CollectiveCall
from decent_optim_wrapper.gossip.in_flight import GossipState
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.wire.references import SavedReference


class Loaded:
    """Continues from states, which this rank loads without the others.

    Args:
        pipeline: what continues.
        alone: whether a rank may load at another step than the others, as one that comes back.
    """

    def __init__(self, pipeline: Pipeline, alone: bool) -> None:
        self._pipeline = pipeline
        # Then the states of extensions that belong to a rank are of no use.
        self._alone = alone or not pipeline.policy.pacing.synchronous
        # Whether the states of extensions that were loaded are of this rank. None once the ranks
        # have agreed on how to go on.
        self.source: Literal["own", "other"] | None = None
        # Whether the loaded state was saved while an average was in place.
        self.is_average = False

    def accept_average(self) -> None:
        """The average that was saved has become this rank's own parameters."""
        self.is_average = False

    def restore(
        self,
        state: GossipState,
        is_average: bool,
        snapshot: Mapping[Tensor, Tensor],
        references: Mapping[str, SavedReference],
    ) -> None:
        """Continue from a state; see `Pipeline.restore`.

        Args:
            state: the state of the rounds.
            is_average: whether an average was in place.
            snapshot: the parameters with which the round in flight was launched.
            references: to which differences are coded, by group.
        """
        self.is_average = is_average
        self._pipeline.restore(state, snapshot, references)
        if not self._pipeline.policy.pacing.synchronous:
            # Each rank may have saved its own round.
            self.source = "other"

    def prepare(
        self, extension: Extension, state: dict[str, Any] | None, is_own: bool
    ) -> Callable[[], None]:
        """Check a state of an extension, and return the function that continues with it.

        Args:
            extension: one of this wrapper's.
            state: None to start again.
            is_own: whether the state is one of this rank, with the same members.

        Raises:
            ValueError: the state is that of something else.
        """
        load = extension.prepare_load(state)
        if not extension.belongs_to_rank:
            return load
        if self._alone or not is_own:
            load = extension.prepare_load(None)

        def run() -> None:
            load()
            if not self._alone:
                self.source = "own" if is_own and state is not None else "other"

        return run

    def agree(self) -> None:
        """Go on together if states were loaded since the last call; collective then.

        All continue with the highest round. The states of extensions that belong to a rank start
        again unless all ranks have loaded their own: corrections of gradients would not sum to
        zero, and pull the training away for good.

        Raises:
            CallOrderError: a rank has loaded nothing, or the state of another step.
        """
        if self.source is None:
            return
        pipeline, session = self._pipeline, self._pipeline.session
        # A rank that has loaded nothing is found by those that mix with it, in its next round. All
        # leave before any arrives: that rank may wait for one of these before it comes to another.
        plans = session.schedule.plan_each_group(pipeline.mixing_rate)
        announced = [pipeline.announce(CollectiveCall.LOADED, plan) for plan in plans]
        # The last may be a collective of all ranks, in which more of them notice that one raises.
        for round in reversed(announced):
            round.receive()
        own = torch.tensor([pipeline.round, self.source == "own"], device="cpu")
        rounds, owns = session.transport.all_gather(own).unbind(1)
        self.end()
        pipeline.resume_at(int(rounds.max()))
        if not owns.all():
            for extension in pipeline.extensions.all:
                if extension.belongs_to_rank:
                    extension.restart()

    def end(self) -> None:
        """The ranks have agreed."""
        self.source = None
