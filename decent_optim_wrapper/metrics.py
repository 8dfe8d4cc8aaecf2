"""What to watch while training: how far the ranks have drifted apart."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from decent_optim_wrapper._average import average
from decent_optim_wrapper._bucket import Bucket
from decent_optim_wrapper._meter import StepStats
from decent_optim_wrapper._transport import Transport

__all__ = ["StepStats", "consensus_distance"]


def consensus_distance(buckets: Iterable[Bucket], transport: Transport) -> float:
    """Root mean square over the ranks of the distance to the average; collective.

    sqrt(1/n * sum over i of ||x_i - mean(x)||^2), summed in float64.

    Args:
        buckets: the parameters, untouched by the call.
        transport: the ranks and how to reach them.

    Returns:
        The distance in the parameters' own unit, the same on every rank.
    """
    square = torch.zeros((), dtype=torch.float64, device="cpu")
    for bucket in buckets:
        own = bucket.pack(bucket.new_flat(bucket.wire_device)).data
        away = average(bucket, transport).data.double() - own.double()
        square += away.square().sum().cpu()
    return math.sqrt(transport.all_gather(square).mean().item())
