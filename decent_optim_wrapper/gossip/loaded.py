"""Loaded states, until the ranks have agreed on how to continue."""

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
    """Continues from states, which each rank loads by itself.

    Args:
        pipeline: the rounds that continue.
        alone: whether a rank may load at another step than the others, as when it comes back.
    """

    def __init__(self, pipeline: Pipeline, alone: bool) -> None:
        self._pipeline = pipeline
        # Then the states of extensions that belong to a rank are of no use.
        self._alone = alone or not pipeline.policy.pacing.synchronous
        # Whether the loaded states of extensions belong to this rank. None after the ranks have
        # agreed on how to continue.
        self.source: Literal["own", "other"] | None = None
        # Whether the loaded state was saved while an average was in place.
        self.is_average = False

    def accept_average(self) -> None:
        """Note that the saved average has become this rank's own parameters."""
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
            snapshot: the parameters at the launch of the round in flight.
            references: the references of coded differences, by group.
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
            is_own: whether the state was saved by this rank, with the same members.

        Raises:
            ValueError: the state does not fit the extension.
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
        """Agree on how to continue if states were loaded since the last call; then collective.

        All ranks continue with the highest round. The states of extensions that belong to a rank
        are reset unless all ranks have loaded their own. Otherwise the corrections of gradient
        tracking would not sum to zero and would bias the training for good.

        Raises:
            CallOrderError: a rank has loaded nothing, or the state of another step.
        """
        if self.source is None:
            return
        pipeline, session = self._pipeline, self._pipeline.session
        # A rank that has loaded nothing is found by the ranks that mix with it, in its next round.
        # All headers are sent before any is received: that rank may wait for one of them first.
        plans = session.schedule.plan_each_group(pipeline.mixing_rate)
        announced = [pipeline.announce(CollectiveCall.LOADED, plan) for plan in plans]
        # The last one may be a collective of all ranks, in which more ranks notice an error.
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
        """Note that the ranks have agreed."""
        self.source = None
