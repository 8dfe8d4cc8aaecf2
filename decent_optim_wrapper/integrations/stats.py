"""The cost of gossip and the distance between the ranks, for experiment trackers."""

from __future__ import annotations

from decent_optim_wrapper.wrapper import DecentOptimWrapper


def gossip_stats(optimizer: DecentOptimWrapper, *, distance: bool = True) -> dict[str, float]:
    """Return the cost of this rank's last step and the distance between the ranks; collective.

    Args:
        optimizer: the wrapper.
        distance: measure the consensus distance, which sums the parameters over all ranks. Without
            it nothing is communicated.

    Returns:
        Values for ``gossip/bytes``, ``gossip/wait_seconds`` (waiting for communication),
        ``gossip/mix_seconds``, ``gossip/update_seconds``, ``gossip/staleness``, ``gossip/skipped``
        and ``gossip/consensus_distance``.
    """
    last = optimizer.stats()
    names = ("wait_seconds", "mix_seconds", "update_seconds", "staleness", "skipped")
    values = {"bytes": float(last.bytes_sent)} | {name: getattr(last, name) for name in names}
    if distance:
        values["consensus_distance"] = optimizer.consensus_distance()
    return {f"gossip/{name}": float(value) for name, value in values.items()}
