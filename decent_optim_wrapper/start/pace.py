"""What follows from when rounds are mixed for what a model may do."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.mesh.replica import Replica

# Their forward or backward passes are collectives. Without a class of ours that knows them all,
# only these are seen.
_COLLECTIVE = (nn.SyncBatchNorm, DistributedDataParallel)


def check_pace(pacing: Pacing, model: nn.Module | None, replica: Replica) -> None:
    """Check that ranks may be at different steps, if the pacing lets them.

    Raises:
        ValueError: the ranks of a replica, or of a module, step together.
    """
    if pacing.synchronous:
        return
    if replica.size > 1:
        raise ValueError(
            f"overlap={pacing!r} expects a whole replica on every rank, since its shards would be "
            f"mixed in different steps; pass overlap=Late(steps) for late rounds"
        )
    modules = () if model is None else model.named_modules()
    for name, module in modules:
        if isinstance(module, _COLLECTIVE):
            raise ValueError(
                f"overlap={pacing!r} expects a model without collectives, since ranks make "
                f"different numbers of steps, got {type(module).__name__} in {name or 'model'!r}; "
                f"take layers that need no other rank, such as GroupNorm, or overlap=Late(steps)"
            )
