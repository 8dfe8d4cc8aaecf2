"""Start-up helpers for scripts, from `decent_optim_wrapper.start.launch`."""

from decent_optim_wrapper.start.launch import DistInfo, init_distributed, initialize_dist

__all__ = ["DistInfo", "init_distributed", "initialize_dist"]
