"""The records that a user passes, each of which checks itself, and the wrapper's other options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from decent_optim_wrapper import checks
from decent_optim_wrapper.codecs import INT3, INT4, Codec, codec_of
from decent_optim_wrapper.gossip.extension import Extensions
from decent_optim_wrapper.gossip.schedule import (
    BeforeForward,
    Delayed,
    Intervals,
    Pacing,
    WithinStep,
)
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.topo.base import Topology, did_you_mean
from decent_optim_wrapper.wire.nonfinite import OnNonfinite as OnNonfinite
from decent_optim_wrapper.wire.references import keeps_references

Overlap = bool | Literal["forward"] | Pacing

_SENT = "a torch.dtype, as in comm_dtype=torch.int8, a Codec or None"
# What torch's stores and backends can wait for: milliseconds, counted in 32 bits.
_LONGEST_TIMEOUT = 2_000_000


def read_timeout(timeout: Any) -> timedelta | None:
    """Convert a timeout to a timedelta; None means the timeout of the process group.

    Raises:
        TypeError: the timeout is neither a timedelta nor a number.
        ValueError: the timeout is not above 0.
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return timedelta(seconds=min(checks.positive("seconds")("timeout", seconds), _LONGEST_TIMEOUT))


def _check_comm_dtype(name: str, value: Any) -> Any:
    codec_of(checks.instance_of(_SENT, torch.dtype, Codec)(name, value))
    return value


def _check_overlap(name: str, value: Any) -> Any:
    known = isinstance(value, (bool, Pacing)) or value == "forward"
    hint = did_you_mean(value, ["forward"]) if isinstance(value, str) else ""
    checks.expect(known, f'{name} expects a bool, "forward" or a Pacing{hint}', value)
    return value


_flag = checks.instance_of("a bool", bool)
_steps = checks.whole(1, "a number of steps", " step")


@dataclass(frozen=True)
class Schedule(checks.CheckedFields):
    """Which rounds there are, and how far they mix; the same on all ranks.

    Args:
        gossip_every: number of steps from one round of gossip to the next.
        mixing_rate: γ in (0, 1] in x <- (1 - γ) x + γ W_t x. Assign `mixing_rate` of the wrapper to
            change it during training.
        global_avg_every: number of steps (with `AsItArrives`, of rounds) from one exact average to
            the next (Gossip-PGA, Chen et al. 2021); None for no averages. An average replaces the
            round that would be due, and is overlapped like a round.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    gossip_every: Annotated[int, _steps] = 1
    # As a float: the ranks compare its text, and 1 and 1.0 are the same rate.
    mixing_rate: Annotated[float, checks.converted(checks.check_mixing_rate)] = 1.0
    global_avg_every: Annotated[int | None, checks.optional(_steps)] = None

    @property
    def intervals(self) -> Intervals:
        """How often rounds are launched."""
        return Intervals(gossip_every=self.gossip_every, global_avg_every=self.global_avg_every)


def default_overlap(
    base: Optimizer, model: object, extensions: Extensions, announces: bool
) -> Overlap:
    """The default of `overlap`: "forward" if it works with these.

    Args:
        base: the optimizer.
        model: the model, whose modules announce all parameters; None if it is not known.
        extensions: the extensions, of which none may wait for all ranks in a forward pass.
        announces: whether the modules of the model announce what they read. On a mesh they do not,
            unless a module contains the wrapper.
    """
    meets = any(each.collective for each in extensions.all)
    if meets or not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return True
    return "forward" if announces and {*params_of(base)} <= {*model.parameters()} else True


def mixes_all(model: object, mesh: object, overlap: Pacing) -> bool:
    """Return whether all ranks of a small world mix in each round by default; otherwise pairs do.

    Args:
        model: the model, before whose forward pass rounds are mixed; None if it is not known.
        mesh: of replicas that are spread over several ranks.
        overlap: the pacing. With `AsItArrives` no rank waits for all others.
    """
    return isinstance(model, nn.Module) and mesh is None and overlap.synchronous


def default_comm_dtype(topology: Topology, mixes_all: bool, sends_more: bool) -> torch.dtype:
    """The default of `comm_dtype`: int3 where its losses were measured, with references.

    Args:
        topology: the topology.
        mixes_all: a result of `mixes_all`.
        sends_more: whether extensions send something, whose values have no references.
    """
    code = INT4 if sends_more else INT3
    return code if mixes_all and keeps_references(topology) else torch.float32


@dataclass(frozen=True, kw_only=True)
class Settings(checks.CheckedFields):
    """How the ranks of a wrapper gossip; the same on all of them.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range.
    """

    bucket_cap_mb: Annotated[float | None, checks.optional(checks.positive("MiB"))]
    """Upper bound of the size of a bucket, in MiB; None chooses it from the size of the model."""
    overlap: Annotated[Overlap, _check_overlap]
    """When a round is mixed."""
    sync_at_start: Annotated[bool, _flag]
    """Whether all ranks start with the values of rank 0."""
    comm_dtype: Annotated[torch.dtype | Codec | None, checks.optional(_check_comm_dtype)]
    """The format in which parameters are sent; None until the topology is known."""
    param_as_bucket_view: Annotated[bool, _flag]
    """Whether the parameters become views of the buckets."""
    on_nonfinite: Annotated[OnNonfinite, checks.one_of("raise", "skip", "ignore")]
    """What happens to parameters that are not finite."""
    schedule: Annotated[Schedule, checks.instance_of("a Schedule", Schedule)]
    """How often the ranks mix and average, and how far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        every, average_every = self.schedule.intervals
        between = math.gcd(every, average_every or every)
        expected = f"at least {self.pacing.longest_flight} steps from one round to the next"
        fits = self.pacing.longest_flight <= between
        if not self.pacing.synchronous:
            # It launches a round in the step that mixes the last one.
            expected, fits = "gossip_every=1", every == 1
        if not fits:
            raise ValueError(
                f"overlap={self.pacing!r} expects {expected}, got gossip_every={every} and "
                f"global_avg_every={average_every}"
            )

    @property
    def codec(self) -> Codec | None:
        """How values are coded; None sends them unchanged."""
        return None if self.comm_dtype is None else codec_of(self.comm_dtype)

    @property
    def pacing(self) -> Pacing:
        """When a round is mixed."""
        named = {True: Delayed(), False: WithinStep(), "forward": BeforeForward()}
        return self.overlap if isinstance(self.overlap, Pacing) else named[self.overlap]

    def lines(self) -> list[str]:
        """One line for each option that the ranks compare as text; extensions have their own."""
        options = {**vars(self), **vars(self.schedule)}
        del options["schedule"]
        return [f"{name}={value!r}" for name, value in options.items()]
