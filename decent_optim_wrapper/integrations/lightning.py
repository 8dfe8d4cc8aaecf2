"""Lightning: strategies that gossip for its Trainer and for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import plugins as fabric_plugins
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import plugins
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.integrations.wrapping import Wrapping

__all__ = ["GossipFabricStrategy", "GossipStrategy"]


class GossipStrategy(DDPStrategy):
    """A strategy for `lightning.pytorch.Trainer` that gossips parameters instead of gradients.

    Every optimizer of the module is wrapped. Validation and checkpoints use the average over all
    ranks, and the average is kept at the end of `fit`. Samplers, metrics and launchers work as with
    ``DDPStrategy``.

    Args:
        ddp: arguments for ``DDPStrategy``, such as `process_group_backend` and `start_method`.
        **gossip: arguments for `DecentOptimWrapper`, such as `topology` and `schedule`.
    """

    def __init__(self, *, ddp: Mapping[str, Any] | None = None, **gossip: Any) -> None:
        super().__init__(**(ddp or {}))
        self._wrapping = Wrapping(gossip)
        self._validation = ExitStack()
        # Lightning calls callbacks before the strategy in both hooks. This one comes first, so that
        # others swap weights in when no bucket waits to be mixed, and get them back from the end,
        # and save after an error without the other ranks.
        self._around_swaps = LambdaCallback(
            on_validation_start=lambda *_: self._wrapping.mix_early(),
            on_validation_end=lambda *_: self._validation.close(),
            on_exception=lambda *_: self._leave(),
        )
        self._has_left = False

    def configure_ddp(self) -> None:
        """Leave the module without DDP."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Wrap the optimizers that the module has configured; collective."""
        super().setup_optimizers(trainer)
        if type(self.precision_plugin) is plugins.MixedPrecision:
            self.precision_plugin.__class__ = MixedPrecision
        self._wrapping.release()
        self._has_left = False
        self._wrapping.models = [trainer.lightning_module]
        self.optimizers = [self._wrapping.wrap(optimizer) for optimizer in self.optimizers]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self._around_swaps not in callbacks:
            callbacks.insert(0, self._around_swaps)

    def on_train_batch_start(self, *args: Any) -> None:
        """Gossip parameters that a callback has added or thawed since the last batch."""
        super().on_train_batch_start(*args)
        self._wrapping.gossip_added()

    def on_validation_start(self) -> None:
        """Put the average in place, of the weights that callbacks have swapped in; collective."""
        self._validation.enter_context(self._wrapping.averaged())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The averaged module, for a checkpoint; collective."""
        stays = all(wrapper.is_averaged for wrapper in self._wrapping.wrappers)
        with self._wrapping.averaged():
            state = super().lightning_module_state_dict()
            # The average ends before the file is written, except inside a validation.
            return state if stays else deepcopy(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's state beside an averaged module; collective."""
        with self._wrapping.averaged():
            return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint on rank 0; after an error, on each rank what it has."""
        if self._has_left and not self.is_global_zero:
            path = Path(filepath)
            path = path.with_stem(f"{path.stem}-rank_{self.global_rank}")
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other ranks, unless there was an error."""
        if not self._has_left:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object to all ranks; after an error each keeps its own."""
        return obj if self._has_left else super().broadcast(obj, src)

    def _leave(self) -> None:
        """Communicate no more after an error: the other ranks are somewhere else, or gone."""
        self._has_left = True
        self._validation.close()
        self._wrapping.release()

    def on_train_end(self) -> None:
        """Keep the average; collective."""
        # The wrappers stay: a fit within the fit, as of LearningRateFinder, ends here, too.
        self._wrapping.keep_average()

    def teardown(self) -> None:
        """Move the module to the CPU, and forget the wrappers."""
        self._wrapping.release()
        super().teardown()


class MixedPrecision(plugins.MixedPrecision):
    """Lightning's plugin, for an optimizer that GradScaler steps even after an overflow.

    Lightning assumes that such an optimizer unscales by itself, which is too late for clipping. The
    class has the same name as Lightning's, because checkpoints store the scaler under it.
    """

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, unscale, clip and step."""
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        # Without a loss Lightning makes no step, which it refuses if there are several ranks.
        if result is not None or not model.automatic_optimization:
            scaler.unscale_(optimizer)
        return super().optimizer_step(optimizer, model=model, closure=lambda: result, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients, which are unscaled by now."""
        Precision.clip_gradients(self, *args, **kwargs)


class GossipFabricStrategy(FabricDDPStrategy):
    """A strategy for `lightning.fabric.Fabric` that gossips parameters instead of gradients.

    ``fabric.setup`` wraps the optimizers and leaves the module without DDP. The optimizers that it
    returns have the methods of the wrapper: evaluate and save inside ``optimizer.averaged()``.

    Args:
        ddp: arguments for Fabric's ``DDPStrategy``, such as `process_group_backend`.
        **gossip: arguments for `DecentOptimWrapper`, such as `topology` and `schedule`.
    """

    def __init__(self, *, ddp: Mapping[str, Any] | None = None, **gossip: Any) -> None:
        super().__init__(**(ddp or {}))
        self._wrapping = Wrapping(gossip)
        # A backward pass does not communicate: nothing is left out while gradients are accumulated.
        self._backward_sync_control: Any = SimpleNamespace(
            no_backward_sync=lambda module, enabled: nullcontext()
        )

    def setup_module(self, module: nn.Module) -> Any:
        """Leave the module without DDP."""
        self._wrapping.models.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Wrap an optimizer of a module that is set up; collective."""
        if type(self.precision) is fabric_plugins.MixedPrecision:
            self.precision.__class__ = FabricMixedPrecision
        return self._wrapping.wrap(optimizer)


class FabricMixedPrecision(fabric_plugins.MixedPrecision):
    """Fabric's plugin, for an optimizer that GradScaler steps even after an overflow."""

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
