"""Optimizers for decentralised training, and functions that build optimizers and schedules."""

from decent_optim_wrapper.optim.accum import AccumAdam, AccumAdamW
from decent_optim_wrapper.optim.adamw import AdamW
from decent_optim_wrapper.optim.factories import (
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "AdamW",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]
