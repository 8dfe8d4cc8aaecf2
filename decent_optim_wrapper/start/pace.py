"""The default of `overlap`, and checks that the model allows a pacing, and any gossip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper.comm.process_groups import is_registered
from decent_optim_wrapper.config import Overlap, Settings
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.membership import StoreWorld
from decent_optim_wrapper.wire.parameters import Named

# Modules whose forward or backward passes are collectives. They have no class in common, so only
# these are noticed.
_COLLECTIVE = (nn.SyncBatchNorm, DistributedDataParallel)


def overlap_of(
    overlap: Overlap | None, extensions: object, model: object, params: Iterable[Tensor]
) -> Overlap:
    """The given `overlap`, or the default.

    Args:
        overlap: the user's; None for the default.
        extensions: the user's extensions.
        model: the model; None if it is not known.
        params: the parameters of the optimizer.

    Returns:
        By default "forward". True without the model, if an extension would wait for all ranks in
        the forward pass, or if the modules of the model do not announce all parameters.
    """
    if overlap is not None:
        return overlap
    given = extensions if isinstance(extensions, Sequence) else ()
    meets = any(getattr(each, "collective", False) for each in given)
    if meets or not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return True
    return "forward" if set(params) <= set(model.parameters()) else True


def check_ddp(model: nn.Module | None, world: Callable[[], StoreWorld], in_backward: bool) -> None:
    """Check that no `DistributedDataParallel` averages the gradients of ranks that gossip.

    Args:
        model: the model; None if it is not known.
        world: returns the ranks that gossip.
        in_backward: whether steps are made inside the backward pass, before gradients are averaged.

    Raises:
        ValueError: one does, or it averages any gradients, which a backward pass has used already.
    """
    for name, module in () if model is None else model.named_modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        group, found = module.process_group, world()
        ranks = dist.get_process_group_ranks(group) if is_registered(group) else ()
        together = {*ranks} & {*found.launched_as}
        if in_backward or len(together) > 1:
            why = "with the same gradients on all ranks gossip has no effect"
            why = "a backward pass updates before it has averaged them" if in_backward else why
            raise ValueError(
                f"rank {found.rank}: model expects gradients of this rank alone, but "
                f"{name or 'it'} is a DistributedDataParallel, which averages them, and {why}; "
                f"remove DistributedDataParallel, and pass the module that is inside it"
            )


def check_pace(settings: Settings, replica: Replica, parameters: Sequence[Named]) -> None:
    """Check that the model allows the pacing.

    Raises:
        ValueError: the ranks of a replica, or of a module, step together, but may be at different
            steps; or the model does not contain all parameters that are mixed before it reads them.
    """
    overlap, model = settings.overlap, replica.model
    if not settings.pacing.synchronous:
        _check_own_steps(overlap, replica)
    if not settings.pacing.mixes_early:
        return
    if model is None or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"overlap={overlap!r} expects the model, whose modules are about to read the "
            f"parameters when they are called; pass model=model, not in TorchScript"
        )
    held = set(map(id, model.parameters()))
    if missing := [each.name for each in parameters if id(each.tensor) not in held]:
        raise ValueError(
            f"overlap={overlap!r} expects all parameters of the optimizer in the model, but it "
            f"does not have parameters {', '.join(missing)}; pass the module that contains them "
            f"all, such as an nn.ModuleList of several models"
        )


def _check_own_steps(overlap: object, replica: Replica) -> None:
    if replica.size > 1:
        raise ValueError(
            f"overlap={overlap!r} expects a whole replica on every rank, since its shards would be "
            f"mixed in different steps; pass overlap=Late(steps) for late rounds"
        )
    modules = () if replica.model is None else replica.model.named_modules()
    for name, module in modules:
        if isinstance(module, _COLLECTIVE):
            raise ValueError(
                f"overlap={overlap!r} expects a model without collectives, since ranks make "
                f"different numbers of steps, got {type(module).__name__} in {name or 'model'!r}; "
                f"take layers that need no other rank, such as GroupNorm, or overlap=Late(steps)"
            )
