"""The extensions of this package, with one feature per file."""

from decent_optim_wrapper.extensions.gradient_tracking import GradientTracking
from decent_optim_wrapper.extensions.outer_optimizer import OuterOptimizer
from decent_optim_wrapper.extensions.own_copy import OwnCopyCheck
from decent_optim_wrapper.extensions.state_average import StateAverage
from decent_optim_wrapper.extensions.state_gossip import StateGossip

__all__ = [
    "GradientTracking",
    "OuterOptimizer",
    "OwnCopyCheck",
    "StateAverage",
    "StateGossip",
]
