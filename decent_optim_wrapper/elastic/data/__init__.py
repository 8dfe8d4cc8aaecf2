"""Deals samples to ranks that are lost and come back."""
