"""The records that a user passes, each of which checks itself, and the wrapper's other options."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from decent_optim_wrapper.codecs import Codec, codec_of
from decent_optim_wrapper.extensions import (
    GradientTracking,
    IdenticalRanks,
    OuterOptimizer,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.extensions.outer_optimizer import MakeOptimizer
from decent_optim_wrapper.gossip.extension import Extension, Extensions
from decent_optim_wrapper.gossip.pacing import AsItArrives, Delayed, Late, Pacing, WithinStep
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.optim.closures import evaluates_inside_step
from decent_optim_wrapper.optim.delegating import DelegatingOptimizer
from decent_optim_wrapper.optim.mixing_rate import check_mixing_rate
from decent_optim_wrapper.topo.base import did_you_mean
from decent_optim_wrapper.wire.nonfinite import OnNonfinite as OnNonfinite

# Called with the old and the new members.
OnChange = Callable[[tuple[int, ...], tuple[int, ...]], object]
AverageState = Literal["keep", "average"] | tuple[str, ...]

_MAX_STALENESS = 16
# What torch's stores and backends can wait for: whole milliseconds, counted in 32 bits.
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 0.001, 2_000_000


@dataclass(frozen=True)
class Schedule:
    """When and how far the ranks mix; the same on all ranks.

    Args:
        gossip_every: number of steps from one round of gossip to the next; or "auto": a step mixes
            the round in flight if it has arrived, and then launches the next one. No step waits
            for the network or for a slower rank unless `max_staleness` is reached, and rounds are
            counted apart from steps.
        mixing_rate: γ in (0, 1]: x <- (1 - γ) x + γ W_t x. The property of the wrapper changes it
            during training.
        global_avg_every: number of steps (with "auto", of rounds) from one exact average to the
            next, which replaces the round that would be due and is overlapped as a round is
            (Gossip-PGA, Chen et al. 2021); None for no averages.
        average_state: what to do with the base optimizer's state (momenta) when an exact average
            is kept or scheduled: "keep" it, or "average" it too (`on_nonfinite` applies to it as to
            parameters). Or names of entries of the state, such as ``("exp_avg_sq",)``, which then
            travel and are mixed in every round together with the parameters.
        outer: function that makes an outer optimizer from a list of tensors, the anchors, such as
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``; None for none. It
            steps at every exact average if `global_avg_every` is set, else at every round of
            gossip, with the gradient anchor - mixed; then x <- anchor. The anchors start as the
            parameters of the first step. The optimizer is stepped bucket by bucket, so it must
            update each tensor by itself. It costs a copy of the parameters and its own state.
        staleness: how many steps after its launch a round is mixed, at most `gossip_every`. A round
            has that many forward and backward passes to travel. With s_i the parameters at the
            launch, x_i <- x_i + γ Σ_j W_ij (s_j - s_i): the mean over the ranks does not move. It
            costs a copy of the parameters if it is above 1.
        max_staleness: the same for "auto", where it is an upper bound at which a step waits.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    gossip_every: int | Literal["auto"] = 1
    mixing_rate: float = 1.0
    global_avg_every: int | None = None
    average_state: AverageState = "keep"
    outer: MakeOptimizer | None = None
    staleness: int = 1
    max_staleness: int = _MAX_STALENESS

    def __post_init__(self) -> None:
        if self.gossip_every != "auto":
            _expect(
                not isinstance(self.gossip_every, str),
                'gossip_every expects a number of steps or "auto"',
                self.gossip_every,
            )
            _check_steps("gossip_every", self.gossip_every)
        _check_steps("staleness", self.staleness)
        _check_steps("max_staleness", self.max_staleness)
        # As a float: the ranks compare its text, and 1 and 1.0 are the same rate.
        object.__setattr__(self, "mixing_rate", check_mixing_rate(self.mixing_rate))
        if self.global_avg_every is not None:
            _check_steps("global_avg_every", self.global_avg_every)
        if isinstance(self.average_state, tuple):
            names = self.average_state
            is_names = bool(names) and all(isinstance(name, str) for name in names)
            _expect(is_names, "average_state expects names of the base's state", names)
        else:
            _check_choice("average_state", self.average_state, ("keep", "average"))
        _expect(
            self.outer is None or callable(self.outer),
            "outer expects a function from a list of tensors to a torch.optim.Optimizer, such as "
            "partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), or None",
            self.outer,
        )
        self._check_staleness()
        if isinstance(self.average_state, tuple) and self.pacing.needs_snapshot:
            raise ValueError(
                f"average_state={self.average_state!r} expects rounds that are mixed in the next "
                f'step, not staleness above 1 or gossip_every="auto": second moments that have '
                f"become smaller since the launch would get below zero"
            )

    def _check_staleness(self) -> None:
        """Check that one round is mixed before the next one is launched."""
        if self.gossip_every == "auto":
            if self.staleness != 1:
                raise ValueError(
                    f'staleness expects a number of steps as gossip_every; with "auto", pass '
                    f"max_staleness={self.staleness} instead"
                )
            if self.average_state == "average":
                raise ValueError(
                    'average_state="average" expects all ranks to mix in the same step, which they '
                    'do not with gossip_every="auto"; pass average_state="keep"'
                )
        elif self.max_staleness != _MAX_STALENESS:
            raise ValueError(
                f'max_staleness expects gossip_every="auto"; with a number of steps, pass '
                f"staleness={self.max_staleness} instead"
            )
        elif self.staleness > self.gossip_every:
            raise ValueError(
                f"staleness must be at most gossip_every={self.gossip_every}, since one round is "
                f"mixed before the next one is launched, got {self.staleness}"
            )
        elif self.global_avg_every is not None and self.staleness > math.gcd(
            self.gossip_every, self.global_avg_every
        ):
            raise ValueError(
                f"staleness={self.staleness} expects at least as many steps between a round "
                f"and an exact average, got gossip_every={self.gossip_every} and "
                f"global_avg_every={self.global_avg_every}, whose greatest common divisor is less"
            )

    @property
    def intervals(self) -> Intervals:
        """How often rounds are launched."""
        every = 1 if isinstance(self.gossip_every, str) else self.gossip_every
        return Intervals(gossip_every=every, global_avg_every=self.global_avg_every)

    @property
    def pacing(self) -> Pacing:
        """When a round is mixed, with overlap."""
        if self.gossip_every == "auto":
            return AsItArrives(self.max_staleness)
        return Delayed() if self.staleness == 1 else Late(self.staleness)


@dataclass(frozen=True)
class Elastic:
    """Train on without a rank that is lost, and let it rejoin when it is restarted.

    Args:
        store: where the ranks agree on who is left. None takes that of the process group; with a
            store, `rank` and `world_size`, no process group is needed.
        on_membership_change: function that is called with the old and the new `members`, to shard
            the data again.
        stale_after: seconds without a heartbeat after which a rank counts as dead; the same on all
            ranks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `stale_after` is not above 0 and finite.
    """

    store: Store | None = None
    on_membership_change: OnChange | None = None
    stale_after: float = 2.0

    def __post_init__(self) -> None:
        _expect(
            self.store is None or isinstance(self.store, Store),
            "store expects a torch.distributed.Store or None",
            self.store,
        )
        _expect(
            self.on_membership_change is None or callable(self.on_membership_change),
            "on_membership_change expects a function of the old and the new members, or None",
            self.on_membership_change,
        )
        seconds = _positive("stale_after", "seconds", self.stale_after)
        object.__setattr__(self, "stale_after", seconds)


@dataclass(frozen=True)
class Settings:
    """Further options of `DecentOptimWrapper`, in which the ranks must agree.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range.
    """

    _: KW_ONLY
    bucket_cap_mb: float
    overlap: bool | Pacing
    sync_at_start: bool
    comm_dtype: torch.dtype | Codec | None
    param_as_bucket_view: bool
    gradient_tracking: bool
    timeout: timedelta | float | None
    on_nonfinite: OnNonfinite
    schedule: Schedule

    def __post_init__(self) -> None:
        for name in (
            "sync_at_start",
            "param_as_bucket_view",
            "gradient_tracking",
        ):
            flag = getattr(self, name)
            _expect(isinstance(flag, bool), f"{name} expects a bool", flag)
        _expect(
            isinstance(self.overlap, (bool, Pacing)),
            "overlap expects a bool or a Pacing",
            self.overlap,
        )
        cap_mb = _positive("bucket_cap_mb", "MiB", self.bucket_cap_mb)
        object.__setattr__(self, "bucket_cap_mb", cap_mb)
        read_timeout(self.timeout)
        if self.comm_dtype is not None:
            known = isinstance(self.comm_dtype, (torch.dtype, Codec))
            _expect(known, "comm_dtype expects a torch.dtype, a Codec or None", self.comm_dtype)
            codec_of(self.comm_dtype)
        _check_choice("on_nonfinite", self.on_nonfinite, ("raise", "skip", "ignore"))
        is_schedule = isinstance(self.schedule, Schedule)
        _expect(is_schedule, "schedule expects a Schedule", self.schedule)
        self._check_staleness()

    def _check_staleness(self) -> None:
        """Check that the options work with rounds that travel under several steps."""
        if not self.schedule.pacing.needs_snapshot:
            return
        if self.overlap is not True:
            raise ValueError(
                'staleness above 1 and gossip_every="auto" expect overlap=True: without overlap a '
                "round is mixed in the step that launches it"
            )

    @property
    def codec(self) -> Codec | None:
        """How values travel; None for as they are."""
        return None if self.comm_dtype is None else codec_of(self.comm_dtype)

    @property
    def pacing(self) -> Pacing:
        """When a round is mixed."""
        if isinstance(self.overlap, Pacing):
            return self.overlap
        return self.schedule.pacing if self.overlap else WithinStep()

    @property
    def patience(self) -> timedelta | None:
        """The timeout as a timedelta."""
        return read_timeout(self.timeout)

    def lines(self) -> list[str]:
        """A line for each option that the ranks can compare as text."""
        return [*_lines(self, without="schedule"), *_lines(self.schedule, without="outer")]


def build_extensions(settings: Settings, own: Sequence[Extension]) -> Extensions:
    """The extensions for these settings, and the user's own behind them.

    Raises:
        TypeError: one of the user's own is no extension.
        ValueError: two have the same name.
    """
    for each in own:
        _expect(isinstance(each, Extension), "extensions expects instances of Extension", each)
    schedule = settings.schedule
    built: list[Extension] = []
    if settings.gradient_tracking:
        built.append(GradientTracking())
    if isinstance(schedule.average_state, tuple):
        built.append(StateGossip(schedule.average_state))
    if schedule.outer is not None:
        built.append(OuterOptimizer(schedule.outer))
    if schedule.average_state == "average":
        built.append(StateAverage())
    return Extensions([*built, *own, IdenticalRanks()])


def read_timeout(timeout: Any) -> timedelta | None:
    """The timeout as a timedelta; None stands for that of the process group.

    Raises:
        TypeError: the timeout is neither a timedelta nor a number.
        ValueError: the timeout is out of range.
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    _expect(_is_real(seconds), "timeout expects a number of seconds, a timedelta or None", timeout)
    if not _SHORTEST_TIMEOUT <= seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout must be {_SHORTEST_TIMEOUT} to {_LONGEST_TIMEOUT} seconds (torch counts "
            f"milliseconds in 32 bits), got {seconds}"
        )
    return timedelta(seconds=float(seconds))


def check_base(optimizer: Any, pacing: Pacing) -> None:
    """Check that the optimizer can be wrapped.

    Raises:
        TypeError: it is not an optimizer, or is a wrapper itself.
        ValueError: it has no parameters, exchanges them itself, or does not work with this pacing.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DelegatingOptimizer):
        raise TypeError(
            f"optimizer expects a torch.optim.Optimizer that is not wrapped yet, "
            f"got {type(optimizer).__name__}"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer expects parameters to train, got a {type(optimizer).__name__} without any"
        )
    kind = type(optimizer)
    # By name: importing them takes longer than all else here.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in kind.__mro__):
        raise ValueError(
            f"optimizer expects one that updates all parameters of this rank, got a "
            f"{kind.__name__}, with which each rank updates a part of them and broadcasts it; that "
            f"would undo the gossip; wrap the plain optimizer"
        )
    reason = evaluates_inside_step(optimizer)
    if reason and not isinstance(pacing, WithinStep):
        raise ValueError(
            f"{kind.__name__} {reason}, which does not work with overlap=True: the gradient "
            f"belongs to the parameters before the mixing; pass overlap=False"
        )


def _expect(condition: bool, text: str, value: Any) -> None:
    if not condition:
        raise TypeError(f"{text}, got {value!r}")


def _lines(record: Any, without: str) -> list[str]:
    names = [field.name for field in fields(record) if field.name != without]
    return [f"{name}={getattr(record, name)!r}" for name in names]


def _check_choice(name: str, choice: Any, choices: tuple[str, ...]) -> None:
    _expect(isinstance(choice, str), f"{name} expects one of {choices}", choice)
    if choice not in choices:
        hint = did_you_mean(choice, choices)
        raise ValueError(f"{name} expects one of {choices}, got {choice!r}{hint}")


def _check_steps(name: str, value: Any) -> None:
    """Check a number of steps."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _expect(whole, f"{name} expects a number of steps", value)
    if value < 1:
        raise ValueError(f"{name} must be 1 step or more, got {value}")


def _positive(name: str, unit: str, value: Any) -> float:
    _expect(_is_real(value), f"{name} expects a number of {unit}", value)
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be above 0 {unit} and finite, got {value}")
    return float(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
