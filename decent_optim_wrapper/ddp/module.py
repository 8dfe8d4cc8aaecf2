"""Decentralised data-parallel training as a module: every backward pass is a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_optim_wrapper import checks
from decent_optim_wrapper.config import Overlap
from decent_optim_wrapper.ddp.autograd_hooks import AutogradHooks
from decent_optim_wrapper.ddp.backward_step import BackwardOptimizer, BackwardStepper
from decent_optim_wrapper.ddp.unscale_and_clip import UnscaleAndClip
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.optim.splittable import is_splittable
from decent_optim_wrapper.start.error_sharing import ErrorSharing
from decent_optim_wrapper.start.meeting import Meeting
from decent_optim_wrapper.start.tensors import ModuleExtras
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wrapper import DecentOptimWrapper

OptimFn = Callable[[list[tuple[str, Tensor]]], Optimizer]
LRSchedulerFn = Callable[[Optimizer], LRScheduler]


class DecentralizedDataParallel(Module):
    """Trains a module by gossip: the backward pass updates and launches bucket by bucket.

    Every backward pass is one step of `DecentOptimWrapper` with ``overlap="forward"``,
    ``x <- W_t (x - u(x))``. If the base's update is per parameter, the trajectory is the same: bit
    for bit in pairs in float32 and bfloat16, otherwise up to rounding, since buckets contain other
    parameters.
    As soon as all gradients of a bucket are complete, the bucket is updated and launched, and its
    gradients are freed, so there are never many more gradients in memory than one bucket has. The
    bucket is mixed right before the next forward pass reads it. Do not call `step()` or
    `zero_grad()`::

        model = DecentralizedDataParallel(model, optim_fn)
        for batch in loader:
            loss(model, batch).backward()

    A bucket with a missing gradient, for example of a frozen or unused parameter, is updated at the
    end of the backward pass. With ``retain_graph=True`` a second pass through the same graph needs
    values that the first one has changed, so torch raises an error. ``torch.autograd.grad`` makes
    no step.

    All ranks must make the same number of backward passes; a rank without a batch calls
    `idle_step()`. Move and convert the model before it is wrapped.

    Args:
        model: the module, which is trained in place; available as ``module``.
        optim_fn: function that makes the base optimizer from ``[(name, parameter), ...]``, the
            parameters of the model that require a gradient, in the model's order; called once. Pass
            parameters that are unfrozen later to ``optimizer.add_param_group``, on all ranks.
        lr_scheduler_fn: function that makes a scheduler from the base. The scheduler is stepped
            after every step. None for no scheduler.
        topology: a name known to `TopologyFactory`, or an instance; None as in
            `DecentOptimWrapper`.
        scaler: the GradScaler with which you scale the loss; never call its `step` or `update`.
            With updates inside the backward pass, an overflow skips the update of its bucket on
            this rank, and the scale is updated once per step. With updates at the end, it skips the
            update of the whole model on this rank.
        grad_clip_norm: upper bound of the norm of the gradients: of a *bucket* if the update is
            inside the backward pass, where the other gradients are not known yet; of the whole
            model with ``update_in_backward=False``. 0 does not clip.
        param_as_bucket_view: make the parameters views of the buckets, as in `DecentOptimWrapper`.
            None does so unless there is a mesh, whose shards cannot be views, or an RNN on a GPU,
            whose weights cuDNN keeps in a storage of their own. Pass False if another process reads
            the memory of the parameters, or a tensor that was taken from one before shares it.
        sync_buffer_in_global_avg: `global_avg` also averages the floating-point buffers, and frozen
            parameters that differ between ranks.
        bucket_size_in_mb: upper bound of a bucket in MiB; None as in `DecentOptimWrapper`.
        update_in_backward: False clips, updates and mixes at the end of the backward pass, with all
            gradients at once. If the base's update is not known to be per parameter, or the base
            has step hooks, None does the same and True raises an error.
        ignored_params: parameters and buffers that are personal to the rank, such as experts or
            heads of another shape: they are neither compared, started equal, mixed nor averaged,
            and `optim_fn` does not receive them. Train them with an optimizer of your own.
        overlap: when a round is mixed, as in `DecentOptimWrapper`. "forward" mixes a bucket right
            before the next forward pass reads it; True right before its next update, one step
            later: ``x <- W_t x - u(x)``; False at the end of the backward pass, which waits. None
            is "forward", unless the model is in TorchScript or an extension is collective.
        options: further arguments of `DecentOptimWrapper`, by name; its `bucket_cap_mb` comes
            before `bucket_size_in_mb`.

    Attributes:
        module: the model.
        optimizer: the `DecentOptimWrapper`, with `stats`, `consensus_distance`, `averaged`, ….
        lr_scheduler: the scheduler made by `lr_scheduler_fn`, or None.
        scaler: the scaler passed, or None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range or does not fit the base optimizer; see also
            `DecentOptimWrapper`.
    """

    optimizer: BackwardOptimizer

    def __init__(
        self,
        model: Module,
        optim_fn: OptimFn,
        lr_scheduler_fn: LRSchedulerFn | None = None,
        topology: str | Topology | None = None,
        scaler: GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool | None = None,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float | None = None,
        *,
        update_in_backward: bool | None = None,
        ignored_params: Iterable[Tensor] = (),
        overlap: Overlap | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sharing = ErrorSharing(checks.take_fields(Meeting, options))
        with sharing.propagating_errors():
            checks.check_options(options, DecentralizedDataParallel, DecentOptimWrapper)
            _check(model, optim_fn, scaler, grad_clip_norm, update_in_backward)
            if param_as_bucket_view is None:
                param_as_bucket_view = wants_views(model, options.get("mesh"))
            ignored = set(map(id, ignored_params))
            named = [pair for pair in model.named_parameters() if id(pair[1]) not in ignored]
            base = optim_fn([pair for pair in named if pair[1].requires_grad])
            checks.check_base(base)
            _check_ignored(ignored, model, base)
            scheduler = None if lr_scheduler_fn is None else lr_scheduler_fn(base)
        self.module = model
        self.scaler = scaler
        self.lr_scheduler = scheduler
        self.optimizer = wrapper = BackwardOptimizer(
            base,
            model=model,
            topology=topology,
            bucket_cap_mb=options.pop("bucket_cap_mb", bucket_size_in_mb),
            overlap=overlap,
            param_as_bucket_view=param_as_bucket_view,
            _extras=ModuleExtras(
                in_backward=True,
                steps_at_end=update_in_backward is False or not is_splittable(type(base)),
                ignored=ignored,
                stateful=tuple(part for part in (scheduler, scaler) if part is not None),
                averages_state=sync_buffer_in_global_avg,
            ),
            _sharing=sharing,
            **options,
        )
        in_parts = update_in_backward is not False
        if in_parts and not wrapper.splits:
            if update_in_backward:
                raise _not_in_parts(base)
            warn(f"rank {wrapper.rank}: {_not_in_parts(base)}")
        fused = base if wrapper.scales_itself else None
        unscale_and_clip = UnscaleAndClip(scaler, float(grad_clip_norm), fused)
        self._stepper = BackwardStepper(wrapper, unscale_and_clip, scheduler, in_parts)
        self._autograd_hooks = AutogradHooks(params_of(base), self._stepper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            RuntimeError: a backward pass failed in the middle of a step.
        """
        self._stepper.check()
        # Some may have been added to the optimizer or unfrozen.
        self._autograd_hooks.watch(params_of(self.optimizer))
        outputs = self.module(*args, **kwargs)
        self._autograd_hooks.follow(outputs)
        return outputs

    def idle_step(self) -> None:
        """Take part in a round without a local update; the scheduler steps.

        Call it on a rank whose data ends before the others' data.
        """
        self._autograd_hooks.notify(self._stepper.idle)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Accumulate gradients in backward passes without a step, or step again.

        Disable it before the backward pass of the last micro-batch. Accumulation needs memory for
        all gradients.

        Args:
            enable: whether to accumulate from now on.
        """
        self._stepper.accumulate(enable)

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Replace the parameters by their average over all ranks; collective.

        If no `revert_global_avg()` comes before the next backward pass, that pass keeps the average
        and drops the round in flight.

        Args:
            will_revert: keep a snapshot for `revert_global_avg()`.
            return_d2c: return this rank's distance to the average, ||x_i - mean(x)||_2.

        Returns:
            The distance, or None without `return_d2c`.
        """
        self._stepper.check()
        self.optimizer.global_avg(will_revert or return_d2c)
        if not return_d2c:
            return None
        distance = self.optimizer.distance_to_average()
        if not will_revert:
            self.optimizer.keep_average()
        return distance

    def revert_global_avg(self) -> None:
        """Restore the values before `global_avg()`, bit for bit.

        Raises:
            RuntimeError: there is no snapshot.
        """
        self.optimizer.revert_global_avg()

    def set_adaptive_factor(self, factor: float) -> None:
        """Set the optimizer's `mixing_rate`, the same on all ranks; named as in decent-dp."""
        self.optimizer.mixing_rate = factor

    def get_lr(self) -> float:
        """The current learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters and names; `parameters()` follows it."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's own buffers and names; `buffers()` follows it."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter by its name in `named_parameters()`, or by its path below this module."""
        with suppress(AttributeError):
            return super().get_parameter(target)
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """A buffer by its name in `named_buffers()`, or by its path below this module."""
        with suppress(AttributeError):
            return super().get_buffer(target)
        return self.module.get_buffer(target)

    def __getattr__(self, name: str) -> Any:
        """Explain where to find an attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(self.__dict__.get("_modules", {}).get("module"), name):
                raise _of_the_model(name) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # functional_call() would call the model with its own tensor instead, and nobody would know.
        if isinstance(value, Tensor):
            model = self.__dict__.get("_modules", {}).get("module")
            if isinstance(getattr(model, name, None), Tensor):
                raise _of_the_model(name)
        super().__setattr__(name, value)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return all that a resumed run needs to continue bit for bit.

        This includes the round in flight. Every rank must save its own state dict, between two
        steps. ``module.state_dict()`` is the state of the model only.

        Returns:
            The states of "model", "optimizer" (base and round), "scheduler" and "scaler"; None for
            those that do not exist.

        Raises:
            TypeError: called by a module that contains this one.
        """
        if args or kwargs:
            raise TypeError(
                f"rank {self.optimizer.rank}: a DecentralizedDataParallel contains the optimizer "
                f"and the round in addition to the model, and cannot be part of another module's "
                f"state; wrap the outermost module, or take module.state_dict()"
            )
        self._stepper.check()
        return {
            name: None if part is None else part.state_dict() for name, part in self._parts.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load the result of `state_dict()`; does not communicate.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            ValueError: the state dict does not have the same parts.
        """
        self._stepper.check()
        parts = {name: part for name, part in self._parts.items() if part is not None}
        saved = {name for name, state in (state_dict or {}).items() if state is not None}
        if saved != set(parts):
            raise ValueError(
                f"rank {self.optimizer.rank}: expected the states of {sorted(parts)}, as from "
                f"state_dict() of a DecentralizedDataParallel with the same arguments, got "
                f"{sorted(saved)}; a model alone goes into module.load_state_dict()"
            )
        for name, part in parts.items():
            part.load_state_dict(state_dict[name])

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "scaler": self.scaler,
        }


def _of_the_model(name: str) -> AttributeError:
    return AttributeError(
        f"a DecentralizedDataParallel has no attribute {name!r}, but its model has: use .module, "
        f"as in torch.func.functional_call(wrapped.module, ...)"
    )


def wants_views(model: Module, mesh: Any) -> bool:
    """Return whether the parameters may be views of buckets, as far as the model shows."""
    rnns = (module for module in model.modules() if isinstance(module, nn.RNNBase))
    return mesh is None and not any(param.is_cuda for rnn in rnns for param in rnn.parameters())


def _check(model: Any, optim_fn: Any, scaler: Any, clip_norm: Any, in_backward: Any) -> None:
    checks.instance_of("a torch.nn.Module", Module)("model", model)
    if isinstance(model, DecentralizedDataParallel):
        raise TypeError(f"model expects a module that is not wrapped yet, got a {type(model)}")
    text = "optim_fn expects a function that makes the optimizer, as partial(AdamW, lr=1e-3) does"
    checks.expect(callable(optim_fn), text, type(optim_fn))
    checks.instance_of("a torch.amp.GradScaler or None", GradScaler, NoneType)("scaler", scaler)
    checks.instance_of("True, False or None", bool, NoneType)("update_in_backward", in_backward)
    checks.expect(checks.is_real(clip_norm), "grad_clip_norm expects a number", clip_norm)
    if not clip_norm >= 0 or math.isinf(clip_norm):
        raise ValueError(f"grad_clip_norm must be 0 or more and finite, got {clip_norm}")


def _check_ignored(ignored: set[int], model: Module, base: Optimizer) -> None:
    if not ignored <= {*map(id, model.parameters()), *map(id, model.buffers())}:
        raise ValueError("ignored_params expects parameters and buffers of the model, got others")
    if not ignored.isdisjoint(map(id, params_of(base))):
        raise ValueError(
            "ignored_params expects parameters that optim_fn leaves out, but it gave some of them "
            "to the optimizer; build it from the parameters that optim_fn receives"
        )


def _not_in_parts(base: Optimizer) -> ValueError:
    return ValueError(
        f"an update inside the backward pass expects a base that can be updated bucket by bucket "
        f"and has no step hooks, got a {type(base)}; with update_in_backward=None or False it is "
        f"updated at the end"
    )
