"""Optimizers for decentralised training."""

from decent_optim_wrapper.optim.accum import AccumAdam, AccumAdamW
from decent_optim_wrapper.optim.quasi_global import QGSGD

__all__ = ["AccumAdam", "AccumAdamW", "QGSGD"]
