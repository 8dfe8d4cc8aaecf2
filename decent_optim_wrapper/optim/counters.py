"""The entries of optimizer states that count steps."""

# State entries of torch's optimizers and of ours that count steps or follow from such a count. They
# must not be averaged, although for a parameter without dimensions they have its shape.
COUNTERS = frozenset({"step", "position", "mu_product", "eta", "mu"})
