"""Averages the base optimizer's state when an exact average is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.average import average, finite_shares
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.optim.counters import COUNTERS
from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.wire.bucket import Bucket, members_of
from decent_optim_wrapper.wire.plan import plan_buckets


class StateAverage(Extension):
    """Averages the base optimizer's state (momenta) with every exact average of the parameters.

    These are the scheduled averages, and other averages that are kept. `on_nonfinite` of the
    wrapper applies to the state as to the parameters.
    """

    collective = True

    def attach(self, context: ExtensionContext) -> None:
        """Average the state of the base.

        Raises:
            ValueError: ranks do not mix in the same step.
        """
        if not context.pacing.synchronous:
            raise ValueError(
                f"StateAverage() expects all ranks to mix in the same step, which they do not with "
                f"overlap={context.pacing!r}; leave it out, which keeps the state of each rank"
            )
        self._context = context

    def arrived(self, kind: RoundKind, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Average with a scheduled exact average; collective."""
        if kind is RoundKind.AVERAGE:
            self.kept(buckets, transport)

    def kept(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Average when an average of the parameters is kept; collective.

        Raises:
            NonFiniteError: the state of a rank is not finite, and the policy does not allow it.
            TypeError: the state has tensors that contain others.
        """
        tensors = [list(self._tensors(param)) for param in members_of(buckets)]
        # A rank may have no state yet for a parameter that had no gradient there.
        counts = torch.tensor([len(each) for each in tensors], dtype=torch.int64, device="cpu")
        shared = (transport.all_gather(counts) == counts).all(dim=0).tolist()
        of_all = [t for each, by_all in zip(tensors, shared, strict=True) if by_all for t in each]
        planned = plan_buckets(of_all, self._context.layout.plain)
        nonfinite, replica = self._context.nonfinite, self._context.replica
        finite = finite_shares(planned, transport, nonfinite, "StateAverage()", "momenta", replica)
        everyone = Group(range(transport.world_size))
        for bucket, shares in zip(planned, finite, strict=True):
            if any(shares):
                mean = average(bucket, transport, shares)
                self._context.meter.count_bytes(int(everyone.copies_sent * mean.data.nbytes))
                bucket.unpack_(mean)

    def _tensors(self, param: Tensor) -> Iterator[Tensor]:
        """The state tensors of the shape of the parameter; counters are not averaged."""
        state = self._context.optimizer.state.get(param, {})
        for name, value in sorted(state.items()):
            if name not in COUNTERS and is_like(value, param):
                yield value


def is_like(value: Any, param: Tensor) -> bool:
    """Return whether an entry of the state has a value for each element of its parameter.

    Raises:
        TypeError: it has, but contains other tensors, such as codes and scales.
    """
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        raise TypeError(
            f"StateAverage and StateGossip expect a base whose state is plain tensors, got a "
            f"{type(value).__name__}, which gossip cannot exchange; leave the extension out"
        )
    return value.is_floating_point() or value.is_complex()
