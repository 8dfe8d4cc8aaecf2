"""The optimizers that update each parameter independently of the others."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

# State per parameter and nothing that couples parameters: updating them in several calls is the
# same computation. Exact types only, since a subclass may couple what its parent does not.
SPLITTABLE: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Adafactor),
    *([optim.Muon] if hasattr(optim, "Muon") else []),  # of torch 2.9 and newer
)


def is_splittable(kind: type[Optimizer]) -> bool:
    """Return whether it is one of torch's or of this folder's, which all are, and no subclass."""
    return kind in SPLITTABLE or kind.__module__.rpartition(".")[0] == __package__
