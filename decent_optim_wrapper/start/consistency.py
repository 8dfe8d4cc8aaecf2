"""Checks that all ranks train the same model in the same way, from the same values.

Nothing that arrives is unpickled: descriptions are sent as UTF-8 bytes in tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version

import torch

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.start import Start, check_same
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast
from decent_optim_wrapper.wire.bucket import Layout, extend_plan
from decent_optim_wrapper.wire.parameters import Named, check_shards, check_tensors


class Agreement:
    """What must be the same on all ranks.

    Args:
        topology: that of all ranks, even while some are away: a restarted rank describes it so.
        layout: how tensors are put into buckets.
        settings: one line for each setting.
        others: tensors that are the same at the start, in addition to the parameters.
        recovery: continues without lost ranks; None if their loss is an error.
        sync_at_start: whether all ranks start from the values of rank 0.
        start: reaches the other ranks if this one fails, those of a mesh, too.
    """

    def __init__(
        self,
        topology: Topology,
        layout: Layout,
        settings: Sequence[str],
        others: Sequence[Named],
        recovery: Recovery | None,
        sync_at_start: bool,
        start: Start,
    ) -> None:
        self._layout = layout
        # What must be the same on all ranks of a mesh, whatever part of the model they hold.
        self.settings = [
            f"decent_optim_wrapper {version('decent-optim-wrapper')}",
            f"topology {type(topology).__name__} with schedule {topology.digest}",
            *settings,
        ]
        self._others = others
        self._recovery = recovery
        self._sync_at_start = sync_at_start
        self._start = start

    def check(self, parameters: Sequence[Named], transport: Transport) -> None:
        """Compare the settings and all tensors with those of the other ranks; collective.

        Raises:
            ValueError: on every rank; names a rank that differs from rank 0, and the first
                difference.
        """
        text = self._describe([*parameters, *self._others])
        if not self._joins:
            check_same(text, transport)
        if self._recovery:
            self._recovery.agree(text)

    def start(self, parameters: Sequence[Named], transport: Transport) -> None:
        """Start all ranks from the values of rank 0 if `sync_at_start` is set; collective."""
        if self._sync_at_start and not self._joins:
            _synchronize([*parameters, *self._others], transport, self._layout)

    def add(
        self,
        pipeline: Pipeline,
        replica: Replica,
        parameters: Sequence[Named],
        late: Sequence[Named] = (),
    ) -> None:
        """Gossip these parameters, of which `late` are new, from the next round on.

        Collective, over all of a mesh.

        Raises:
            TypeError: a parameter cannot be exchanged.
            ValueError: the same, or the ranks differ, or another rank raised any of these errors.
        """
        transport = pipeline.session.transport
        with self._start.over_the_mesh():
            with self._start.failing_together():
                replica.reshard()
                check_shards(parameters, replica, self._layout.as_view)
                check_tensors(parameters)
            self.check(parameters, transport)
        replica.connect(named.tensor for named in parameters)
        transport.begin_on([named.tensor.device for named in parameters])
        if self._sync_at_start and late:
            broadcast([named.tensor for named in late], transport, self._layout)
        tensors = (p.tensor for p in parameters)
        pipeline.plan(extend_plan(pipeline.buckets, tensors, self._layout))

    @property
    def _joins(self) -> bool:
        return self._recovery is not None and self._recovery.joins

    def _describe(self, tensors: Sequence[Named]) -> str:
        """All that must be the same on every rank, one line for each item."""
        lines = [*self.settings]
        for named in tensors:
            # Views exchange their storage as it lies in memory.
            strides = f", strides {named.tensor.stride()}" if self._layout.as_view else ""
            lines.append(named.describe() + strides)
        if self._layout.order:
            places = str(self._layout.places(named.tensor for named in tensors)).encode()
            lines.append(f"buckets filled in the order {hashlib.sha256(places).hexdigest()[:8]}")
        return "\n".join(lines)


def _synchronize(tensors: Sequence[Named], transport: Transport, layout: Layout) -> None:
    """Take the values of rank 0 on all ranks, and warn of ranks that had others."""
    values = [named.tensor for named in tensors]
    own = torch.tensor([broadcast(values, transport, layout)], device="cpu")
    replaced = transport.all_gather(own).flatten().tolist()
    by_rank = {r: count for r, count in zip(transport.members, replaced, strict=True) if count}
    if by_rank and transport.rank == 0:
        warn(
            f"the values of rank 0 have replaced others, tensors by rank: {by_rank} (of "
            f"{len(tensors)}). Load weights on rank 0 or on all ranks before the wrapper is built; "
            f"sync_at_start=False lets every rank keep its own. If they were random, nothing is "
            f"lost: call torch.manual_seed(0) on all ranks before the model is built"
        )
