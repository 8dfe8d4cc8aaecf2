"""Lightning's Trainer and Fabric train as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import framework_problem as task
import pytest
import torch
import torch.distributed as dist
from framework_problem import DELAYED, GOSSIP, RANKS, Plain, assert_same, values
from framework_ranks import Run, learns_the_digits, ranks_with
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.start.session import Setup

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs lightning"),
]
FRAMEWORK = "lightning.pytorch", "lightning.fabric", "torch._dynamo", "sklearn.datasets"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with(*FRAMEWORK) as run:
        yield run


def validate(plain: Plain) -> list[dict[str, Any]]:
    """The states of the model and the optimizer that Lightning saves."""
    return plain.validate(task.data()[plain.rank :: RANKS])[:2]


def batches(rank: int, epoch: int) -> list[Any]:
    sampler: Any = DistributedSampler(task.data(), RANKS, rank, shuffle=True)
    sampler.set_epoch(epoch)
    return [*DataLoader(task.data(), task.BATCH, sampler=sampler)]


def make_module(**attributes: Any) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.make_model()
            self.losses: list[float] = []

        def training_step(self, batch: Any) -> Tensor:
            return task.loss_of(self.model, batch)

        def validation_step(self, batch: Any) -> None:
            loss = task.loss_of(self.model, batch)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            base = task.make_base(self.model)
            return [base], [task.make_scheduler(base)]

        def train_dataloader(self) -> Any:
            return DataLoader(task.data(), task.BATCH, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(task.data(), len(task.data()))

    for name, value in attributes.items():
        setattr(Module, name, value)
    return Module()


def fit(module: Any, folder: Path, resume: str | None = None, **options: Any) -> Any:
    """Train the module with this strategy; returns the Trainer."""
    import lightning.pytorch as pl

    from decent_optim_wrapper.integrations.lightning import GossipStrategy

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": GossipStrategy(**options.pop("gossip", DELAYED)),
        "default_root_dir": folder,
        "gradient_clip_val": task.CLIP,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": "callbacks" in options,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    trainer = pl.Trainer(**{**defaults, **options})
    trainer.fit(module, ckpt_path=resume)
    return trainer


def assert_stored(path: str, saved: list[dict[str, Any]]) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(path, weights_only=False)
    assert_same(list(stored["state_dict"].values()), list(saved[0].values()))
    assert stored["optimizer_states"][0]["gossip"] == saved[1]["gossip"]
    return stored


def fit_and_resume(rank: int, folder: Path, precision: str) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    fp16 = precision == "fp16"

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        factor = task.overflow_at(rank, index) if fp16 else 1.0
        return factor * task.loss_of(self.model, batch)

    def start(**options: Any) -> tuple[Any, Any, Plain]:
        """A module that is fitted, the Trainer, and the same before it is trained."""
        if precision != "no":
            # On the CPU Lightning replaces float16 by bfloat16 unless it is given a plugin.
            scaler = task.make_scaler(precision) if fp16 else None
            options["plugins"] = [
                MixedPrecision("16-mixed" if fp16 else "bf16-mixed", "cpu", scaler)
            ]
        module = make_module(training_step=training_step)
        trainer = fit(module, folder, gossip=GOSSIP if fp16 else DELAYED, **options)
        return module, trainer, Plain(rank, precision, overlap=not fp16)

    best = ModelCheckpoint(folder / "best", monitor="loss", save_top_k=-1, save_last=True)
    often = ModelCheckpoint(folder / "often", filename="{step}", every_n_train_steps=3)
    module, trainer, plain = start(max_epochs=2, callbacks=[best, often])
    plain.train(batches(rank, 0))
    validate(plain)
    plain.scheduler.step()
    plain.train(batches(rank, 1)[:2])
    between = validate(plain)
    plain.losses.pop()
    plain.train(batches(rank, 1)[2:], first=2)
    saved = validate(plain)
    plain.optimizer.global_avg(may_revert=False)
    assert module.losses == plain.losses
    plain.check(module.model)
    assert_stored(often.best_model_path, between)
    stored = assert_stored(best.last_model_path, saved)
    if fp16:
        scale = task.SCALE / 4 if rank == 1 else task.SCALE
        assert trainer.scaler.get_scale() == plain.scaler.get_scale() == scale
        # Under the name that Lightning itself stores it.
        assert stored["MixedPrecision"]["scale"] == task.SCALE

    module, _, resumed = start(max_epochs=3, callbacks=[], resume=best.last_model_path)
    resumed.resume(saved)
    # The checkpoint is of the validation, and the scheduler's step follows it.
    resumed.base.param_groups[0]["lr"] *= 0.9
    resumed.train(batches(rank, 2))
    validate(resumed)
    resumed.optimizer.global_avg(may_revert=False)
    assert module.losses == resumed.losses
    resumed.check(module.model)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_the_trainer_trains_clips_validates_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path, precision: str
) -> None:
    """In float16 an overflow skips the update of one rank."""
    run(fit_and_resume, tmp_path, precision)


def fit_manually(rank: int, folder: Path) -> None:
    def training_step(self: Any, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(task.loss_of(self.model, batch))
                optimizer.step()

    def two_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        first, last = model[0].parameters(), model[-1].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(last, lr=0.01)]

    module = make_module(
        training_step=training_step,
        configure_optimizers=lambda self: two_optimizers(self.model),
        automatic_optimization=False,
    )
    fit(module, folder, max_epochs=1, gradient_clip_val=None)

    model = task.make_model()
    buffers = [model.buffers(), ()]
    optimizers = [
        DecentOptimWrapper(base, buffers=each, **DELAYED)
        for base, each in zip(two_optimizers(model), buffers, strict=True)
    ]
    for batch in batches(rank, 0):
        for optimizer in optimizers:
            model.zero_grad()
            task.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()
    with optimizers[0].averaged(), optimizers[1].averaged(), torch.no_grad():
        assert module.losses == [task.loss_of(model, task.data()[rank::RANKS]).item()]
    for optimizer in optimizers:
        optimizer.global_avg(may_revert=False)
    assert_same(values(module.model), values(model))
    pairs = [*zip(model.parameters(), task.make_model().parameters(), strict=True)]
    for trained, start in (pairs[0], pairs[-1]):
        assert not torch.equal(trained, start)


def test_several_optimizers_are_wrapped_in_manual_optimization(run: Run, tmp_path: Path) -> None:
    run(fit_manually, tmp_path)


def fit_with_swa(rank: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, StochasticWeightAveraging

    rows: list[Tensor] = []

    def record(trainer: Any, module: Any) -> None:
        rows.append(parameters_to_vector(module.parameters()).detach().clone())

    module = make_module()
    del module.model[1]  # It has buffers.
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    stopping = EarlyStopping("loss", patience=10)
    recording = LambdaCallback(on_train_epoch_start=record)
    fit(module, folder, max_epochs=4, callbacks=[recording, average, stopping])
    record(None, module)
    seen = torch.stack(rows[1:4])
    assert (seen[1:] - seen[:-1]).abs().amax(dim=1).min() > 1e-3
    mean = seen.mean(dim=0)
    dist.all_reduce(mean)
    torch.testing.assert_close(rows[4:], [mean / RANKS])


def test_averages_over_time_are_averaged_over_the_ranks(run: Run, tmp_path: Path) -> None:
    run(fit_with_swa, tmp_path)


def train_with_fabric(rank: int, folder: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from decent_optim_wrapper.integrations.lightning import GossipFabricStrategy

    def start(gossip: dict[str, Any]) -> tuple[Any, Any, Any]:
        plugin = MixedPrecision("16-mixed", "cpu", task.make_scaler("fp16"))
        strategy = GossipFabricStrategy(**gossip)
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, plugins=plugin)
        fabric.launch()
        model = task.make_model()
        return fabric, *fabric.setup(model, task.make_base(model))

    def train(fabric: Any, model: Any, optimizer: Any) -> None:
        loader = fabric.setup_dataloaders(DataLoader(task.data(), task.BATCH, shuffle=True))
        for index, batch in enumerate(loader):
            last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                factor = task.overflow_at(rank, index) / 2
                fabric.backward(factor * task.loss_of(model, batch))
            if last:
                fabric.clip_gradients(
                    model, optimizer, max_norm=task.CLIP, error_if_nonfinite=False
                )
                optimizer.step()
                optimizer.zero_grad()

    fabric, model, optimizer = start(DELAYED)
    plain = Plain(rank, "fp16")
    with warnings.catch_warnings(action="error", category=UserWarning):
        train(fabric, model, optimizer)
    plain.train(batches(rank, 0), accumulated=2)
    plain.check(model)
    assert fabric.strategy.precision.scaler.get_scale() == plain.scaler.get_scale()
    assert plain.scaler.get_scale() == (task.SCALE / 2 if rank == 1 else task.SCALE)
    with optimizer.averaged():
        fabric.save(folder / "saved.pt", {"model": model, "optimizer": optimizer})
    saved = validate(plain)
    more = nn.Linear(2, 2)
    with patch.object(Setup, "add", autospec=True, side_effect=Setup.add) as add:
        optimizer.add_param_group({"params": more.parameters()})
    assert len(optimizer.param_groups) == 2
    assert add.call_count == 1, "what Fabric returns looks like the wrapper, but holds it"

    fabric, model, optimizer = start(GOSSIP)
    fabric.load(folder / "saved.pt", {"model": model, "optimizer": optimizer})
    plain = Plain(rank, "fp16", overlap=False)
    plain.resume(saved)
    train(fabric, model, optimizer)
    plain.train(batches(rank, 0), accumulated=2)
    plain.check(model)


def test_fabric_trains_accumulates_clips_in_float16_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path
) -> None:
    run(train_with_fabric, tmp_path)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    assert learns_the_digits(run, "lightning_digits.py", tmp_path)
