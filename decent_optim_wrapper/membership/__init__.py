"""The ranks that take part: how they start, agree, and go on without one that is lost."""
