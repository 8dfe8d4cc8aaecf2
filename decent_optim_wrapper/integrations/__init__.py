"""Training frameworks, each in a module to be imported on demand, and experiment trackers."""

from decent_optim_wrapper.integrations.stats import gossip_stats, log_stats

__all__ = ["gossip_stats", "log_stats"]
