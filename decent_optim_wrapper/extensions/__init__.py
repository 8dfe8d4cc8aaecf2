"""The extensions of this package, with one feature per file."""
