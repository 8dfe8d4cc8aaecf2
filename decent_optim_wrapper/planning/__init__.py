"""Plan a run: compare topologies, the bytes that they send, and simulated step times."""

from decent_optim_wrapper.planning.analysis import (
    BytesSent,
    bytes_per_round,
    consensus_rate,
    rounds_to_consensus,
    steady_error,
    suggest,
)
from decent_optim_wrapper.planning.simulation import Pace, Simulation, simulate

__all__ = [
    "BytesSent",
    "Pace",
    "Simulation",
    "bytes_per_round",
    "consensus_rate",
    "rounds_to_consensus",
    "simulate",
    "steady_error",
    "suggest",
]
