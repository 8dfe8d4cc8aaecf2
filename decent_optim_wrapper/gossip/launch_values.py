"""The parameters with which a round was launched, if they have changed since.

A checkpoint holds them: a resumed run launches the round with them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import as_real


@torch.no_grad()
def starts_of(flying: Round | None, params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the parameters as a round in flight has them, or as they are without one."""
    copies = {param: param.detach().clone() for param in params}
    for bucket in flying.unmixed if flying else ():
        if start := flying.start_of(bucket) if flying else None:
            for member, part in zip(bucket.members, bucket.parts(start), strict=True):
                # A member may have left the optimizer.
                if member in copies:
                    as_real(copies[member]).copy_(part)
    return [*copies.values()]
