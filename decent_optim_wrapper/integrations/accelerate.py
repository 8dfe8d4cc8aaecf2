"""Accelerate: `prepare` leaves the model without DDP and wraps the optimizer."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from decent_optim_wrapper.integrations.wrapping import Wrapping

__all__ = ["GossipOptimizer", "prepare_for_gossip"]

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


def prepare_for_gossip(accelerator: Accelerator, **gossip: Any) -> Wrapping:
    """Make `accelerator.prepare` set up gossip of parameters instead of DDP.

    Pass models to `prepare` before their optimizers. What it returns for an optimizer has the
    methods of the wrapper: evaluate inside ``optimizer.averaged()``. `save_state` is collective and
    saves the average; all ranks load what rank 0 has saved. `save_model` and `unwrap_model` take
    this rank's own model: after training, call `keep_average` of the returned object first.

    Args:
        accelerator: one that has prepared nothing yet.
        **gossip: arguments for `DecentOptimWrapper`, such as `topology` and `schedule`.

    Returns:
        An object with the wrappers of all prepared optimizers. Its `averaged` (a context
        manager) and `keep_average` are collective and average all of their parameters.

    Raises:
        ValueError: the accelerator shards the model itself, or does not know of the other ranks.
    """
    if accelerator.distributed_type in _OTHERS:
        raise ValueError(
            f"prepare_for_gossip() expects an Accelerator that would use DDP, got "
            f"{accelerator.distributed_type}; take the plugin out of its configuration"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != processes:
        # Without GPUs it takes no notice of torchrun by itself, and would not shard the data.
        raise ValueError(
            f"prepare_for_gossip() expects an Accelerator with the {processes} processes of "
            f"WORLD_SIZE, got {accelerator.num_processes}; on CPUs pass Accelerator(cpu=True)"
        )
    wrapping = Wrapping(gossip)
    prepare_model, prepare_optimizer = accelerator.prepare_model, accelerator.prepare_optimizer
    save_state, free_memory = accelerator.save_state, accelerator.free_memory
    prepare_scheduler = accelerator.prepare_scheduler

    def model_without_ddp(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrapping.models.append(model)
        # Autocast, placement and compilation, but no DDP; training mode stays.
        return prepare_model(model, *args, **{**kwargs, "evaluation_mode": True})

    def wrapped_optimizer(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, AcceleratedOptimizer):
            if optimizer.optimizer not in wrapping.wrappers:
                # free_memory() has released it, as at the start of each Trainer.train().
                wrapping.wrap(optimizer.optimizer)
            return prepare_optimizer(optimizer, *args, **kwargs)  # prepared before
        if not wrapping.models_of(optimizer):
            raise ValueError(
                "expected prepare() to have seen the optimizer's model after prepare_for_gossip(), "
                "which takes DDP off and moves it to its device; call prepare_for_gossip() first, "
                "and pass the model to prepare() before the optimizer"
            )
        prepared = prepare_optimizer(wrapping.wrap(optimizer), *args, **kwargs)
        prepared.__class__ = GossipOptimizer
        return prepared

    def scheduler_of_its_own(scheduler: Any) -> Any:
        prepared = prepare_scheduler(scheduler)
        # It knows the base and not the wrapper, so Accelerate has given it all optimizers: an
        # overflow of one would stop the schedules of all.
        base = getattr(scheduler, "optimizer", None)
        own = [each for each in prepared.optimizers if each.optimizer.optimizer is base]
        prepared.optimizers = own or prepared.optimizers
        return prepared

    def save_average(*args: Any, **kwargs: Any) -> Any:
        with wrapping.averaged():
            return save_state(*args, **kwargs)

    def free_all(*objects: Any) -> Any:
        wrapping.release()
        return free_memory(*objects)

    accelerator.prepare_model = model_without_ddp
    accelerator.prepare_optimizer = wrapped_optimizer
    accelerator.prepare_scheduler = scheduler_of_its_own
    accelerator.save_state = save_average
    accelerator.free_memory = free_all
    return wrapping


class GossipOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's proxy of an optimizer, which also has the methods of the wrapper."""

    @property
    def step_was_skipped(self) -> bool:
        """True if an overflow has skipped the local update; schedulers then do not step."""
        # Accelerate asks whether the scaler has called step(), which it always does here.
        return bool(self.optimizer.stats().skipped)

    # torch's `Join` sets it on this proxy, and the wrapper reads its own.
    _join_config = property(None, lambda self, new: setattr(self.optimizer, "_join_config", new))

    def __getattr__(self, name: str) -> Any:
        """Forward attributes that Accelerate's proxy does not have, such as `averaged`."""
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)
