"""Logs what rounds send and how long steps wait, and warns if codes lose more than expected."""

from __future__ import annotations

import torch
from loguru import logger

from decent_optim_wrapper.codecs import INT2, INT3, Codec, codec_of, wide
from decent_optim_wrapper.config import Settings
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.topo import Group, default_name
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import MIB
from decent_optim_wrapper.wire.references import MOST_REFERENCES

_NOTHING = "no other codec or topology would shorten that"
_FLOAT32 = "; where CPUs code slowly, comm_dtype=torch.float32 may be faster"
# The bytes of a round that explain no wait: at 10 Mbit/s, they take 50 ms.
_FEW_BYTES = 1 << 16
# The codecs to take one after the other, while float32 or a longer code is still sent.
_CODES = {f"comm_dtype={each}": codec_of(each) for each in (torch.int8, INT3, INT2)}


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
    if uses_reference and not session.references.are_used and session.transport.initial_rank == 0:
        warn(
            f"with comm_dtype={settings.comm_dtype}, {session.topology!r} has more than "
            f"{MOST_REFERENCES} groups per rank, too many to keep a reference for each: the "
            f"parameters themselves are rounded; take a topology of fewer partners, such as ring"
        )


def log_waits(rounds: Rounds) -> None:
    """Log how long the last steps have waited, as this rank has measured, and what would help."""
    steps = [*rounds.policy.meter.history]
    # The first half may have been slower than what comes.
    last = steps[len(steps) // 2 :]
    waits = sorted(cost.wait_seconds for _, cost, ranks in last[1:] if len(ranks) > 1) or [0.0]
    share, now = sum(waits) / (last[-1][0] - last[0][0]), _per_round(rounds)
    topology, phases = rounds.session.topology, rounds.session.schedule.phases
    pairs = f"topology={default_name(topology.world_size, topology.local_world_size)!r}"
    has_pairs = topology.world_size == 3 or min(group.size for group in phases) <= 2
    # Bytes need their time in every round, so they explain a wait only if the shortest are long.
    if 2 * len(waits) * waits[len(waits) // 10] < sum(waits) or now < _FEW_BYTES:
        others = "" if has_pairs else f" but with {pairs} a step waits for one rank only"
        advice = f"bytes are not the reason,{others or f' and {_NOTHING}'}"
    else:
        copies = sum(group.copies_sent for group in phases) / len(phases)
        options = [(name, now / _per_round(rounds, codec)) for name, codec in _CODES.items()]
        options = [*([] if has_pairs else [(pairs, copies)]), *options]
        helping = [f"{o} sends {n:.1f} times fewer bytes" for o, n in options if n > 1.2][:2]
        advice = " and ".join(helping) or f"{_NOTHING}, but mixing less often would"
    # On CPUs another thread codes, for which steps wait, too.
    is_coded = any(bucket.codec(group.size) for bucket in rounds.buckets for group in phases)
    what, more = ("codes and the network", _FLOAT32) if is_coded else ("the network", "")
    # A smaller share is worth no change.
    advice = _NOTHING if share < 0.1 else f"{advice}{more}"
    # A resumed run has counted others before.
    text = f"the last {len(last)} steps waited for {what} {share:.0%} of the time: {advice}"
    logger.info(f"{text}. optimizer.report() compares the ranks")


def _sent(rounds: Rounds, gossip_every: int) -> str:
    unit = "step" if rounds.policy.pacing.synchronous else "round"
    return f"{_in_units(_per_round(rounds) / gossip_every)} of parameters per {unit}"


def _per_round(rounds: Rounds, codec: Codec | None = None) -> float:
    """The mean number of bytes that this rank sends in a round, with this codec or as it is."""
    phases = rounds.session.schedule.phases
    sent = [_bytes(bucket, group, codec) for group in phases for bucket in rounds.buckets]
    return sum(sent) / len(phases)


def _in_units(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= MIB else f"{nbytes / 1024:.1f} KiB"


def _bytes(bucket: Bucket, group: Group, codec: Codec | None) -> float:
    """The bytes of a bucket that a rank of the group sends in one round."""
    codec, numel = codec or bucket.codec(group.size), bucket.on_device.numel
    if codec is not None:
        return group.copies_sent * codec.nbytes(numel)
    # Larger groups sum half precision in float32.
    dtype = bucket.dtype if group.size == 2 else wide(bucket.dtype)
    return group.copies_sent * numel * dtype.itemsize
