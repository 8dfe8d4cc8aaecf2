"""Hugging Face Transformers: a mixin that lets a Trainer gossip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loguru import logger

from decent_optim_wrapper.integrations.stats import gossip_stats
from decent_optim_wrapper.integrations.versions import require

require("transformers", (5, 23), "transformers")

from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

__all__ = ["GossipMixin"]


class GossipMixin(_Trainer):
    """Lets a Trainer gossip parameters: ``class MyTrainer(GossipMixin, Trainer)``.

    The model goes without DDP and the Trainer's optimizer is wrapped, with its groups and its
    schedule. Evaluation and checkpoints use the average of all ranks, which is kept at the end
    unless the best model is loaded. Logs of the loss also have `gossip_stats`.

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

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator prepare for gossip."""
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
        """Add what gossip costs to the losses, which all ranks log together."""
        if "loss" in logs and "learning_rate" in logs:
            for wrapper in self._wrapping.wrappers:
                logs.update(gossip_stats(wrapper))
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._wrapping.averaged():
            super()._save_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # Before the best model is loaded, which is the same on all ranks.
        self._wrapping.keep_average()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
