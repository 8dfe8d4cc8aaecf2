"""Checks that all ranks train the same model in the same way, from the same values.

Nothing that arrives is unpickled: descriptions are sent as UTF-8 bytes in tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.start import Start, check_same
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast
from decent_optim_wrapper.wire.bucket import Layout, extend_plan
from decent_optim_wrapper.wire.parameters import Named, check_shards, check_tensors


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What must be the same on all ranks.

    Args:
        lines: what must be the same on all ranks of a mesh, too, whatever part of the model they
            hold; one line for each item.
        layout: how tensors are put into buckets.
        others: tensors that are the same at the start, in addition to the parameters.
        recovery: continues without lost ranks; None if their loss is an error.
        sync_at_start: whether all ranks start from the values of rank 0.
        start: reaches the other ranks if this one fails, those of a mesh, too.
    """

    lines: Sequence[str]
    layout: Layout
    others: Sequence[Named]
    recovery: Recovery | None
    sync_at_start: bool
    start: Start

    def check(self, parameters: Sequence[Named], transport: Transport) -> None:
        """Compare the settings and all tensors with those of the other ranks; collective.

        Raises:
            ValueError: on every rank; names a rank that differs from rank 0, and the first
                difference.
        """
        text = self._describe([*parameters, *self.others])
        if not self.joins:
            check_same(text, transport)
        if self.recovery:
            self.recovery.agree(text)

    def synchronize(self, parameters: Sequence[Named], transport: Transport) -> None:
        """Take the values of rank 0 if `sync_at_start` is set, and warn of others; collective."""
        if not self.sync_at_start or self.joins:
            return
        values = [named.tensor for named in (*parameters, *self.others)]
        own = torch.tensor([broadcast(values, transport, self.layout)], device="cpu")
        replaced = transport.all_gather(own).flatten().tolist()
        by_rank = {r: count for r, count in zip(transport.members, replaced, strict=True) if count}
        if by_rank and transport.rank == 0:
            warn(
                f"the values of rank 0 have replaced others, tensors by rank: {by_rank} (of "
                f"{len(values)}). Load weights on rank 0 or on all ranks before the wrapper is "
                f"built; sync_at_start=False lets every rank keep its own. If they were random, "
                f"nothing is lost: call torch.manual_seed(0) on all ranks before the model is built"
            )

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
        with self.start.over_the_mesh():
            with self.start.failing_together():
                replica.reshard()
                check_shards(parameters, replica, self.layout.as_view)
                check_tensors(parameters)
            self.check(parameters, transport)
        replica.connect(named.tensor for named in parameters)
        transport.begin_on([named.tensor.device for named in parameters])
        if self.sync_at_start and late:
            broadcast([named.tensor for named in late], transport, self.layout)
        tensors = (p.tensor for p in parameters)
        pipeline.plan(extend_plan(pipeline.buckets, tensors, self.layout))

    @property
    def joins(self) -> bool:
        """Whether this rank joins others that are training already."""
        return self.recovery is not None and self.recovery.joins

    def _describe(self, tensors: Sequence[Named]) -> str:
        """All that must be the same on every rank, one line for each item."""
        lines = [*self.lines]
        for named in tensors:
            # Views exchange their storage as it lies in memory.
            strides = f", strides {named.tensor.stride()}" if self.layout.as_view else ""
            lines.append(named.describe() + strides)
        if self.layout.order:
            places = str(self.layout.places(named.tensor for named in tensors)).encode()
            lines.append(f"buckets filled in the order {hashlib.sha256(places).hexdigest()[:8]}")
        return "\n".join(lines)
