"""Logs a summary at the start, and warns if codes lose more than expected."""

from __future__ import annotations

from loguru import logger

from decent_optim_wrapper.codecs import wide
from decent_optim_wrapper.config import Settings
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import MIB
from decent_optim_wrapper.wire.references import MOST_REFERENCES


def log_summary(rounds: Rounds, gossip_every: int) -> None:
    """Log the topology, the ranks, and the bytes that this rank sends.

    Args:
        rounds: the ranks, the buckets and the extensions.
        gossip_every: number of steps from one round to the next.
    """
    session, buckets = rounds.session, rounds.buckets
    ranks = session.transport.world_size
    text = f"{session.topology!r}, {ranks} rank{'s' * (ranks > 1)}: "
    text += f"rank {session.transport.initial_rank} sends {_sent(rounds, gossip_every)}"
    text += f" ({len(buckets)} bucket{'s' * (len(buckets) > 1)})"
    if senders := [type(each).__name__ for each in rounds.extensions.all if each.sends]:
        text += f"; more is sent by {', '.join(senders)}"
    logger.info(f"{text}. DECENT_LOG=info shows more, DECENT_LOG=off nothing")


def warn_of_rounding(settings: Settings, session: Session) -> None:
    """Warn, on one rank, where `comm_dtype` rounds the parameters themselves."""
    uses_reference = settings.codec is not None and settings.codec.uses_reference
    if uses_reference and not session.references.keeps and session.transport.initial_rank == 0:
        warn(
            f"with comm_dtype={settings.comm_dtype}, {session.topology!r} has more than "
            f"{MOST_REFERENCES} groups per rank, too many to keep a reference for each: the "
            f"parameters themselves are rounded, and replicas stay further apart; take a topology "
            f"of fewer partners, such as ring"
        )


def _sent(rounds: Rounds, gossip_every: int) -> str:
    phases = rounds.session.schedule.phases
    per_round = sum(_bytes(bucket, group) for group in phases for bucket in rounds.buckets)
    unit = "step" if rounds.policy.pacing.synchronous else "round"
    return f"{_in_units(per_round / len(phases) / gossip_every)} of parameters per {unit}"


def _in_units(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= MIB else f"{nbytes / 1024:.1f} KiB"


def _bytes(bucket: Bucket, group: Group) -> float:
    """The bytes of a bucket that a rank of the group sends in one round."""
    codec, numel = bucket.codec(group.size), bucket.near.numel
    if codec is not None:
        return group.copies_sent * codec.nbytes(numel)
    # Larger groups sum half precision in float32.
    dtype = bucket.dtype if group.size == 2 else wide(bucket.dtype)
    return group.copies_sent * numel * dtype.itemsize
