"""Unscales and clips gradients before an update, inside or after a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.wrapper import DecentOptimWrapper


class UnscaleAndClip:
    """Unscales and clips gradients, and steps whatever has `param_groups` and `step()`.

    Args:
        scaler: the GradScaler by whose scale the gradients are multiplied; None if there is none.
        clip_norm: bound of the norm of all gradients together; 0 does not clip.
        fused: the base, if it reads `found_inf` and skips an update by itself; None if it does not.
    """

    def __init__(
        self, scaler: GradScaler | None, clip_norm: float, fused: Optimizer | None = None
    ) -> None:
        self._scaler = scaler
        self._fused = fused
        self._clip_norm = clip_norm
        # Kept alive because GradScaler knows them by their id until its update().
        self._scaled: list[Any] = []

    def step(self, target: Any) -> None:
        """Unscale, clip, and step unless a gradient has overflowed."""
        params = [p for p in params_of(target) if p.grad is not None]
        scaler = self._scaler if params else None
        if scaler is not None:
            scaler.unscale_(target)
            self._scaled.append(target)
        if self._clip_norm and isinstance(target, DecentOptimWrapper):
            # By the norm of the whole replica, which may be spread over a mesh: collective, also
            # for a rank without gradients.
            target.clip_grad_norm_(self._clip_norm)
        elif self._clip_norm and params:
            nn.utils.clip_grad_norm_(params, self._clip_norm)
        if scaler is not None:
            scaler.step(target)
        else:
            target.step()

    def step_part(self, params: Sequence[Tensor], update: Callable[[], None]) -> None:
        """The same as `step`, with the gradients of these parameters only."""
        self.step(_Part(params, update, self._fused))

    def update_scale(self) -> None:
        """Update the scale by the overflows found since the last call."""
        if self._scaled and self._scaler is not None:
            self._scaler.update()
        self._scaled.clear()


class _Part:
    """Some parameters and their update, in the form of an optimizer for GradScaler.

    Args:
        params: the parameters.
        update: steps the base with these parameters only.
        fused: as in `UnscaleAndClip`; without, GradScaler reads on the host whether there was an
            overflow.
    """

    def __init__(
        self, params: Sequence[Tensor], update: Callable[[], None], fused: Optimizer | None
    ) -> None:
        self.param_groups = [{"params": list(params)}]
        self._update = update
        self._fused = fused
        self._step_supports_amp_scaling = fused is not None
        # Set by GradScaler.
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None

    def step(self) -> None:
        """Update, unless there was an overflow."""
        if self._fused is None or self.found_inf is None:
            self._update()
            return
        fused: Any = self._fused
        fused.found_inf, fused.grad_scale = self.found_inf, self.grad_scale
        try:
            self._update()
        finally:
            del fused.found_inf, fused.grad_scale
