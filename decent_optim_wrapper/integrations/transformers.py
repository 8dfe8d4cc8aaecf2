"""Hugging Face Transformers: a mixin for a Trainer that gossips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip
from decent_optim_wrapper.integrations.stats import gossip_stats
from decent_optim_wrapper.optim.gradients import params_of

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
    from transformers import TrainerCallback as _Callback
else:
    from transformers.trainer_callback import TrainerCallback as _Callback

    _Trainer = object

__all__ = ["GossipMixin"]

# The folder in a checkpoint of the Trainer with each rank's own state.
_RANKS = "ranks"


class GossipMixin(_Trainer):
    """Makes a Trainer gossip parameters: ``class MyTrainer(GossipMixin, Trainer)``.

    The model is not wrapped in DDP, and the Trainer's optimizer is wrapped, with its groups and its
    schedule. Evaluation and checkpoints use the average over all ranks, which is kept at the end
    unless the best model is loaded. A checkpoint also has each rank's own state, in its folder
    ``ranks``, from which as many ranks go on. Logs of the loss also contain `gossip_stats`.

    ``average_tokens_across_devices`` is turned off: it is an all-reduce in every step, for
    gradients that are summed over the ranks.

    Args:
        *args: for the Trainer.
        gossip: arguments for `DecentOptimWrapper`, such as `topology` and `schedule`.
        **kwargs: for the Trainer.
    """

    def __init__(self, *args: Any, gossip: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._gossip = dict(gossip or {})
        super().__init__(*args, **kwargs)
        # Every trial of a search has another accelerator.
        self.callback_handler.callbacks.insert(
            0, _KeepAverage(lambda: self._wrapping.keep_average())
        )

    def create_accelerator_and_postprocess(self) -> None:
        """Set the accelerator up for gossip."""
        super().create_accelerator_and_postprocess()
        self._wrapping = prepare_for_gossip(self.accelerator, **self._gossip)
        if self.args.average_tokens_across_devices:
            logger.info("average_tokens_across_devices is turned off: gradients are not summed")
            self.args.average_tokens_across_devices = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the average; collective."""
        with self._wrapping.averaged():
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add `gossip_stats` to the losses, which all ranks log together."""
        if "loss" in logs and "learning_rate" in logs:
            for wrapper in self._wrapping.wrappers:
                logs.update(gossip_stats(wrapper))
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._wrapping.averaged():
            super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            # The Trainer saves the average, and the moments of rank 0.
            step, (wrapper,) = self.state.global_step, self._wrapping.wrappers
            state = {"tensors": self._own_tensors(), "optimizer": wrapper.state_dict()}
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{step}"
            Checkpoints(folder / _RANKS, wrapper).save(step, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            (wrapper,) = self._wrapping.wrappers
            saved = Checkpoints(Path(checkpoint) / _RANKS, wrapper).load("cpu", same_world=True)
            if saved is not None:
                for own, value in zip(self._own_tensors(), saved.state["tensors"], strict=True):
                    own.copy_(value)
                wrapper.load_state_dict(saved.state["optimizer"])

    def _own_tensors(self) -> list[Tensor]:
        """What may differ between ranks: what the optimizer trains, and the buffers."""
        params = [each.detach() for each in params_of(self._wrapping.wrappers[0])]
        return [*params, *(each for model in self._wrapping.models for each in model.buffers())]

    def _load_best_model(self) -> None:
        # The round in flight must not be mixed into the best model, the same on all ranks.
        self._wrapping.keep_average()
        super()._load_best_model()


class _KeepAverage(_Callback):
    """Keeps the average at the end of the training, before other callbacks take the model.

    Args:
        keep_average: replaces the parameters by their average; collective.
    """

    def __init__(self, keep_average: Callable[[], None]) -> None:
        self._keep_average = keep_average

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average, unless the best model has been loaded."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
            self._keep_average()
