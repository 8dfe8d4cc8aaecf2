"""The launcher, which starts the ranks of a node and restarts those that die."""

from decent_optim_wrapper.launcher.launcher import launch
from decent_optim_wrapper.launcher.options import LaunchOptions, add_arguments, read_arguments

__all__ = ["LaunchOptions", "add_arguments", "launch", "read_arguments"]
