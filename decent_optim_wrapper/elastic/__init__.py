"""Going on without a rank that is lost, and with one that comes back."""
