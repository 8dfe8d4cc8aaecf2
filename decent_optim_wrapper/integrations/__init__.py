"""Training frameworks, each in a module to be imported on demand, and values for trackers."""

from decent_optim_wrapper.integrations.stats import gossip_stats

__all__ = ["gossip_stats"]
