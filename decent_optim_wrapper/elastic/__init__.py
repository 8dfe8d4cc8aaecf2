"""Ranks that come and go: their membership, their launcher, their data, and stores to meet in."""
