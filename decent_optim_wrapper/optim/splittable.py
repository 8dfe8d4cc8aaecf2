"""The optimizers that update each parameter independently of the others."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from decent_optim_wrapper.optim.accum import AccumAdam, AccumAdamW
from decent_optim_wrapper.optim.adamw import AdamW
from decent_optim_wrapper.optim.quasi_global import QGSGD

# State per parameter and nothing that couples parameters: updating them in several calls is the
# same computation. Exact types only, since a subclass may couple what its parent does not.
SPLITTABLE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Adafactor,
    *([optim.Muon] if hasattr(optim, "Muon") else []),  # of torch 2.9 and newer
    AccumAdam,
    AccumAdamW,
    AdamW,
    QGSGD,
)
