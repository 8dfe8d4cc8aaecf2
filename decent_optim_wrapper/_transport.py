"""Exchange between ranks: the one place that calls torch.distributed to move bytes.

Pairs talk point to point on the process group that the user gave and need no communicator of
their own; larger groups get one each, created by their members alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_optim_wrapper.topo import Group

# Tags below are left to the user's own point-to-point traffic on the same process group.
_FIRST_TAG = 1 << 20


class Transport:
    """The ranks of one process group, and the communicators of the groups that mix in it.

    Args:
        process_group: registered or raw; None is a world of one rank that exchanges nothing.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self.rank = 0 if process_group is None else process_group.rank()
        self.world_size = 1 if process_group is None else process_group.size()

    def connect(self, schedule: Sequence[Group]) -> None:
        """Create the communicators that `schedule` (this rank's groups, phase by phase) needs.

        Every rank walks the phases in the same order and the groups of a phase are disjoint, so
        creation, which waits for all members, cannot deadlock.
        """
        for group in schedule:
            if group.size > 2 and group.ranks not in self._subgroups:
                self._subgroups[group.ranks] = self._new_subgroup(group.ranks)

    def close(self) -> None:
        """Drop the communicators made here and let go of the user's process group."""
        self._subgroups.clear()
        self._process_group = None

    def wire_device(self, device: torch.device) -> torch.device:
        """The device that tensors of `device` are exchanged on: gloo's exchange is on the CPU."""
        if self._process_group is None or _backend(self._process_group, device).name() != "gloo":
            return device
        return torch.device("cpu")

    def exchange(self, outgoing: Tensor, incoming: Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Start sending `outgoing` to `peer` and receiving `incoming` from it.

        Args:
            outgoing: must not change until the returned work is done.
            incoming: same size and dtype as the peer's `outgoing`.
            peer: rank in the process group.
            tag: tells concurrent exchanges between two ranks apart; from 0.

        Returns:
            The work to wait for.
        """
        group = self._group()
        if _backend(group, outgoing.device).supports_coalescing:
            # On such a backend (NCCL) a send alone would wait for a receive that comes behind it.
            pair = [
                dist.P2POp(op, tensor, group=group, group_peer=peer)
                for op, tensor in ((dist.isend, outgoing), (dist.irecv, incoming))
            ]
            return dist.batch_isend_irecv(pair)
        tag += _FIRST_TAG
        # The receive first: its notice lets the peer's data start.
        receive = group.recv([incoming], peer, tag)
        return [group.send([outgoing], peer, tag), receive]

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> list[dist.Work]:
        """Start summing `tensor` in place over `ranks`, all ranks by default."""
        if self._process_group is None:
            return []
        group = self._process_group if ranks is None else self._subgroups[ranks]
        return [group.allreduce([tensor])]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with the one of rank `source`, bytes of any dtype."""
        if self._process_group is None or tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._process_group.broadcast([tensor.view(torch.uint8)], options).wait()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the `tensor` of every rank, of the same shape and dtype on all.

        Returns:
            shape (world_size, *tensor.shape), on the CPU.
        """
        if self._process_group is None:
            return tensor.unsqueeze(0)
        tensor = tensor.to(self.control_device)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._process_group.allgather([gathered], [tensor]).wait()
        return torch.stack(gathered).cpu()

    @property
    def control_device(self) -> torch.device:
        """The device on which small control messages travel."""
        cpu = torch.device("cpu")
        if self._process_group is None or _serves(self._process_group, cpu):
            return cpu
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def exchange_device(self) -> torch.device:
        """The kind of device whose tensors are exchanged: the GPU where the group serves it."""
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        if self._process_group is None or not torch.cuda.is_available():
            return cpu
        return cuda if _serves(self._process_group, cuda) else cpu

    def _group(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise RuntimeError("a world of one rank has no peer to exchange with")
        return self._process_group

    def _new_subgroup(self, ranks: tuple[int, ...]) -> Any:
        """A communicator of `ranks`, a backend of the parent's kind that torch does not register.

        Not dist.new_group: it salts the name with the number of groups that this process has made,
        and waits for ever where ranks have made different numbers.
        """
        parent = self._group()
        if len(ranks) == self.world_size:
            return parent
        store = self._store_of(parent)
        name = "decent_optim_wrapper/" + "-".join(map(str, ranks))
        # The members make their communicators in the same order, so they count alike.
        count = store.add(f"{name}/made by {self.rank}", 1)
        store = dist.distributed_c10d.PrefixStore(f"{name}/{count}", store)
        like = _backend(parent, self.exchange_device)
        timeout: timedelta = like.options._timeout
        if like.name() == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, ranks.index(self.rank), len(ranks), options)
        if like.name() == "gloo":
            return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)
        raise ValueError(
            f"rank {self.rank}: ranks {ranks} need a communicator of their own, which works with "
            f"gloo and nccl, not with {like.name()}; use a topology of pairs, or complete"
        )

    def _store_of(self, parent: Any) -> Any:
        if _is_registered(parent):
            return dist.distributed_c10d._get_process_group_store(parent)
        if not hasattr(parent, "get_group_store"):
            raise ValueError(
                f"rank {self.rank}: groups of more than two need a communicator of their own, and "
                f"this {type(parent).__name__} has no store to build it on; wrap it in a "
                f"torch.distributed.ProcessGroup or use a topology of pairs"
            )
        return parent.get_group_store()


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows the group."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that serves `device`; a raw backend serves whatever it serves."""
    return group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group


def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for `device`."""
    try:
        _backend(group, device)
    except RuntimeError:
        return False
    return True
