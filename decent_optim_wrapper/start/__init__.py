"""From the arguments of a wrapper to ranks that have met and agree."""
