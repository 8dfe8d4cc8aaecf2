"""What a loaded state leaves to the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.header import CollectiveCall
from decent_optim_wrapper.gossip.pipeline import Pipeline


class PendingResume(NamedTuple):
    """What the next step does first after a state was loaded; by default nothing.

    Loading cannot do it: it does not communicate, and may come before the parameters are loaded.

    Args:
        keeps_average: accept the parameters, which are an average, as this rank's own.
        source: agree with the other ranks on how to continue: which rank has saved the loaded
            states of extensions that belong to a rank. None if there is nothing to agree on.
        in_flight: launch the round again that was in flight.
        rate: its mixing rate.
        age: number of steps since its launch.
        snapshot: the parameters at its launch, if they may have changed since.
    """

    keeps_average: bool = False
    source: Literal["own", "other"] | None = None
    in_flight: bool = False
    rate: float = 1.0
    age: int = 1
    snapshot: Mapping[Tensor, Tensor] = {}

    def without_round(self) -> Self:
        """What is left when the round is launched or dropped."""
        return self._replace(in_flight=False, snapshot={})


def agree(pipeline: Pipeline, pending: PendingResume) -> PendingResume:
    """Agree on how to continue after states were loaded; then collective.

    All ranks continue with the highest round. The states of extensions that belong to a rank are
    reset unless all ranks have loaded their own. Otherwise the corrections of gradient tracking
    would not sum to zero and would bias the training for good.

    Returns:
        What is left to do.

    Raises:
        CallOrderError: a rank has loaded nothing, or the state of another step.
    """
    if pending.source is None:
        return pending
    session = pipeline.session
    # A rank that has loaded nothing is found by the ranks that mix with it, in its next round. All
    # headers are sent before any is received: that rank may wait for one of them first.
    plans = session.schedule.plan_each_group(pipeline.mixing_rate)
    announced = [pipeline.announce(CollectiveCall.LOADED, plan) for plan in plans]
    # The last one may be a collective of all ranks, in which more ranks notice an error.
    for round in reversed(announced):
        round.receive()
    own = torch.tensor([pipeline.round, pending.source == "own"], device="cpu")
    rounds, owns = session.transport.all_gather(own).unbind(1)
    pipeline.resume_at(int(rounds.max()))
    if not owns.all():
        for extension in pipeline.extensions.all:
            if extension.belongs_to_rank:
                extension.restart()
    return pending._replace(source=None)


def relaunch(pipeline: Pipeline, pending: PendingResume) -> PendingResume:
    """Launch the round that was in flight when the state was saved; return what is left to do."""
    if not pending.in_flight:
        return pending
    # synchronize() may come before any step(), and the state may come from a run without an outer
    # optimizer, which would then have no anchors when the round is mixed.
    pipeline.begin_extensions()
    number = pipeline.round - pending.age
    pipeline.launch(number, pending.rate, pending.age, pending.snapshot)
    return pending.without_round()
