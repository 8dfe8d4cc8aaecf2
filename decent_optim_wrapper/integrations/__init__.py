"""Training frameworks, each in a module that is imported on demand."""
