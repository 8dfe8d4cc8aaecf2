"""Plan a run: compare topologies and the bytes that they send, and test the links."""

from decent_optim_wrapper.planning.analysis import (
    BytesSent,
    bytes_per_round,
    consensus_rate,
    rounds_to_consensus,
    steady_error,
)

__all__ = [
    "BytesSent",
    "bytes_per_round",
    "consensus_rate",
    "rounds_to_consensus",
    "steady_error",
]
