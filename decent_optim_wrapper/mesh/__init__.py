"""Replicas that are spread over several ranks of a device mesh."""
