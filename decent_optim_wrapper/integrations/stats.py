"""The cost of gossip and the distance between the ranks, for experiment trackers."""

from __future__ import annotations

from typing import Any

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


def log_stats(
    optimizer: DecentOptimWrapper, writer: Any, step: int | None = None, *, distance: bool = True
) -> None:
    """Write `gossip_stats` to an experiment tracker; collective.

    Args:
        optimizer: the wrapper, or what a framework returns for it.
        writer: an object with `add_scalar` (torch.utils.tensorboard's SummaryWriter), `log_metrics`
            (the module `mlflow`, the loggers of Lightning) or `log` (Weights & Biases). None on
            ranks that do not write.
        step: number of this step; None takes `optimizer.round`.
        distance: as in `gossip_stats`.

    Raises:
        TypeError: the writer has none of these methods.
    """
    known = ("add_scalar", "log_metrics", "log")
    if writer is not None and not any(hasattr(writer, name) for name in known):
        raise TypeError(
            f"writer expects an object that has one of {', '.join(known)}, or None on ranks that "
            f"do not write, got {type(writer).__name__}; for MLflow pass the module mlflow, not a "
            f"client"
        )
    values = gossip_stats(optimizer, distance=distance)
    step = optimizer.round if step is None else step
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(values, step=step)
    elif writer is not None:
        writer.log(values, step=step)
