"""Continuing without lost ranks, and with ranks that come back."""
