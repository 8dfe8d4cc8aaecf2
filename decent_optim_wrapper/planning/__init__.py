"""Plan a run from measured steps, and test the links."""
