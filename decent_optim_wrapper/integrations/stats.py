"""The cost of gossip and the distance between the ranks, for experiment trackers."""

from __future__ import annotations

from typing import Any

from decent_optim_wrapper.wrapper import DecentOptimWrapper


def gossip_stats(
    optimizer: DecentOptimWrapper, *, distance: bool = True, report: bool = False
) -> dict[str, float]:
    """Return the cost of this rank's last step and the distance between the ranks; collective.

    Args:
        optimizer: the wrapper.
        distance: measure the consensus distance, which sums the parameters over all ranks. Without
            it and without a report nothing is communicated.
        report: add the result of `optimizer.report()`.

    Returns:
        Numbers by name: ``gossip/bytes``, ``gossip/wait_seconds`` (waiting for communication),
        ``gossip/mix_seconds``, ``gossip/update_seconds``, ``gossip/staleness``, ``gossip/skipped``
        and ``gossip/consensus_distance``. A report adds ``gossip/slow_rank``,
        ``gossip/slow_link_rank_a`` and ``gossip/slow_link_rank_b``, which are -1 if there is none,
        ``gossip/slow_link_seconds`` (0 if there is none), and for each rank what `RankReport` has:
        ``gossip/rank_0/computing_seconds``, ``gossip/rank_0/waits_for`` (-1 if it waits for none),
        ``gossip/rank_0/bytes_sent`` and so on.
    """
    last = optimizer.stats()
    names = ("wait_seconds", "mix_seconds", "update_seconds", "staleness", "skipped")
    values: dict[str, float | None] = {"bytes": last.bytes_sent}
    values |= {name: getattr(last, name) for name in names}
    if distance:
        values["consensus_distance"] = optimizer.consensus_distance()
    if report:
        found = optimizer.report()
        link = found.slow_link
        one, other = (None, None) if link is None else link.ranks
        values |= {
            "slow_rank": found.slow_rank,
            "slow_link_rank_a": one,
            "slow_link_rank_b": other,
            "slow_link_seconds": 0.0 if link is None else link.wait_seconds,
        }
        for each in found.ranks:
            own = dict(vars(each))
            rank = own.pop("rank")
            values |= {f"rank_{rank}/{name}": value for name, value in own.items()}
    # Trackers take numbers only, also for no rank.
    return {f"gossip/{k}": -1.0 if value is None else float(value) for k, value in values.items()}


def log_stats(
    optimizer: DecentOptimWrapper,
    writer: Any,
    step: int | None = None,
    *,
    distance: bool = True,
    report: bool = False,
) -> None:
    """Write `gossip_stats` to an experiment tracker; collective.

    Args:
        optimizer: the wrapper, or what a framework returns for it.
        writer: an object with `add_scalar` (torch.utils.tensorboard's SummaryWriter), `log_metrics`
            (MLflow, the loggers of Lightning) or `log` (Weights & Biases). None on ranks that do
            not write.
        step: number of this step; None takes `optimizer.round`.
        distance: as in `gossip_stats`.
        report: as in `gossip_stats`.

    Raises:
        TypeError: the writer has none of these methods.
    """
    known = ("add_scalar", "log_metrics", "log")
    if writer is not None and not any(hasattr(writer, name) for name in known):
        raise TypeError(
            f"writer expects an object that has one of {', '.join(known)}, or None on ranks that "
            f"do not write, got {type(writer).__name__}"
        )
    values = gossip_stats(optimizer, distance=distance, report=report)
    step = optimizer.round if step is None else step
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(values, step=step)
    elif writer is not None:
        writer.log(values, step=step)
