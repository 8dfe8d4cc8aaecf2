"""Checkpoint sets: one file per rank; the files of a set are used together or not at all."""

from decent_optim_wrapper.checkpoint.sets import Checkpoint, Checkpoints

__all__ = ["Checkpoint", "Checkpoints"]
