"""Training by gossip as a module, whose backward passes are steps."""

from decent_optim_wrapper.ddp.module import DecentralizedDataParallel, LRSchedulerFn, OptimFn

__all__ = ["DecentralizedDataParallel", "LRSchedulerFn", "OptimFn"]
