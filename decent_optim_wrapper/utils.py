"""Start-up helpers for scripts, from `decent_optim_wrapper.membership.launch`."""

from decent_optim_wrapper.membership.launch import DistInfo, init_distributed, initialize_dist

__all__ = ["DistInfo", "init_distributed", "initialize_dist"]
