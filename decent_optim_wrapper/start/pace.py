"""What follows from when rounds are mixed: how long they may travel, and what a model may do."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.mesh.replica import Replica

# Their forward or backward passes are collectives. Without a class of ours that knows them all,
# only these are seen.
_COLLECTIVE = (nn.SyncBatchNorm, DistributedDataParallel)


# Of a pacing that would wait for no round.
_LONGEST_FLIGHT = 1000


def longest_flight(pacing: Pacing) -> int:
    """The steps from the launch of a round to the step that waits for it at the latest."""
    ages = range(1, _LONGEST_FLIGHT)
    return next((age for age in ages if pacing.is_due(age, lambda: False)), _LONGEST_FLIGHT)


def check_pace(pacing: Pacing, model: nn.Module | None, replica: Replica) -> None:
    """Check that ranks may be at different steps, if the pacing lets them.

    Raises:
        ValueError: the ranks of a replica, or of a module, step together.
    """
    if pacing.synchronous:
        return
    if replica.size > 1:
        raise ValueError(
            'gossip_every="auto" expects a whole replica on every rank, since its shards would be '
            "mixed in different steps; pass a number of steps, and staleness for late rounds"
        )
    modules = () if model is None else model.named_modules()
    for name, module in modules:
        if isinstance(module, _COLLECTIVE):
            raise ValueError(
                f'gossip_every="auto" expects a model without collectives, since ranks make '
                f"different numbers of steps, got {type(module).__name__} in {name or 'model'!r}; "
                f"take layers that need no other rank, such as GroupNorm, or pass a number of steps"
            )
