"""The launcher, which starts the ranks of a node and restarts those that die."""
