"""A step made by a backward pass: bucket by bucket inside it, or at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from decent_optim_wrapper.ddp.unscale_and_clip import UnscaleAndClip
from decent_optim_wrapper.gossip.local_update import Apply, Scaling, step_hooks
from decent_optim_wrapper.start.owners import has_newer
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.parameters import named_parameters, sparse_gradient_error
from decent_optim_wrapper.wrapper import DecentOptimWrapper


class BackwardOptimizer(DecentOptimWrapper):
    """A wrapper whose buckets are filled in the order in which a backward pass completes them.

    The order of the groups would not do: a group of all biases would be complete only at the end.
    """

    @property
    def splits(self) -> bool:
        """True if a step can be made in parts now: no hook waits for a call of `step()`."""
        on_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return self._local_update.splits and not step_hooks(self) and not on_all

    @property
    def mixes_replaced(self) -> bool:
        """True if buckets were replaced since the launch of the round in flight.

        They are mixed all at once, as soon as a step begins that mixes the round.
        """
        round = self._rounds.in_flight
        return round is not None and not round.unmixed.keys() <= {*self.buckets}

    @property
    def scales_itself(self) -> bool:
        """True if the base takes scaled gradients, and skips an overflow by itself."""
        return self._local_update.scales_itself

    @property
    def takeovers(self) -> int:
        """How often this rank has received its state from others."""
        return 0 if (members := self._builder.sharing.membership) is None else members.takeovers

    def in_parts(self, apply: Apply) -> AbstractContextManager[Callable[[Bucket], None]]:
        """A step in parts: yields a function that mixes, updates and launches one bucket."""
        # A scheduler on this optimizer recognises a step by this mark.
        self._opt_called = True
        return self._in_parts(Scaling(None, None), apply, in_backward=True)

    def check_newest(self) -> None:
        """Check that no newer wrapper trains the parameters.

        Raises:
            RuntimeError: one does, and this backward pass would make a step here, too.
        """
        if has_newer(self._coordinator):
            raise RuntimeError(
                f"rank {self.rank}: expected backward passes of the newest wrapper of these "
                f"parameters only, but an older DecentralizedDataParallel still exists, of which "
                f"every backward pass is a step; drop it (del) before this backward pass"
            )

    def end_step(self) -> None:
        """Call the user's functions, after the update of scaler and scheduler."""
        super()._notify(self._after_step)

    def distance_to_average(self) -> float:
        """||x_i - mean(x)||_2, the distance of this rank's own parameters to the average."""
        return self._coordinator.average.distance()

    def keep_average(self) -> None:
        """Accept the average in place as the ranks' own parameters; collective."""
        self._coordinator.keep_average()

    def _notify(self, calls: Iterable[Callable[[], object]] = ()) -> None:
        """Do nothing yet: an error of the user's functions must not break the backward pass."""


class _StepInParts:
    """Mixes, updates and launches each bucket once all its gradients are there, and frees them.

    A bucket with a missing gradient is left to the end: the rest of the backward pass may still
    read a parameter that is frozen or unused now.
    """

    def __init__(self, optimizer: BackwardOptimizer, unscale_and_clip: UnscaleAndClip) -> None:
        self._optimizer = optimizer
        self._bucket_of = {id(m): bucket for bucket in optimizer.buckets for m in bucket.members}
        self._missing = {bucket: set(map(id, bucket.members)) for bucket in optimizer.buckets}
        self._unscale_and_clip = unscale_and_clip
        self._open = ExitStack()
        self._advance: Callable[[Bucket], None] | None = None
        self._takeovers = optimizer.takeovers
        # Then the step begins at the end: the backward pass still reads what it would mix.
        self._waits = optimizer.mixes_replaced

    def take(self, param: Tensor) -> None:
        """Use a complete gradient of the parameter."""
        if param.grad is not None and param.grad.layout != torch.strided:
            raise sparse_gradient_error(self._optimizer, param, self._optimizer.rank)
        if (bucket := self._bucket_of.get(id(param))) is None:
            return
        if (missing := self._missing.get(bucket)) is None:
            raise self._late(param)
        missing.discard(id(param))
        if not (missing or self._waits):
            self._finish(bucket)

    def close(self) -> None:
        """Finish the step: no further gradient comes."""
        for bucket in list(self._missing):
            self._finish(bucket)
        self._open.close()

    def abandon(self) -> bool:
        """Stop the step; return whether it has changed anything."""
        if self._advance is None:
            return False
        error = RuntimeError("the backward pass has failed")
        self._open.__exit__(RuntimeError, error, None)
        return True

    def _finish(self, bucket: Bucket) -> None:
        del self._missing[bucket]
        if self._advance is None:
            # Not earlier: the wire would be idle from the wait until the first bucket is complete.
            step = self._optimizer.in_parts(self._unscale_and_clip.step_part)
            self._advance = self._open.enter_context(step)
        if self._takeovers != self._optimizer.takeovers:
            # The parameters were replaced after these gradients were computed.
            _free(bucket)
        self._advance(bucket)
        _free(bucket)

    def _late(self, param: Tensor) -> RuntimeError:
        named = named_parameters(self._optimizer.param_groups)
        name = next(each.name for each in named if each.tensor is param)
        return RuntimeError(
            f"rank {self._optimizer.rank}: expected one gradient of {name} in a backward pass, but "
            f"another one came after its bucket was mixed and updated, as with reentrant "
            f"checkpoints; pass use_reentrant=False to them, or update_in_backward=False"
        )


@dataclass(eq=False)
class BackwardStepper:
    """Makes one step in every backward pass.

    Args:
        optimizer: the optimizer that steps.
        unscale_and_clip: unscales and clips its gradients.
        scheduler: stepped after every step; None if there is none.
        in_parts: step inside the backward pass whenever the result is the same.
    """

    optimizer: BackwardOptimizer
    unscale_and_clip: UnscaleAndClip
    scheduler: LRScheduler | None
    in_parts: bool

    def __post_init__(self) -> None:
        self._accumulates = False
        # Whether a step has begun, and its parts; without parts it is made at the end.
        self._begun = False
        self._parts: _StepInParts | None = None
        self._torn = False

    def check(self) -> None:
        """Check that no step was left half done.

        Raises:
            RuntimeError: a backward pass ended in the middle of a step.
        """
        if self._torn:
            raise RuntimeError(
                f"rank {self.optimizer.rank}: the last backward pass ended in the middle of a "
                f"step, with some buckets mixed and updated and others not; look for the first "
                f"error, and restart all ranks from a checkpoint"
            )

    def accumulate(self, enable: bool) -> None:
        """Collect gradients without a step, until this is disabled."""
        self._accumulates = enable

    def on_gradient(self, param: Tensor) -> None:
        """Continue the step with this gradient."""
        if self._accumulates:
            return
        self.check()
        self._begin()
        if self._parts is not None:
            self._parts.take(param)

    def idle(self) -> None:
        """Make a step without any gradient; those that were collected are dropped."""
        self.check()
        self.optimizer.zero_grad()
        self._begin()
        self.on_end()

    def on_end(self) -> None:
        """Finish the step; a backward pass without any gradient of a parameter makes none."""
        if not self._begun:
            return
        # FSDP does so only in a backward pass, only with the modules that have gradients, and not
        # after set_reshard_after_backward(False).
        self.optimizer.replica.reshard()
        if self._parts is not None:
            self._parts.close()
        else:
            self.unscale_and_clip.step(self.optimizer)
        self._clear()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.end_step()

    def on_failure(self) -> None:
        """Abandon the step in progress."""
        if self._begun:
            self._torn = self._parts is not None and self._parts.abandon()
            # A later pass may continue unless the step is torn.
            self._clear()

    def _begin(self) -> None:
        """Begin a step, unless one has begun in this backward pass."""
        if not self._begun:
            self.optimizer.check_newest()
        if not self._begun and self.in_parts and self.optimizer.splits:
            self._parts = _StepInParts(self.optimizer, self.unscale_and_clip)
        self._begun = True

    def _clear(self) -> None:
        """Make everything ready for the next step: scaler and gradients, too."""
        self._begun, self._parts = False, None
        self.unscale_and_clip.update_scale()
        self.optimizer.zero_grad()


def _free(bucket: Bucket) -> None:
    for member in bucket.members:
        member.grad = None
