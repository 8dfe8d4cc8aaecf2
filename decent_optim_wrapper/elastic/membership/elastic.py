"""The option `elastic=`: ranks that are lost, and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from torch._C._distributed_c10d import Store

from decent_optim_wrapper.checks import CheckedFields, instance_of, optional, positive
from decent_optim_wrapper.elastic.membership.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.membership.recovery import OnChange, Recovery
from decent_optim_wrapper.elastic.membership.rendezvous import Rendezvous
from decent_optim_wrapper.elastic.stores.launched_store import find_launched_store
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.start.membership import Elasticity, StoreWorld
from decent_optim_wrapper.topo import Topology


@dataclass(frozen=True)
class Elastic(CheckedFields, Elasticity):
    """Continue training without a lost rank, which rejoins when it is restarted.

    Args:
        store: where the ranks agree on who is left; with a store, `rank` and `world_size`, no
            process group is needed. None takes the store of the process group if there is one, else
            the launcher's: ``python -m decent_optim_wrapper run``, or torchrun. The variable
            DECENT_STORE names one in etcd, which takes precedence over the launcher's own.
        on_membership_change: function that is called with the old and the new `members`, to shard
            the data again.
        stale_after: seconds without a heartbeat after which a rank counts as dead; the same on all
            ranks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `stale_after` is not above 0 and finite.
    """

    store: Annotated[Store | None, optional(instance_of("a torch.distributed.Store", Store))] = None
    on_membership_change: Annotated[
        OnChange | None,
        optional(instance_of("a function of the old and the new members", Callable)),
    ] = None
    stale_after: Annotated[float, positive("seconds")] = 2.0

    def describe(self) -> str:
        """The option that must be the same on all ranks."""
        return f"stale_after={self.stale_after}"

    find_launched = staticmethod(find_launched_store)

    def meet(self, world: StoreWorld, topology: Topology, intervals: Intervals) -> Recovery:
        """Agree on the first members."""
        rendezvous = Rendezvous(*world[:4], stale_after=self.stale_after)
        epoch = rendezvous.gather(FIRST_NOTE)
        return Recovery(rendezvous, epoch, topology, intervals, self.on_membership_change)

    def tell_failure(self, world: StoreWorld, error: Exception) -> None:
        """Write it in place of the first members."""
        Rendezvous.tell_failure(world.store, world.rank, error)
