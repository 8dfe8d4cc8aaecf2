"""The records that a user passes, each of which checks itself, and the wrapper's other options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from types import NoneType
from typing import Annotated, Any, Literal

import torch
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from decent_optim_wrapper.checks import (
    check_fields,
    expect,
    instance_of,
    is_real,
    one_of,
    optional,
    positive,
    whole,
)
from decent_optim_wrapper.codecs import Codec, codec_of
from decent_optim_wrapper.extensions import (
    GradientTracking,
    OuterOptimizer,
    OwnCopyCheck,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.extensions.outer_optimizer import MakeOptimizer
from decent_optim_wrapper.gossip.extension import Extension, Extensions
from decent_optim_wrapper.gossip.pacing import (
    AsItArrives,
    BeforeForward,
    Delayed,
    Late,
    Pacing,
    WithinStep,
)
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.optim.closures import evaluates_inside_step
from decent_optim_wrapper.optim.delegating import DelegatingOptimizer
from decent_optim_wrapper.optim.mixing_rate import check_mixing_rate
from decent_optim_wrapper.optim.splittable import SPLITTABLE
from decent_optim_wrapper.wire.nonfinite import OnNonfinite as OnNonfinite

# Called with the old and the new members.
OnChange = Callable[[tuple[int, ...], tuple[int, ...]], object]
Overlap = bool | Literal["forward"] | Pacing
AverageState = Literal["keep", "average"] | tuple[str, ...]

_MAX_STALENESS = 16
# What torch's stores and backends can wait for: whole milliseconds, counted in 32 bits.
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 0.001, 2_000_000


def read_timeout(timeout: Any) -> timedelta | None:
    """Convert a timeout to a timedelta; None means the timeout of the process group.

    Raises:
        TypeError: the timeout is neither a timedelta nor a number.
        ValueError: the timeout is out of range.
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    expect(is_real(seconds), "timeout expects a number of seconds, a timedelta or None", timeout)
    if not _SHORTEST_TIMEOUT <= seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout must be {_SHORTEST_TIMEOUT} to {_LONGEST_TIMEOUT} seconds (torch counts "
            f"milliseconds in 32 bits), got {seconds}"
        )
    return timedelta(seconds=float(seconds))


def _check_timeout(name: str, timeout: Any) -> Any:
    read_timeout(timeout)
    return timeout


def _check_gossip_every(name: str, value: Any) -> Any:
    if value == "auto":
        return value
    expected = f'{name} expects a number of steps or "auto"'
    expect(not isinstance(value, str), expected, value)
    return _steps(name, value)


def _check_mixing_rate(name: str, value: Any) -> float:
    # As a float: the ranks compare its text, and 1 and 1.0 are the same rate.
    return check_mixing_rate(value)


def _check_average_state(name: str, value: Any) -> Any:
    if not isinstance(value, tuple):
        return one_of("keep", "average")(name, value)
    is_names = bool(value) and all(isinstance(each, str) for each in value)
    expect(is_names, f"{name} expects names of the base's state", value)
    return value


def _check_comm_dtype(name: str, value: Any) -> Any:
    known = isinstance(value, (torch.dtype, Codec))
    expect(known, f"{name} expects a torch.dtype, a Codec or None", value)
    codec_of(value)
    return value


def _check_overlap(name: str, value: Any) -> Any:
    known = isinstance(value, (bool, Pacing)) or value == "forward"
    expect(known, f'{name} expects a bool, "forward" or a Pacing', value)
    return value


_flag = instance_of("a bool", bool)
_steps = whole(1, "a number of steps", " step")


@dataclass(frozen=True)
class Schedule:
    """When the ranks mix, and how far; the same on all ranks.

    Args:
        gossip_every: number of steps from one round of gossip to the next; or "auto": a step mixes
            the round in flight if it has arrived, and then launches the next one. No step waits
            for the network or for a slower rank before `max_staleness` is reached. Rounds are then
            counted separately from steps.
        mixing_rate: γ in (0, 1] in x <- (1 - γ) x + γ W_t x. Assign `mixing_rate` of the wrapper to
            change it during training.
        global_avg_every: number of steps (with "auto", of rounds) from one exact average to the
            next (Gossip-PGA, Chen et al. 2021); None for no averages. An average replaces the round
            that would be due, and is overlapped like a round.
        average_state: what to do with the base optimizer's state (momenta) when an exact average
            is kept or scheduled: "keep" it, or "average" it, too (`on_nonfinite` then applies to it
            as to the parameters). Or a tuple of names of state entries, such as
            ``("exp_avg_sq",)``, which are sent and mixed in every round with the parameters.
        outer: function that makes an outer optimizer from a list of tensors, the anchors, such as
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``; None for no outer
            optimizer. It steps at every exact average if `global_avg_every` is set, otherwise at
            every round of gossip, with the gradient anchor - mixed; then x <- anchor. The anchors
            start as the parameters of the first step. The optimizer is stepped bucket by bucket, so
            it must update each tensor by itself. It costs a copy of the parameters and its own
            state.
        staleness: number of steps from the launch of a round to its mixing, at most `gossip_every`.
            The transfer may take that many forward and backward passes. With s_i the parameters at
            the launch, x_i <- x_i + γ Σ_j W_ij (s_j - s_i), so the mean over the ranks does not
            move. A value above 1 costs a copy of the parameters.
        max_staleness: upper bound of the staleness with "auto"; a step that reaches it waits.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    gossip_every: Annotated[int | Literal["auto"], _check_gossip_every] = 1
    mixing_rate: Annotated[float, _check_mixing_rate] = 1.0
    global_avg_every: Annotated[int | None, optional(_steps)] = None
    average_state: Annotated[AverageState, _check_average_state] = "keep"
    outer: Annotated[
        MakeOptimizer | None,
        instance_of(
            "a function from a list of tensors to a torch.optim.Optimizer, such as "
            "partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), or None",
            *(Callable, NoneType),
        ),
    ] = None
    staleness: Annotated[int, _steps] = 1
    max_staleness: Annotated[int, _steps] = _MAX_STALENESS

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_staleness()
        if isinstance(self.average_state, tuple) and self.pacing.needs_snapshot:
            raise ValueError(
                f"average_state={self.average_state!r} expects rounds that are mixed in the next "
                f'step, not staleness above 1 or gossip_every="auto": second moments that have '
                f"become smaller since the launch could become negative"
            )

    def _check_staleness(self) -> None:
        """Check that each round is mixed before the next one is launched."""
        if self.gossip_every == "auto":
            if self.staleness != 1:
                raise ValueError(
                    f'staleness expects gossip_every to be a number of steps; with "auto", pass '
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
        """When a round is mixed if `overlap` is True."""
        if self.gossip_every == "auto":
            return AsItArrives(self.max_staleness)
        return Delayed() if self.staleness == 1 else Late(self.staleness)


@dataclass(frozen=True)
class Elastic:
    """Continue training without a lost rank, and let it rejoin when it is restarted.

    Args:
        store: where the ranks agree on who is left; with a store, `rank` and `world_size`, no
            process group is needed. None takes the store of the process group if there is one, else
            the launcher's: ``python -m decent_optim_wrapper run``, or torchrun. The variable
            DECENT_STORE names one in etcd, which takes precedence over the launcher's own.
        on_membership_change: function that is called with the old and the new `members`, to shard
            the data again.
        stale_after: seconds without a heartbeat after which a rank counts as dead; the same on all
            ranks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `stale_after` is not above 0 and finite.
    """

    store: Annotated[
        Store | None, instance_of("a torch.distributed.Store or None", Store, NoneType)
    ] = None
    on_membership_change: Annotated[
        OnChange | None,
        instance_of("a function of the old and the new members, or None", Callable, NoneType),
    ] = None
    stale_after: Annotated[float, positive("seconds")] = 2.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Settings:
    """Further options of `DecentOptimWrapper`; the same on all ranks.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range.
    """

    _: KW_ONLY
    bucket_cap_mb: Annotated[float | None, optional(positive("MiB"))]
    overlap: Annotated[Overlap | None, optional(_check_overlap)]
    sync_at_start: Annotated[bool, _flag]
    comm_dtype: Annotated[torch.dtype | Codec | None, optional(_check_comm_dtype)]
    param_as_bucket_view: Annotated[bool, _flag]
    gradient_tracking: Annotated[bool, _flag]
    timeout: Annotated[timedelta | float | None, _check_timeout]
    on_nonfinite: Annotated[OnNonfinite, one_of("raise", "skip", "ignore")]
    schedule: Annotated[Schedule, instance_of("a Schedule", Schedule)]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.schedule.pacing.needs_snapshot and self.overlap not in (None, True):
            raise ValueError(
                'staleness above 1 and gossip_every="auto" expect overlap=True: with False a round '
                'is mixed in the step that launches it, with "forward" before the next gradient'
            )

    @property
    def codec(self) -> Codec | None:
        """How values are coded; None sends them unchanged."""
        return None if self.comm_dtype is None else codec_of(self.comm_dtype)

    @property
    def pacing(self) -> Pacing:
        """When a round is mixed."""
        if isinstance(self.overlap, Pacing):
            return self.overlap
        if self.overlap == "forward":
            return BeforeForward()
        return WithinStep() if self.overlap is False else self.schedule.pacing

    def lines(self) -> list[str]:
        """One line for each option that the ranks compare as text; extensions have their own."""
        options = {**vars(self), **vars(self.schedule)}
        return [f"{k}={v!r}" for k, v in options.items() if k not in ("schedule", "outer")]


def build_extensions(
    settings: Settings, own: Sequence[Extension], optimizer: Optimizer
) -> Extensions:
    """Build the extensions for these settings and this base, followed by the user's own.

    Raises:
        TypeError: one of the user's own is not an `Extension`.
        ValueError: two have the same name, or one that has a state has no name.
    """
    expected = "extensions expects a sequence of instances of Extension"
    expect(isinstance(own, Sequence), expected, own)
    for each in own:
        expect(isinstance(each, Extension), expected, each)
        if not each.name and type(each).state_dict is not Extension.state_dict:
            raise ValueError(
                f"extensions expects a name for each extension with a state, as its key in "
                f"checkpoints; set {type(each).__name__}.name"
            )
    schedule = settings.schedule
    built: list[Extension] = []
    if settings.gradient_tracking:
        built.append(GradientTracking())
    if isinstance(schedule.average_state, tuple):
        built.append(StateGossip(schedule.average_state))
    if type(optimizer) not in SPLITTABLE:
        built.append(OwnCopyCheck())
    if schedule.outer is not None:
        built.append(OuterOptimizer(schedule.outer))
    if schedule.average_state == "average":
        built.append(StateAverage())
    return Extensions([*built, *own])


def check_base(optimizer: Any) -> None:
    """Check that the optimizer can be wrapped.

    Raises:
        TypeError: it is not an optimizer, or it is a wrapper already.
        ValueError: it has no parameters, or exchanges them itself.
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
    # By name, because the import takes longer than everything else here.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in kind.__mro__):
        raise ValueError(
            f"optimizer expects one that updates all parameters of this rank, got a "
            f"{kind.__name__}, with which each rank updates a part of them and broadcasts it; that "
            f"would undo the gossip; wrap the plain optimizer"
        )


def check_closures(optimizer: Optimizer, pacing: Pacing) -> None:
    """Check that the closures of an optimizer do not go with overlap only.

    Raises:
        ValueError: the optimizer evaluates its closure where this pacing does not allow it.
    """
    reason = evaluates_inside_step(optimizer)
    if reason and not isinstance(pacing, WithinStep):
        raise ValueError(
            f"{type(optimizer).__name__} {reason}, which does not work with overlap: the gradient "
            f"belongs to the parameters before the mixing; pass overlap=False"
        )
