"""Parameters and buffers by name, and checks that they can be exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.wire.storage import overlapping


class Named(NamedTuple):
    """A tensor and its name in errors."""

    kind: str
    name: str
    tensor: Tensor

    def describe(self) -> str:
        """One line with everything about the tensor that must be the same on all ranks."""
        frozen = ", frozen" if self.kind == "parameter" and not self.tensor.requires_grad else ""
        dtype, device = self.tensor.dtype, self.tensor.device.type
        return f"{self.kind} {self.name}: {dtype} {self.part} on {device}{frozen}"

    @property
    def part(self) -> str:
        """The shape, and the part of it on this rank."""
        shape = f"{tuple(self.tensor.shape)}"
        if not isinstance(self.tensor, DTensor):
            return shape
        mesh = self.tensor.device_mesh
        at, sizes = (tuple(each or ()) for each in (mesh.get_coordinate(), mesh.shape))
        here = tuple(local(self.tensor).shape)
        return f"{shape} as {self.tensor.placements}, {here} of it at {at} of {sizes}"


def named_parameters(param_groups: Sequence[dict[str, Any]]) -> list[Named]:
    """The parameters in the order of their groups, with names if the optimizer was given any."""
    named = []
    for number, group in enumerate(param_groups):
        names, params = [*group.get("param_names", ())], group["params"]
        # A parameter that was added to the list alone has no name.
        names += [f"{number}.{place}" for place in range(len(names), len(params))]
        named += [Named("parameter", *pair) for pair in zip(names, params, strict=False)]
    return named


def named_buffers(buffers: Any, names: Mapping[int, str]) -> list[Named]:
    """The buffers, with their names in the model, or numbers.

    Args:
        buffers: the buffers.
        names: the names of tensors of the model, by id.

    Raises:
        TypeError: `buffers` is not an iterable of tensors.
    """
    if isinstance(buffers, Tensor) or not isinstance(buffers, Iterable):
        kind = "a single one" if isinstance(buffers, Tensor) else repr(buffers)
        raise TypeError(f"buffers expects several tensors (model.buffers()), got {kind}")
    named = [Named("buffer", names.get(id(each), str(n)), each) for n, each in enumerate(buffers)]
    for each in named:
        if not isinstance(each.tensor, Tensor):
            raise TypeError(f"buffers expects tensors (model.buffers()), got {each.tensor!r}")
    return named


def named_in(model: nn.Module | None) -> list[Named]:
    """All parameters and buffers of a model with their names; none without a model."""
    if model is None:
        return []
    named = [Named("parameter", *pair) for pair in model.named_parameters()]
    return named + [Named("buffer", *pair) for pair in model.named_buffers()]


def check_tensors(named: Sequence[Named]) -> None:
    """Check that every parameter is a dense tensor with its own memory.

    Raises:
        TypeError: a parameter is made of other tensors.
        ValueError: a parameter is not dense, or two overlap and would be mixed twice.
    """
    check_dense(named)
    distinct = list({id(each.tensor): each for each in named}.values())
    found = overlapping([each.tensor for each in distinct])
    if found is not None:
        one, other = (next(e.name for e in distinct if e.tensor is tensor) for tensor in found)
        raise ValueError(
            f"expected parameters with memory of their own, but {one} and {other} overlap; tie "
            f"them by using the same Parameter"
        )


def check_dense(named: Sequence[Named]) -> None:
    """Check that every tensor is dense.

    Raises:
        TypeError: a tensor is made of other tensors.
        ValueError: a tensor is sparse, or has no values.
    """
    for each in named:
        if is_traceable_wrapper_subclass(each.tensor) and not isinstance(each.tensor, DTensor):
            raise TypeError(
                f"expected {each.kind}s that are plain tensors or DTensors, but {each.kind} "
                f"{each.name} is a {type(each.tensor).__name__}, which gossip cannot exchange; "
                f"leave it out of the optimizer that you wrap, and out of buffers="
            )
        kind = "" if each.tensor.layout == torch.strided else f"{each.tensor.layout}"
        if is_lazy(each.tensor) or each.tensor.is_quantized:
            kind = "lazy or quantised"
        if kind := "on the meta device" if each.tensor.is_meta else kind:
            raise ValueError(
                f"expected dense {each.kind}s with values, but {each.kind} {each.name} is {kind}; "
                f"materialise the model (to_empty, to_dense) before building the wrapper"
            )


def check_shards(named: Sequence[Named], replica: Replica, as_view: bool) -> None:
    """Check that DTensors are shards of replicas that gossip with each other.

    Args:
        named: parameters and buffers.
        replica: the replica that this rank is a part of; its model has the tensors, resharded.
        as_view: whether the tensors are to become views of buckets.

    Raises:
        TypeError: there are DTensors, and no mesh.
        ValueError: there are DTensors that do not fit.
    """
    sharded = [(each, each.tensor) for each in named if isinstance(each.tensor, DTensor)]
    gossip, model = replica.gossip, replica.model
    known = {id(each.tensor) for each in named_in(model)} if sharded else set()
    for each, tensor in sharded:
        what = f"{each.kind} {each.name} is a DTensor with {tensor.placements}"
        if gossip is None:
            raise TypeError(
                f"expected tensors that are whole on every rank, but {what}; say on which "
                f"dimension of the mesh replicas gossip: pass mesh=, gossip_dim= and model="
            )
        if id(tensor) not in known:
            missing = "there is no model" if model is None else "model does not have it"
            raise ValueError(
                f"expected the model of the sharded parameters, which must be resharded before it "
                f"is changed, but {what} and {missing}; pass all modules of this rank as model="
            )
        if as_view:
            raise ValueError(
                f"param_as_bucket_view=True expects plain tensors, but {what}, whose storage FSDP "
                f"keeps; pass param_as_bucket_view=False"
            )
        mesh = tensor.device_mesh
        for number in range(mesh.ndim):
            along = frozenset(dist.get_process_group_ranks(mesh.get_group(number)))
            if len(gossip & along) > 1:
                raise ValueError(
                    f"expected replicas of their own on the ranks {sorted(gossip)} that gossip, "
                    f"but {what} over the ranks {sorted(along)}; shard the model on the other "
                    f"dimensions of the mesh, as in fully_shard(model, mesh=mesh[name])"
                )
            if not replica.spans(along):
                dimensions = [sorted(dimension.ranks) for dimension in replica.dimensions]
                raise ValueError(
                    f"expected shards along the other dimensions of mesh=, whose ranks are "
                    f"{dimensions}, but {what} over the ranks {sorted(along)}; pass the whole mesh "
                    f"on which the model is sharded, not a part of it such as mesh[gossip_dim]"
                )


def sparse_gradient_error(optimizer: Any, param: Tensor, rank: int) -> RuntimeError:
    """The error for a parameter whose gradient is not dense."""
    named = named_parameters(optimizer.param_groups)
    name = next(each.name for each in named if each.tensor is param)
    layout = None if param.grad is None else param.grad.layout
    return RuntimeError(
        f"rank {rank}: expected dense gradients, but the gradient of {name} is {layout}; gossip "
        f"exchanges whole parameters: build the module with sparse=False"
    )


def replaced_error(names: str, rank: int) -> RuntimeError:
    """The error for parameters in whose place the base has others."""
    return RuntimeError(
        f"rank {rank}: expected in param_groups the parameters that the wrapper knows, but {names} "
        f"was replaced by another Parameter, which no other rank would get; change values in place "
        f"(param.copy_() under torch.no_grad()), or build the optimizer and the wrapper again"
    )


def relocated_error(names: str, rank: int) -> RuntimeError:
    """The error for parameters that were moved or converted."""
    return RuntimeError(
        f"rank {rank}: expected the parameters as they were when the wrapper was built, but the "
        f"storage of {names} was replaced or converted; move and convert the model before building "
        f"the wrapper, and change values in place. If an RNN on a GPU calls flatten_parameters() "
        f"in its forward pass, which replaces their storage, pass param_as_bucket_view=False"
    )


def changed_error(names: str, rank: int) -> RuntimeError:
    """The error for parameters that were changed by hand while a round was in flight."""
    return RuntimeError(
        f"rank {rank}: expected the parameters as the last step() left them, but the values of "
        f"{names} were changed while they were being sent and mixed; call synchronize() before "
        f"changing values by hand. To go on from here, load a checkpoint on all ranks"
    )


def refuse_outside(optimizer: Any, outside: Sequence[Tensor], rank: int) -> None:
    """Check that the parameters in no bucket have no gradients.

    Raises:
        RuntimeError: one has.
    """
    trained = {id(param) for param in outside if param.grad is not None}
    named = named_parameters(optimizer.param_groups)
    if names := ", ".join(each.name for each in named if id(each.tensor) in trained):
        raise RuntimeError(
            f"rank {rank}: expected gradients only of parameters that are gossiped, but {names} "
            f"was unfrozen, or added to the base optimizer, without the wrapper; call "
            f"rebuild_buckets() on all ranks before step(), and add groups with the wrapper's "
            f"add_param_group(). What each rank trains by itself needs another optimizer"
        )
