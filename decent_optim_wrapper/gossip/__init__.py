"""Rounds of gossip: buckets, the mixing, the local update and exact averages."""
