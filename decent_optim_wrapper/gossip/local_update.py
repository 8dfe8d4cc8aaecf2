"""The local update of the base optimizer, as a whole or by bucket, with or without GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from loguru import logger
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from decent_optim_wrapper.errors import CallOrderError
from decent_optim_wrapper.gossip.extension import Extensions
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.optim.adamw import AdamW
from decent_optim_wrapper.optim.gradients import params_of, unscale_
from decent_optim_wrapper.optim.splittable import is_splittable
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.parameters import (
    Named,
    changed_error,
    refuse_outside,
    relocated_error,
    replaced_error,
    sparse_gradient_error,
)

# Called with some parameters and a function that updates them; decides whether to call it.
Apply = Callable[[Sequence[Tensor], Callable[[], None]], None]
_HOOKS = "_optimizer_step_pre_hooks"


class Scaling(NamedTuple):
    """The attributes that GradScaler sets around its call of `step()`.

    Args:
        found_inf: not zero if a gradient overflowed; None without a GradScaler, and the number 0 if
            there were no gradients.
        grad_scale: the factor of the gradients; None if they are unscaled already.
    """

    found_inf: Tensor | int | None
    grad_scale: Tensor | None


class _Partition(NamedTuple):
    """The base's parameters by bucket.

    Args:
        ids: the ids of all parameters, in the order of the groups.
        buckets: the buckets of the gossip.
        parts: for the id of each bucket, its parameters of each group; parameters in no bucket are
            under the id of None.
        outside: the parameters in no bucket.
        gone: members of buckets that are no longer in the base.
    """

    ids: list[list[int]]
    buckets: Sequence[Bucket]
    parts: dict[int, list[list[Tensor]]]
    outside: list[Tensor]
    gone: list[Tensor]

    @classmethod
    def of(
        cls, groups: list[dict[str, Any]], ids: list[list[int]], buckets: Sequence[Bucket]
    ) -> _Partition:
        bucket_of = {id(member): bucket for bucket in buckets for member in bucket.members}
        parts: dict[int, list[list[Tensor]]] = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                key = id(bucket_of.get(id(param)))
                if key not in parts:
                    parts[key] = [[] for _ in groups]
                parts[key][index].append(param)
        here = {*chain.from_iterable(ids)}
        gone = [m for bucket in buckets for m in bucket.members if id(m) not in here]
        outside = [*chain.from_iterable(parts.get(id(None), ()))]
        return cls(ids=ids, buckets=buckets, parts=parts, outside=outside, gone=gone)


class LocalUpdate:
    """Steps the base optimizer.

    Args:
        optimizer: the base.
        extensions: extensions, which may change the gradients.
        rank: this rank, for errors.
    """

    def __init__(self, optimizer: Optimizer, extensions: Extensions, rank: int) -> None:
        self._optimizer: Any = optimizer
        self._extensions = extensions
        self._rank = rank
        self._gate = StepGate.of(optimizer, self, rank)
        self._is_splittable = is_splittable(type(optimizer))
        self._partition: _Partition | None = None
        # The names, for errors, of the parameters in the base when the buckets were planned.
        self._names_of: dict[int, str] = {}
        # Whether an overflow has skipped any part of the last update. As a tensor, its value may
        # not be known yet on a GPU.
        self.skipped: Tensor | int = False

    @property
    def splits(self) -> bool:
        """True if the next update goes bucket by bucket.

        Hooks of the base may change parameters after the update, and a replaced `step` may do
        anything: both need one update of everything before the launch.
        """
        base = self._optimizer
        if not self._is_splittable or step_hooks(base):
            return False
        own = vars(base).get("step")
        by_scheduler = getattr(own, "_wrapped_by_lr_sched", False)
        return own is None or (by_scheduler and own.__wrapped__ is type(base).step)

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return params_of(self._optimizer)

    def set_members(self, count: int) -> None:
        """Tell a base that depends on it how many ranks average parameters."""
        if isinstance(self._optimizer, AdamW):
            self._optimizer.set_members(count)

    def register(self, parameters: Iterable[Named]) -> None:
        """Register added parameters, so that they are not reported as replaced."""
        self._names_of |= {id(each.tensor): each.name for each in parameters}

    def check(self, rounds: Rounds) -> None:
        """Check the parameters for changes since their buckets were planned, and in flight.

        Args:
            rounds: the rounds, which have the buckets.

        Raises:
            RuntimeError: a parameter was replaced, moved, converted or changed, or has a sparse
                gradient.
        """
        # Each access of `grad` makes a call, and one of torch's constants takes longer.
        dense = torch.strided
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if (grad := param.grad) is not None and grad.layout is not dense:
                    raise sparse_gradient_error(self._optimizer, param, self._rank)
        known = self._partition_of(rounds.buckets)
        # Parameters of a group that was only removed are still gossiped, as frozen ones are.
        if known.gone and {*chain.from_iterable(known.ids)} - self._names_of.keys():
            raise replaced_error(self._names(known.gone), self._rank)
        if relocated := [*chain.from_iterable(map(Bucket.relocated, rounds.buckets))]:
            raise relocated_error(self._names(relocated), self._rank)
        if (round := rounds.in_flight) and (changed := round.changed_in_flight()):
            raise changed_error(self._names(changed), self._rank)

    def check_outside(self) -> None:
        """Check that no parameter outside of the buckets is about to be updated, after `check`.

        Raises:
            RuntimeError: such a parameter has a gradient.
        """
        if self._partition and self._partition.outside:
            refuse_outside(self._optimizer, self._partition.outside, self._rank)

    def _partition_of(self, buckets: Sequence[Bucket]) -> _Partition:
        """The parameters by bucket; made again only if buckets or parameters have changed."""
        # By group, since each has its own options.
        ids = [[*map(id, group["params"])] for group in self._optimizer.param_groups]
        known = self._partition
        if known is None or known.ids != ids or known.buckets is not buckets:
            known = self._partition = _Partition.of(self._optimizer.param_groups, ids, buckets)
        return known

    def _names(self, tensors: Sequence[Tensor]) -> str:
        return ", ".join(self._names_of[id(tensor)] for tensor in tensors)

    def whole(self, closure: Callable[[], float] | None, scaling: Scaling) -> float | None:
        """Step once.

        Args:
            closure: passed to the base, which evaluates it as often as it needs.
            scaling: the scaling of the gradients.

        Returns:
            The result of the base's step; None if an overflow skips it.
        """
        with self._scaled(scaling) as applies:
            if not applies:
                return None
            params = self.params
            with self._extensions.updating(params) if self._extensions.all else nullcontext():
                # Not a closure of None: some bases take none.
                args = () if closure is None else (closure,)
                with self._gate:
                    result: float | None = self._optimizer.step(*args)
            if any(group.get("fused") for group in self._optimizer.param_groups):
                # Fused kernels do not count the change, which other wrappers must notice.
                increment_version(params)
            # The closure may have given them gradients.
            self.check_outside()
            return result

    @contextmanager
    def by_bucket(
        self, scaling: Scaling, buckets: Sequence[Bucket], apply: Apply | None = None
    ) -> Iterator[Callable[[Bucket], None]]:
        """Step once, in parts: yields a function that updates one bucket.

        Parameters in no bucket are updated at the end. `apply` decides on each update; None makes
        all of them.
        """
        # Made by `check`, before anything was sent.
        known = self._partition
        if known is None or known.buckets is not buckets:
            known = self._partition_of(buckets)

        def update(bucket: Bucket | None) -> None:
            part = known.parts.get(id(bucket))
            if not applies or part is None:
                return
            if apply is None:
                self._step_part(part)
                return
            # Skipped, unless `apply` makes it.
            before, self.skipped = self.skipped, True

            def make() -> None:
                self.skipped = before
                self._step_part(part)

            apply([*chain.from_iterable(part)], make)

        with self._scaled(scaling) as applies:
            # A scheduler on the base recognises a step by this mark.
            self._optimizer._opt_called = True
            yield update
            # In a backward pass their gradients were not there when the step began.
            self.check_outside()
            if known.outside:
                update(None)

    def _step_part(self, part: list[list[Tensor]]) -> None:
        """Step with these parameters of each group only, and restore the groups."""
        found = getattr(self._optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            # A fused base sees the overflow on the GPU. Added, not compared: the GPU may not have
            # computed either yet. Without gradients it is a number.
            self.skipped = self.skipped + found
        params = [*chain.from_iterable(part)]
        with self._extensions.updating(params) if self._extensions.all else nullcontext():
            groups, whole, fused = self._optimizer.param_groups, [], False
            stepped: list[dict[str, Any]] = []
            for group, own in zip(groups, part, strict=True):
                whole.append(group["params"])
                group["params"] = own
                if own:
                    stepped.append(group)
                    fused |= bool(group.get("fused"))
            self._optimizer.param_groups = stepped
            try:
                # The class's step without torch's wrapper around it, which runs the hooks.
                type(self._optimizer).step.__wrapped__(self._optimizer)
            finally:
                self._optimizer.param_groups = groups
                for group, own in zip(groups, whole, strict=True):
                    group["params"] = own
        if fused:
            # A backward pass may not be over.
            increment_version(params)

    @property
    def scales_itself(self) -> bool:
        """True if the base takes scaled gradients; corrected gradients are never scaled."""
        scales = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))
        return scales and not self._extensions.corrects_gradients

    def _scaled(self, scaling: Scaling) -> AbstractContextManager[bool]:
        """Pass the scaling on to the base, or undo it; yields whether the update applies."""
        self.skipped = False
        found = scaling.found_inf
        return nullcontext(True) if found is None else self._with_scaler(found, scaling.grad_scale)

    @contextmanager
    def _with_scaler(self, found: Tensor | int, grad_scale: Tensor | None) -> Iterator[bool]:
        if self.scales_itself:
            # A fused kernel unscales and skips by itself, from these two attributes.
            self._optimizer.found_inf, self._optimizer.grad_scale = found, grad_scale
            self.skipped = found
            try:
                yield True
            finally:
                del self._optimizer.found_inf, self._optimizer.grad_scale
        elif float(found):
            logger.debug("gradients overflowed: this rank's local update is skipped")
            self.skipped = True
            yield False
        else:
            if grad_scale is not None:
                unscale_(self._optimizer, grad_scale)
            yield True


def step_hooks(optimizer: Optimizer) -> bool:
    """Return whether this optimizer has hooks before or after its steps."""
    # A base that skips Optimizer.__init__ has no hook tables.
    own = vars(optimizer)
    before = {*map(type, own.get("_optimizer_step_pre_hooks", {}).values())}
    return bool(before - {StepGate} or own.get("_optimizer_step_post_hooks"))


class StepGate:
    """A hook before the steps of a base, and of optimizers inside it, as SAM has one.

    It is shared by all wrappers of the base, and refuses nothing once they are gone. Nor does it
    refuse a step at learning rate 0, with which torch.distributed.checkpoint creates the state.

    Args:
        rank: this rank, for errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._users = WeakSet[Any]()
        self._is_open = False

    @classmethod
    def of(cls, optimizer: Optimizer, user: Any, rank: int) -> StepGate:
        """The gate of a base, which is in force as long as `user` exists."""
        values = (optimizer, *vars(optimizer).values())
        # A base that skips Optimizer.__init__ has no hook tables.
        hooked = [each for each in values if isinstance(each, Optimizer) and _HOOKS in vars(each)]
        found = (hook for each in hooked for hook in vars(each)[_HOOKS].values())
        gate = next((hook for hook in found if isinstance(hook, cls)), None)
        if gate is None:
            gate = cls(rank)
            for each in hooked:
                each.register_step_pre_hook(gate)
        gate._users.add(user)
        return gate

    def __enter__(self) -> None:
        """Step the wrapper."""
        self._is_open = True

    def __exit__(self, *error: object) -> None:
        self._is_open = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check a step.

        Raises:
            CallOrderError: it comes from somewhere else.
        """
        if self._is_open or not self._users:
            return
        if any(group.get("lr", 1) != 0 for group in optimizer.param_groups):
            raise CallOrderError(
                f"rank {self._rank}: expected steps through the wrapper, but step() of the "
                f"{type(optimizer).__name__} in it was called, which makes no round; call step() "
                f"of the wrapper. If the base steps in parts, as SAM with first_step() and "
                f"second_step(), pass a closure to step(). To step without gossip, drop the wrapper"
            )
