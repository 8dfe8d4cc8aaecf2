"""Checkpoint sets: a file per rank, used together or not at all."""

from decent_optim_wrapper.checkpoint.sets import Checkpoint, Checkpoints

__all__ = ["Checkpoint", "Checkpoints"]
