"""Lightning's Trainer and Fabric train as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from framework_problem import (
    BATCH,
    CLIP,
    DELAYED,
    GOSSIP,
    SCALE,
    Plain,
    assert_same,
    assert_trained,
    data,
    flat,
    loss_of,
    make_base,
    make_model,
    make_scaler,
    make_scheduler,
    overflows,
    values,
)
from framework_ranks import RANKS, Run, learns_the_digits, ranks_with
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.start.session import Setup

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs lightning"),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with(
        "lightning.pytorch", "lightning.fabric", "torch._dynamo", "sklearn.datasets"
    ) as run:
        yield run


def train_plainly(plain: Plain, epoch: int, steps: int = 4) -> None:
    """The loop that the Trainer runs."""
    for step, batch in enumerate(islice(batches(plain.rank, epoch), steps)):
        plain.backward(batch, step)
        plain.step()


def validate(plain: Plain) -> list[dict[str, Any]]:
    """The states of the model and the optimizer that Lightning saves."""
    return plain.validate(data()[plain.rank :: RANKS])[:2]


def batches(rank: int, epoch: int) -> Any:
    sampler: Any = DistributedSampler(data(), RANKS, rank, shuffle=True)
    sampler.set_epoch(epoch)
    return DataLoader(data(), BATCH, sampler=sampler)


def make_module(**attributes: Any) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.losses: list[float] = []

        def training_step(self, batch: Any) -> Tensor:
            return loss_of(self.model, batch)

        def validation_step(self, batch: Any) -> None:
            loss = loss_of(self.model, batch)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            base = make_base(self.model)
            return [base], [make_scheduler(base)]

        def train_dataloader(self) -> Any:
            return DataLoader(data(), BATCH, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(data(), len(data()))

    for name, value in attributes.items():
        setattr(Module, name, value)
    return Module()


def make_trainer(folder: Path, **options: Any) -> Any:
    import lightning.pytorch as pl

    from decent_optim_wrapper.integrations.lightning import GossipStrategy

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": GossipStrategy(**DELAYED),
        "default_root_dir": folder,
        "gradient_clip_val": CLIP,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": "callbacks" in options,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **options})


def assert_stored(path: str, saved: list[dict[str, Any]]) -> None:
    stored = torch.load(path, weights_only=False)
    assert_same(list(stored["state_dict"].values()), list(saved[0].values()))
    assert stored["optimizer_states"][0]["gossip"] == saved[1]["gossip"]


def fit_and_resume(rank: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(folder / "best", monitor="loss", save_top_k=-1, save_last=True)
    often = ModelCheckpoint(folder / "often", filename="{step}", every_n_train_steps=3)
    module = make_module()
    make_trainer(folder, max_epochs=2, callbacks=[best, often]).fit(module)

    plain = Plain(rank)
    for epoch in range(2):
        train_plainly(plain, epoch)
        saved = validate(plain)
        plain.scheduler.step()
    plain.optimizer.global_avg(may_revert=False)
    assert module.losses == plain.losses
    assert_trained(module.model, plain.model)
    assert_stored(best.last_model_path, saved)
    between = Plain(rank)
    train_plainly(between, 0)
    between.scheduler.step()
    train_plainly(between, 1, steps=2)
    assert_stored(often.best_model_path, validate(between))

    module, resumed = make_module(), Plain(rank)
    make_trainer(folder, max_epochs=3, callbacks=[]).fit(module, ckpt_path=best.last_model_path)
    resumed.resume(saved)
    # The checkpoint is of the validation, and the scheduler's step follows it.
    resumed.base.param_groups[0]["lr"] *= 0.9
    train_plainly(resumed, 2)
    validate(resumed)
    resumed.optimizer.global_avg(may_revert=False)
    assert module.losses == resumed.losses
    assert_same(values(module.model), values(resumed.model))


def test_the_trainer_trains_validates_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path
) -> None:
    run(fit_and_resume, tmp_path)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_gradients_are_clipped_in_half_precision_and_an_overflow_skips_one_ranks_update(
    run: Run, tmp_path: Path, precision: str
) -> None:
    run(fit_in_half_precision, tmp_path, precision)


def fit_in_half_precision(rank: int, folder: Path, precision: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from decent_optim_wrapper.integrations.lightning import GossipStrategy

    fp16 = precision == "16-mixed"

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        factor = float("inf") if fp16 and overflows(rank, index) else 1.0
        return factor * loss_of(self.model, batch)

    module = make_module(training_step=training_step)
    scaler = make_scaler("fp16") if fp16 else None
    # On the CPU Lightning replaces float16 by bfloat16 unless it is given a plugin.
    plugin = MixedPrecision(precision, "cpu", scaler)
    options: dict[str, Any] = {"plugins": [plugin], "callbacks": []}
    if fp16:
        options["strategy"] = GossipStrategy(**GOSSIP)
    trainer = make_trainer(folder, max_epochs=1, **options)
    trainer.fit(module)

    plain = Plain(rank, "fp16" if fp16 else "bf16", overlap=not fp16)
    train_plainly(plain, 0)
    plain.optimizer.global_avg(may_revert=False)
    assert_trained(module.model, plain.model)
    if fp16:
        halved = SCALE / 2 if rank == 1 else SCALE
        assert trainer.scaler.get_scale() == plain.scaler.get_scale() == halved
    trainer.save_checkpoint(folder / "last.ckpt")
    stored = torch.load(folder / "last.ckpt", weights_only=False)
    # Under the name that Lightning itself stores it.
    assert not fp16 or stored["MixedPrecision"]["scale"] == SCALE


def fit_manually(rank: int, folder: Path) -> None:
    def training_step(self: Any, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.model, batch))
                optimizer.step()

    def configure_optimizers(self: Any) -> Any:
        return two_optimizers(self.model)

    def two_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        first, last = model[0].parameters(), model[-1].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(last, lr=0.01)]

    module = make_module(
        training_step=training_step,
        configure_optimizers=configure_optimizers,
        automatic_optimization=False,
    )
    make_trainer(folder, max_epochs=1, gradient_clip_val=None).fit(module)

    model = make_model()
    buffers = [model.buffers(), ()]
    optimizers = [
        DecentOptimWrapper(base, buffers=each, **DELAYED)
        for base, each in zip(two_optimizers(model), buffers, strict=True)
    ]
    for batch in batches(rank, 0):
        for optimizer in optimizers:
            model.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()
    with optimizers[0].averaged(), optimizers[1].averaged(), torch.no_grad():
        assert module.losses == [loss_of(model, data()[rank::RANKS]).item()]
    for optimizer in optimizers:
        optimizer.global_avg(may_revert=False)
    assert_same(values(module.model), values(model))
    trained, start = flat(model), flat(make_model())
    assert not torch.equal(trained[:32], start[:32])
    assert not torch.equal(trained[-9:], start[-9:])


def test_several_optimizers_are_wrapped_in_manual_optimization(run: Run, tmp_path: Path) -> None:
    run(fit_manually, tmp_path)


def fit_with_swa(rank: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging

    class Record(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.rows.append(flat(module))

        def __init__(self) -> None:
            self.rows: list[Tensor] = []

    record, module = Record(), make_module()
    module.model = nn.Sequential(*(each for each in module.model if len(list(each.buffers())) == 0))
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    stopping = EarlyStopping("loss", patience=10)
    make_trainer(folder, max_epochs=4, callbacks=[record, average, stopping]).fit(module)
    rows = torch.stack(record.rows[1:])
    assert len(rows) == 3
    assert (rows[1:] - rows[:-1]).abs().amax(dim=1).min() > 1e-3
    mean = rows.mean(dim=0)
    dist.all_reduce(mean)
    torch.testing.assert_close(flat(module), mean / RANKS)


def test_averages_over_time_are_averaged_over_the_ranks(run: Run, tmp_path: Path) -> None:
    run(fit_with_swa, tmp_path)


def train_with_fabric(rank: int, folder: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from decent_optim_wrapper.integrations.lightning import GossipFabricStrategy

    def start(gossip: dict[str, Any]) -> tuple[Any, Any, Any]:
        plugin = MixedPrecision("16-mixed", "cpu", make_scaler("fp16"))
        strategy = GossipFabricStrategy(**gossip)
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, plugins=plugin)
        fabric.launch()
        model = make_model()
        return fabric, *fabric.setup(model, make_base(model))

    def train(fabric: Any, model: Any, optimizer: Any) -> None:
        loader = fabric.setup_dataloaders(DataLoader(data(), BATCH, shuffle=True))
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            factor = float("inf") if overflows(rank, step) else 1.0
            for last, part in enumerate(inputs.chunk(2)):
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = nn.functional.mse_loss(model(part), targets.chunk(2)[last])
                    fabric.backward(factor * loss)
            fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()

    def train_parts(plain: Plain) -> None:
        for step, batch in enumerate(batches(rank, 0)):
            for part in zip(*(each.chunk(2) for each in batch), strict=True):
                plain.backward(part, step)
            plain.step()

    fabric, model, optimizer = start(DELAYED)
    plain = Plain(rank, "fp16")
    with warnings.catch_warnings(action="error", category=UserWarning):
        train(fabric, model, optimizer)
    train_parts(plain)
    assert_trained(model, plain.model)
    assert fabric.strategy.precision.scaler.get_scale() == plain.scaler.get_scale()
    assert plain.scaler.get_scale() == (SCALE / 2 if rank == 1 else SCALE)
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
    train_parts(plain)
    assert_same(values(model), values(plain.model))


def test_fabric_trains_accumulates_clips_in_float16_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path
) -> None:
    run(train_with_fabric, tmp_path)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    assert learns_the_digits(run, "lightning_digits.py", tmp_path)
