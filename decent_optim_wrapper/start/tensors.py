"""The tensors that a wrapper trains or knows on this rank, and checks that gossip can mix them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from decent_optim_wrapper.comm.process_groups import is_registered
from decent_optim_wrapper.config import Settings
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.error_sharing import ErrorSharing
from decent_optim_wrapper.wire.parameters import (
    Named,
    check_dense,
    check_shards,
    check_tensors,
    named_buffers,
    named_in,
    named_parameters,
)

# Modules whose forward or backward passes are collectives. They have no class in common, so only
# these are noticed.
_COLLECTIVE = (nn.SyncBatchNorm, DistributedDataParallel)


@dataclass(frozen=True, kw_only=True)
class ModuleExtras:
    """What a module that contains the optimizer adds to it."""

    in_backward: bool = False
    """Whether buckets are filled in the order of a backward pass."""
    steps_at_end: bool = False
    """Whether buckets are sent at the end of the backward pass. If the forward pass waits for each
    of them, it fills them in its own order."""
    ignored: Collection[int] = ()
    """The ids of the parameters and buffers of the model that the ranks do not share."""
    stateful: tuple[Any, ...] = ()
    """Objects whose `state_dict` a restarted rank receives."""
    averages_state: bool = True
    """Whether averages include what the model contains besides the parameters of the optimizer."""


class Tensors(NamedTuple):
    """The tensors of a wrapper on this rank.

    Args:
        parameters: the base's parameters.
        compared: further tensors that all ranks must have: the buffers that the user passes and, in
            a module that contains the wrapper, all that it contains.
        state: these, and all else in the model, which may differ between ranks.
        averaged: the tensors that an average includes besides the parameters that are trained.
    """

    parameters: list[Named]
    compared: list[Named]
    state: list[Named]
    averaged: list[Named]


def find_tensors(
    sharing: ErrorSharing,
    optimizer: Optimizer,
    buffers: Iterable[Tensor] | None,
    replica: Replica,
    settings: Settings,
    extras: ModuleExtras,
) -> Tensors:
    """Name the tensors, and check that they can be exchanged.

    Args:
        sharing: knows the ranks that gossip.
        optimizer: the base.
        buffers: the user's buffers; None takes the model's.
        replica: the ranks that share the model.
        settings: the checked settings.
        extras: what a module that contains the wrapper adds.
    """
    _check_ddp(replica.model, sharing, extras.in_backward)
    in_model = named_in(replica.model)
    names = {id(each.tensor): each.name for each in in_model}
    given = named_buffers(() if buffers is None else buffers, names)
    parameters = named_parameters(optimizer.param_groups)
    known = {*(id(each.tensor) for each in (*parameters, *given)), *extras.ignored}
    rest = [each for each in in_model if id(each.tensor) not in known]
    compared = [*given, *(rest if extras.in_backward else ())]
    check_dense(compared)
    check_parameters(parameters, compared, replica, settings)
    state = [*compared]
    for each in () if extras.in_backward else rest:
        # What gossip cannot exchange stays as it is.
        with suppress(TypeError, ValueError):
            check_dense([each])
            check_shards([each], replica, as_view=False)
            state.append(each)
    more = state[len(given) :] if extras.averages_state else ()
    more = [each for each in more if buffers is None or each.kind == "parameter"]
    # A rank that comes back makes those anew that are frozen now.
    every = sorted((*given, *parameters, *more), key=lambda each: each.kind == "parameter")
    fixed = [e for e in every if e.kind == "buffer" or not e.tensor.requires_grad]
    # Torch does not add values of 8 bits.
    real = [(each, each.tensor.dtype) for each in fixed]
    averaged = [e for e, d in real if (d.is_floating_point or d.is_complex) and d.itemsize > 1]
    return Tensors(parameters=parameters, compared=compared, state=state, averaged=averaged)


def check_parameters(
    parameters: Sequence[Named], others: Sequence[Named], replica: Replica, settings: Settings
) -> None:
    """Check that parameters and other tensors can be exchanged, and with this pacing.

    Raises:
        TypeError: a tensor cannot be exchanged.
        ValueError: a tensor cannot be exchanged, or the model does not allow the pacing.
    """
    _check_pacing(settings, replica, parameters)
    replica.reshard()
    check_shards([*parameters, *others], replica, settings.param_as_bucket_view)
    check_tensors(parameters)


def _check_ddp(model: nn.Module | None, sharing: ErrorSharing, in_backward: bool) -> None:
    """Check that no `DistributedDataParallel` averages the gradients of ranks that gossip.

    Args:
        model: the model; None if it is not known.
        sharing: knows the ranks that gossip.
        in_backward: whether steps are made inside the backward pass, before gradients are averaged.

    Raises:
        ValueError: one does, or it averages any gradients, which a backward pass has used already.
    """
    for name, module in () if model is None else model.named_modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        group, found = module.process_group, sharing.world
        ranks = dist.get_process_group_ranks(group) if is_registered(group) else ()
        if in_backward or len({*ranks} & {*(found.launched_as or range(found.world_size))}) > 1:
            raise ValueError(
                f"rank {found.rank}: model expects gradients of this rank alone, but "
                f"{name or 'it'} is a DistributedDataParallel, which averages them over ranks, so "
                f"that gossip has no effect, or comes too early; train and pass the module in it"
            )


def _check_pacing(settings: Settings, replica: Replica, parameters: Sequence[Named]) -> None:
    """Check that the ranks of a replica step together, and that modules announce all parameters."""
    overlap, model = settings.overlap, replica.model
    own_steps = not settings.pacing.synchronous
    if own_steps and replica.size > 1:
        raise ValueError(
            f"overlap={overlap!r} expects a whole replica on every rank, since its shards would be "
            f"mixed in different steps; pass overlap=Late(steps) for late rounds"
        )
    for name, module in () if model is None or not own_steps else model.named_modules():
        if isinstance(module, _COLLECTIVE):
            raise ValueError(
                f"overlap={overlap!r} expects a model without collectives, since ranks make "
                f"different numbers of steps, got {type(module).__name__} in {name or 'model'!r}; "
                f"take layers that need no other rank, such as GroupNorm, or overlap=Late(steps)"
            )
    if not settings.pacing.mixes_early:
        return
    if model is None or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"overlap={overlap!r} expects the model, whose modules are about to read the "
            f"parameters when they are called; pass model=model, not in TorchScript"
        )
    known = set(map(id, model.parameters()))
    if missing := [each.name for each in parameters if id(each.tensor) not in known]:
        raise ValueError(
            f"overlap={overlap!r} expects all parameters of the optimizer in the model, but it "
            f"does not have parameters {', '.join(missing)}; pass the module that contains them "
            f"all, such as an nn.ModuleList of several models"
        )
