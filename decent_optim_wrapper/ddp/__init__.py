"""Training by gossip as a module: every backward pass is a step."""

from decent_optim_wrapper.ddp.module import (
    DecentralizedDataParallel,
    LRSchedulerFn,
    OptimFn,
)

__all__ = ["DecentralizedDataParallel", "LRSchedulerFn", "OptimFn"]
