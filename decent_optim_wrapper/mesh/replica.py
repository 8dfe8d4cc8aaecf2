"""A replica: one copy of the model, which may be spread over several ranks of a mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.optim.shards import local, local_grad, on_cpu

# What torch.compile and activation checkpointing add to the names of parameters.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


class Dimension:
    """A dimension of the mesh over which a replica is spread.

    Args:
        group: the ranks along it, this one among them.
        timeout: bound of every wait; None takes the group's.
    """

    def __init__(self, group: Any, timeout: timedelta | None) -> None:
        ranks = dist.get_process_group_ranks(group)
        # Errors name ranks of the whole job, since a number along one dimension says little.
        self.transport = Transport.over(group, timeout, tuple(ranks))
        self.ranks = frozenset(ranks)
        # Whether any parameter of the replica is a DTensor along it. If not, it is a pipeline.
        self.has_shards = False

    def note_shards(self, has_shards: bool) -> None:
        """Remember whether any parameter of the replica is a DTensor along it."""
        self.has_shards = has_shards

    def placement(self, tensor: Tensor) -> Any | None:
        """The placement of a DTensor along this dimension; None if its mesh does not have it.

        It compares ranks and not names, which differ if a mesh was flattened.
        """
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for number, placement in enumerate(tensor.placements):
                if self.ranks <= {*dist.get_process_group_ranks(mesh.get_group(number))}:
                    return placement
        return None

    def copies(self, tensor: Tensor) -> int:
        """Number of ranks along this dimension with the same values."""
        placement = self.placement(tensor)
        unique = not self.has_shards if placement is None else not placement.is_replicate()
        return 1 if unique else len(self.ranks)


class Replica:
    """The ranks over which one copy of the model is spread; one rank without a mesh.

    Args:
        dimensions: the other dimensions of the mesh.
        model: its FSDP modules are resharded before their shards are written.
        gossip: the ranks along which replicas gossip; None without a mesh.
    """

    def __init__(
        self,
        dimensions: Sequence[Dimension] = (),
        model: nn.Module | None = None,
        gossip: Iterable[int] | None = None,
    ) -> None:
        self.dimensions = tuple(dimensions)
        self.gossip = None if gossip is None else frozenset(gossip)
        # The model of its parameters on this rank, if it is known.
        self.model = model
        modules = [] if model is None else model.modules()
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]
        self.transports: Sequence[Transport] = [each.transport for each in self.dimensions]
        # Number of ranks over which the replica is spread.
        self.size = math.prod(transport.world_size for transport in self.transports)
        self.may_gather = bool(self._fsdp_modules)

    @property
    def shard(self) -> int:
        """This rank's position in the replica; the last dimension of the mesh varies fastest."""
        place = 0
        for transport in self.transports:
            place = place * transport.world_size + transport.rank
        return place

    def spans(self, ranks: Collection[int]) -> bool:
        """Return whether these ranks, this one among them, span some of the dimensions."""
        inside = (d.ranks for d in self.dimensions if d.ranks <= {*ranks})
        return math.prod(map(len, inside)) == len(ranks)

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of the parameters in the model, the same however the replica is spread.

        Raises:
            ValueError: there is no model, or a parameter does not belong to it.
        """
        named = [] if self.model is None else self.model.named_parameters()
        names: dict[Tensor, str] = {param: _WRAPPERS.sub("", name) for name, param in named}
        try:
            return [names[param] for param in params]
        except KeyError as error:
            raise ValueError(
                "expected the model of all parameters, to store by their names what an outer "
                "optimizer or another extension keeps of each; pass model= to the wrapper"
            ) from error

    def connect(self, tensors: Iterable[Tensor]) -> None:
        """Connect the ranks of the replica, and find out along which dimensions there are shards.

        Collective over the replica; again when parameters are added.

        Args:
            tensors: its parameters on this rank.
        """
        for transport in self.transports:
            transport.connect(())
        placed = list(tensors)
        found = [any(d.placement(t) is not None for t in placed) for d in self.dimensions]
        counts = torch.tensor(found, dtype=torch.int64, device="cpu")
        self.sum_(counts)
        for dimension, count in zip(self.dimensions, counts.tolist(), strict=True):
            dimension.note_shards(count > 0)

    def copies(self, tensor: Tensor) -> int:
        """Number of ranks of the replica with the same values as this one."""
        return math.prod(dimension.copies(tensor) for dimension in self.dimensions)

    def sum_(self, tensor: Tensor) -> None:
        """Sum a small tensor on the CPU in place over the replica; collective over it."""
        for transport in self.transports:
            transport.sum_(tensor)

    def reshard(self) -> None:
        """Make modules read the values that were written into their shards.

        After a forward pass without gradients a module may still have gathered parameters, and
        would continue to use them.
        """
        for module in self._fsdp_modules:
            module.reshard()

    @torch.no_grad()
    def clip_grad_norm_(
        self, params: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Like `torch.nn.utils.clip_grad_norm_`, with the norm of the whole replica."""
        norm = self.grad_norm(params, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; look for the overflow, or pass "
                f"error_if_nonfinite=False"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        grads = [local(param.grad) for param in params if param.grad is not None]
        # A stage may have none.
        if grads:
            torch._foreach_mul_(grads, factor)
        return norm

    @torch.no_grad()
    def grad_norm(self, params: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norm of all gradients of the replica, float64 on the CPU; collective over it.

        Args:
            params: the parameters of this rank.
            norm_type: p of the p-norm, 1 or more; infinity for the largest absolute value.
        """
        parts = [(local_grad(p), self.copies(p)) for p in params if p.grad is not None]
        if norm_type == torch.inf:
            total: Tensor = on_cpu(g.abs().max().double() for g, _ in parts if g.numel()).max()
            for transport in self.transports:
                total = transport.all_gather(total).max()
            return total
        total = on_cpu(_norm(g, norm_type).pow(norm_type) / copies for g, copies in parts).sum()
        self.sum_(total)
        return total.pow(1 / norm_type)


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    # Squares of half precision would overflow.
    dtype = torch.promote_types(grad.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm.double()
