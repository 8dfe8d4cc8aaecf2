"""Lightning, Fabric, Accelerate and Hugging Face's Trainer train as a loop in plain torch."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import framework_problem as task
import pytest
import torch
import torch.distributed as dist
from framework_problem import DELAYED, GOSSIP, RANKS, Plain, assert_same, values
from framework_ranks import EXAMPLES, Run, ranks_with, run_example
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from decent_optim_wrapper import DecentOptimWrapper, PeerError
from decent_optim_wrapper.start.build import Builder

pytestmark = pytest.mark.slow
LIGHTNING, ACCELERATE, TRANSFORMERS = (
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")
    for name in ("lightning", "accelerate", "transformers")
)
IMPORTED = (
    *("lightning.pytorch", "lightning.fabric", "accelerate", "transformers.trainer"),
    *("torch._dynamo", "sklearn.datasets", "torchdata.stateful_dataloader"),
)
ACCUMULATED = 2


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with(*(name for name in IMPORTED if find_spec(name.partition(".")[0]))) as run:
        yield run


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("lightning_digits.py", marks=LIGHTNING),
        pytest.param("accelerate_digits.py", marks=ACCELERATE),
        pytest.param("trainer_digits.py", marks=TRANSFORMERS),
    ],
)
def test_an_example_learns_the_digits(run: Run, tmp_path: Path, script: str) -> None:
    printed, _ = run(run_example, EXAMPLES / script, tmp_path, "--epochs", "3")
    (accuracy,) = re.findall(r"^test accuracy (.*)%$", printed, re.MULTILINE)
    assert float(accuracy) > 90
    if script == "accelerate_digits.py":
        average, last = (tmp_path / "runs" / name for name in ("accelerate", "accelerate_model"))
        assert_same(load_file(average / "model.safetensors"), load_file(last / "model.safetensors"))


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
    loaders = DataLoader(data := task.data(), task.BATCH, shuffle=True), DataLoader(data, len(data))
    trainer.fit(module, *loaders, ckpt_path=resume)
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
        # On the CPU Lightning replaces float16 by bfloat16 unless it is given a plugin.
        scaler = task.make_scaler(precision) if fp16 else None
        plugin = MixedPrecision("16-mixed" if fp16 else "bf16-mixed", "cpu", scaler)
        options["plugins"] = [plugin]
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
    fit(module, folder, max_epochs=1, gradient_clip_val=None, gossip=GOSSIP)

    model = task.make_model()
    buffers = [model.buffers(), ()]
    optimizers = [
        DecentOptimWrapper(base, buffers=each, overlap=False, **GOSSIP)
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


def save_after_an_error(rank: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        if (rank, index) == (1, 2):
            raise ValueError("a bad image")
        return task.loss_of(self.model, batch)

    module = make_module(training_step=training_step)
    saving = ModelCheckpoint(folder / "model", filename="last", save_on_exception=True)
    callbacks = [OnExceptionCheckpoint(folder), saving]
    error = ValueError if rank else PeerError
    with pytest.raises(error, match="a bad image"):
        fit(module, folder, max_epochs=1, gossip=GOSSIP, callbacks=callbacks)
    if rank:
        # Lightning's own broadcast before a batch waits for this rank. It would fail, which
        # Lightning ignores, if the process ended here.
        dist.broadcast(torch.tensor([0]), src=0, async_op=True)
    name = "-rank_1.ckpt" if rank else ".ckpt"
    for path in (folder / f"on_exception{name}", folder / "model" / f"last{name}"):
        stored = torch.load(path, weights_only=False)
        assert_same(list(stored["state_dict"].values()), values(module))
        assert stored["optimizer_states"][0]["gossip"]["round"] > 0
    assert not torch.equal(vector_of(module), vector_of(make_module()))


def vector_of(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


def fit_after_a_failed_validation(rank: int, folder: Path) -> None:
    """The values of before the error must not come back after a later validation."""
    from lightning.pytorch.callbacks import LambdaCallback

    fails, before, after, trainers = [True], list[Tensor](), list[Tensor](), list[Any]()

    def validation_step(self: Any, batch: Any) -> None:
        if fails[0]:
            raise ValueError("a bad image")

    def note_start(trainer: Any, module: Any) -> None:
        trainers.append(trainer)
        before.append(vector_of(module))

    def note_end(trainer: Any, module: Any) -> None:
        after.append(vector_of(module))

    module = make_module(validation_step=validation_step)
    callback = LambdaCallback(on_validation_start=note_start, on_train_epoch_end=note_end)
    with pytest.raises(ValueError, match="a bad image"):
        fit(module, folder, max_epochs=2, gossip=GOSSIP, callbacks=[callback])
    assert torch.equal(vector_of(module), before[0])
    fails[0] = False
    data = task.data()
    loaders = DataLoader(data, task.BATCH, shuffle=True), DataLoader(data, len(data))
    trainers[0].fit(module, *loaders)
    assert_same(before[1:], after)
    assert len(after) == 2
    assert not torch.equal(after[0], before[0])


def fit_with_swa(rank: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, StochasticWeightAveraging

    rows: list[Tensor] = []

    def record(trainer: Any, module: Any) -> None:
        rows.append(vector_of(module))

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


def fit_with_swapped_weights(rank: int, folder: Path) -> None:
    """Validates with an average over time of each rank's weights, as many EMA callbacks do."""
    from lightning.pytorch.callbacks import LambdaCallback

    def train(swaps: bool) -> list[list[Tensor]]:
        """The weights of each epoch and of its validation, and the average over time then."""
        trained, validated, averages = list[Tensor](), list[Tensor](), list[Tensor]()
        module = make_module()
        params = [*module.parameters()]
        ema = [param.detach().clone() for param in params]

        def note(*_: Any) -> None:
            module.state_dict()  # This mixes the round in flight, which a forward pass would mix.
            trained.append(vector_of(module))

        def swap(*_: Any) -> None:
            own = [param.detach().clone() for param in params]
            with torch.no_grad():
                torch._foreach_copy_(params, ema)
            torch._foreach_copy_(ema, own)

        def begin(*_: Any) -> None:
            averages.append(parameters_to_vector(ema))
            swap()

        callbacks = [LambdaCallback(on_train_epoch_start=note)]
        if swaps:
            callbacks += [
                LambdaCallback(
                    on_train_batch_end=lambda *_: torch._foreach_lerp_(ema, params, 0.5),
                    on_validation_start=begin,
                    on_validation_epoch_start=lambda *_: validated.append(vector_of(module)),
                    on_validation_end=swap,
                )
            ]
        fit(module, folder, max_epochs=3, gossip=GOSSIP, callbacks=callbacks)
        return [trained, validated, averages]

    trained, validated, averages = train(swaps=True)
    assert_same(trained, train(swaps=False)[0])
    assert len({row.sum().item() for row in trained}) == 3
    means = torch.stack(averages)
    dist.all_reduce(means)
    torch.testing.assert_close(torch.stack(validated), means / RANKS)


def fit_with_a_rate_finder(rank: int, folder: Path) -> None:
    """A fit that ends within the fit leaves the wrappers where they are."""
    from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder

    rows: list[Tensor] = []
    module = make_module()
    finder = LearningRateFinder(
        num_training_steps=3, early_stop_threshold=None, update_attr=False, max_lr=0.05
    )
    recording = LambdaCallback(on_validation_batch_start=lambda *_: rows.append(vector_of(module)))
    fit(module, folder, max_epochs=2, callbacks=[finder, recording])
    for row in (*rows, vector_of(module)):
        mean = row.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(row, mean / RANKS)
    assert len(rows) == 2
    assert not torch.equal(*rows)


def finetune(rank: int, folder: Path, adds: bool) -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint

    def start(epochs: int, *callbacks: Any, resume: str | None = None) -> Any:
        module = make_module(
            configure_optimizers=lambda self: torch.optim.SGD(
                [p for p in self.model.parameters() if p.requires_grad or not adds], lr=0.1
            )
        )
        module.backbone = module.model[0]
        thawing = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.05)
        callbacks = (thawing, *callbacks)
        fit(module, folder, resume, max_epochs=epochs, gossip=task.GOSSIP, callbacks=[*callbacks])
        return module

    saving = ModelCheckpoint(folder, save_last=True)
    start(1, saving)
    for module in (start(3), start(3, resume=saving.last_model_path)):
        own = vector_of(module)
        mean = own.clone()
        dist.all_reduce(mean)
        assert_same(own, mean / RANKS)
        assert not torch.equal(module.backbone.weight, task.make_model()[0].get_parameter("weight"))


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
    with patch.object(Builder, "add", autospec=True, side_effect=Builder.add) as add:
        optimizer.add_param_group({"params": more.parameters()})
    assert len(optimizer.param_groups) == 2
    assert add.call_count == 1, "what Fabric returns looks like the wrapper, but contains it"

    fabric, model, optimizer = start(GOSSIP)
    fabric.load(folder / "saved.pt", {"model": model, "optimizer": optimizer})
    plain = Plain(rank, "fp16", overlap=False)
    plain.resume(saved)
    train(fabric, model, optimizer)
    plain.train(batches(rank, 0), accumulated=2)
    plain.check(model)
    # Join finds the wrapper behind what Fabric returns.
    with Join([optimizer]):
        for _ in range(1 + rank):
            fabric.backward(task.loss_of(model, task.data()[:]))
            optimizer.step()
    assert optimizer.round == plain.optimizer.round + RANKS


class Accelerated:
    """A loop of Accelerate's in float16, with accumulation and clipping."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

        self.accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", gradient_accumulation_steps=ACCUMULATED
        )
        # Accelerate has float16 on a GPU only.
        self.accelerator.native_amp = True
        self.accelerator.scaler = task.make_scaler("fp16")
        self.gossip = prepare_for_gossip(self.accelerator, **GOSSIP)
        model = task.make_model()
        base = task.make_base(model)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            *(model, base, task.make_scheduler(base), DataLoader(task.data(), task.BATCH))
        )
        assert not isinstance(self.model, DistributedDataParallel)
        assert self.model.training
        self.skipped: list[bool] = []

    def train(self, rank: int) -> None:
        for index, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                factor = task.overflow_at(rank, index)
                self.accelerator.backward(factor * task.loss_of(self.model, batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), task.CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)


def train_as_accelerate(plain: Plain) -> None:
    # As many steps of the schedule as under DDP, where it counts the batches of all ranks.
    plain.train(task.batches_of(plain.rank), ACCUMULATED, scheduled=RANKS)


def accelerate_and_resume(rank: int, folder: Path) -> None:
    ours, plain = Accelerated(), Plain(rank, "fp16", overlap=False)
    for _ in range(2):
        ours.train(rank)
        train_as_accelerate(plain)
    plain.check(ours.model)
    # The overflow is in the second of two accumulated batches.
    assert ours.skipped == [rank == 1, False, rank == 1, False]
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()

    ours.accelerator.save_state(folder)
    own = values(ours.model)
    plain.check(ours.model)
    saved = plain.validate(task.data()[:])
    with ours.optimizer.averaged(), plain.optimizer.averaged():
        plain.check(ours.model)

    again, resumed = Accelerated(), Plain(rank, "fp16", overlap=False)
    again.accelerator.load_state(folder)
    resumed.resume(saved)
    # A pair that mixes before the forward pass has its average already.
    assert torch.equal(values(resumed.model)[0], own[0])
    # Every rank writes its own to the same file.
    resumed.scaler.load_state_dict(again.accelerator.scaler.state_dict())
    again.train(rank)
    train_as_accelerate(resumed)
    resumed.check(again.model)


def accelerate_two_schedules(rank: int, folder: Path) -> None:
    """An overflow of one optimizer leaves the rate of the other one alone."""
    from accelerate import Accelerator

    from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp, accelerator.scaler = True, task.make_scaler("fp16")
    prepare_for_gossip(accelerator, **GOSSIP)
    models = [task.make_model(), task.make_model()]
    bases = [*map(task.make_base, models)]
    models = [*accelerator.prepare(*models)]
    optimizers = accelerator.prepare(*bases)
    schedulers = accelerator.prepare(*map(task.make_scheduler, bases))
    steps = 0
    for index, batch in enumerate(DataLoader(task.data(), task.BATCH)):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            factor = math.inf if (place, index) == (0, 1) else 1.0
            accelerator.backward(factor * task.loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        steps += 1
    # Accelerate steps a schedule once for the batch of each rank.
    rates = [scheduler.get_last_lr()[0] for scheduler in schedulers]
    assert rates == pytest.approx([0.1 * 0.9 ** (RANKS * made) for made in (steps - 1, steps)])


def accelerate_uneven_data(rank: int, folder: Path) -> None:
    from accelerate import Accelerator

    from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

    accelerator = Accelerator(cpu=True)
    gossip = prepare_for_gossip(accelerator, **{**GOSSIP, "timeout": 30.0})
    model = task.make_model()
    model, optimizer = accelerator.prepare(model, task.make_base(model))
    with Join([optimizer]):
        for _ in range(2 + 3 * rank):
            accelerator.backward(task.loss_of(model, task.data()[:]))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.round == 2 + 3 * (RANKS - 1)
    gossip.keep_average()
    mean = vector_of(model)
    dist.all_reduce(mean)
    torch.testing.assert_close(vector_of(model), mean / RANKS)


def prepare_late(rank: int, folder: Path) -> None:
    from accelerate import Accelerator

    from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

    accelerator = Accelerator(cpu=True)
    with patch.dict(os.environ, WORLD_SIZE="5"), pytest.raises(ValueError, match="cpu=True"):
        prepare_for_gossip(accelerator)
    model = accelerator.prepare(task.make_model())
    prepare_for_gossip(accelerator, **DELAYED)
    with pytest.raises(ValueError, match="call prepare_for_gossip\\(\\) first, and pass the model"):
        accelerator.prepare(task.make_base(model))


STEPS = 6
# An epoch: it is evaluated and saved after each.
EVERY = 2
SAVED = 4


class Regressor(nn.Module):
    """As the Trainer takes models: they return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.model(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def make_hugging_face_trainer(folder: Path, model_init: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from decent_optim_wrapper.integrations.transformers import GossipMixin

    pairs = zip(*task.data()[:], strict=True)
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs]

    class GossipTrainer(GossipMixin, Trainer):
        # Transformers 4 has no argument for it.
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(rows)

    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        optim="adamw_torch",
        learning_rate=0.05,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=task.CLIP,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_train_batch_size=task.BATCH,
        per_device_eval_batch_size=len(rows) // RANKS,
        max_steps=STEPS,
        logging_steps=EVERY,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_steps=EVERY,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return GossipTrainer(
        model=None if model_init else Regressor(),
        model_init=model_init,
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        gossip=task.GOSSIP,
    )


def plain_for(trainer: Any, rank: int) -> Plain:
    """The same in plain torch."""

    def base(model: nn.Module) -> torch.optim.Optimizer:
        decayed = trainer.get_decay_parameter_names(trainer.model)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": []}]
        for name, param in model.named_parameters():
            groups[f"model.{name}" not in decayed]["params"].append(param)
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)

    def factor(step: int) -> float:
        return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)

    def scheduler(base: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(base, factor)

    return Plain(rank, "no", base, scheduler, overlap=False)


def train_as_trainer(plain: Plain, steps: int) -> list[list[dict[str, Any]]]:
    """Returns what is saved after every epoch."""
    saved = []
    for _ in range(steps // EVERY):
        plain.train(task.batches_of(plain.rank), ACCUMULATED, scheduled=1)
        saved.append(plain.validate(task.data()[:]))
    return saved


def train_with_the_trainer(rank: int, folder: Path) -> None:
    # The largest loss counts as the best, so that it is not the last.
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_hugging_face_trainer(folder, load_best_model_at_end=True, **options)
    assert not trainer.args.average_tokens_across_devices
    plain = plain_for(trainer, rank)
    trainer.train()
    assert not isinstance(trainer.model_wrapped, DistributedDataParallel)
    saved = train_as_trainer(plain, STEPS)
    logged = trainer.state.log_history
    losses = [each["eval_loss"] for each in logged if "eval_loss" in each]
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    best = plain.losses.index(max(plain.losses))
    assert best < len(plain.losses) - 1
    assert trainer.state.best_global_step == EVERY * (best + 1)
    assert_same(trainer.model.model.state_dict(), saved[best][0])
    for epoch, (model, *_) in enumerate(saved):
        stored = load_file(folder / f"checkpoint-{EVERY * (epoch + 1)}" / "model.safetensors")
        assert_same(stored, {f"model.{name}": value for name, value in model.items()})
    steps = [each for each in logged if "loss" in each]
    assert len(steps) == STEPS // EVERY
    assert all(each["gossip/consensus_distance"] > 0 for each in steps)
    assert all(each["gossip/bytes"] + each["gossip/wait_seconds"] >= 0 for each in steps)
    # The logged loss is the mean over the ranks, and the norm that of the rank's own gradients.
    figures = plain.optimizer.all_gather(
        torch.tensor([[each["loss"], each["grad_norm"]] for each in steps])
    )
    assert figures[0, :, 0].equal(figures[1, :, 0])
    assert figures[0, :, 1].ne(figures[1, :, 1]).all()

    checkpoint = folder / f"checkpoint-{SAVED}"
    trainer = make_hugging_face_trainer(folder)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    # Each rank has gone on with its own parameters and moments.
    assert_same(trainer.model.model.state_dict(), saved[-1][0])

    if rank == 0:
        shutil.rmtree(checkpoint / "ranks")
    dist.barrier()
    trainer = make_hugging_face_trainer(folder)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    resumed = plain_for(trainer, rank)
    resumed.resume(saved[SAVED // EVERY - 1])
    train_as_trainer(resumed, STEPS - SAVED)
    resumed.optimizer.global_avg(may_revert=False)
    resumed.check(trainer.model.model)
    # As before, but with the average and the moments of rank 0 in the middle.
    assert not torch.equal(values(resumed.model)[0], saved[-1][0]["0.weight"])


def train_again(rank: int, folder: Path) -> None:
    made: list[weakref.ref[nn.Module]] = []

    def model_init() -> nn.Module:
        made.append(weakref.ref(model := Regressor()))
        return model

    trainer = make_hugging_face_trainer(folder, model_init, save_strategy="no")
    for _ in range(2):
        trainer.train()
    trainer.save_model(folder)  # Rank 0 does.
    dist.barrier()
    saved = load_file(folder / "model.safetensors")
    assert_same(saved, dict(trainer.model.state_dict()))
    assert not torch.equal(saved["model.0.weight"], Regressor().model[0].get_parameter("weight"))
    gc.collect()
    assert [ref() is not None for ref in made] == [False] * (len(made) - 1) + [True]
    assert len(made) > 2


def train_one_model_again(rank: int, folder: Path) -> None:
    trainer = make_hugging_face_trainer(folder)
    for _ in range(2):
        trainer.train()
        own = parameters_to_vector(trainer.model.parameters()).detach()
        rows = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(rows, own)
        assert_same(rows[0], rows[1])
        assert any(key.startswith("gossip/") for row in trainer.state.log_history for key in row)
    trainer.train(resume_from_checkpoint=True)


RUNS = {
    "Lightning clips, validates and resumes": (
        LIGHTNING,
        partial(fit_and_resume, precision="bf16"),
    ),
    "in float16 an overflow skips an update": (
        LIGHTNING,
        partial(fit_and_resume, precision="fp16"),
    ),
    "after an error each rank saves what it has": (LIGHTNING, save_after_an_error),
    "an error in a validation changes no later training": (
        LIGHTNING,
        fit_after_a_failed_validation,
    ),
    "several optimizers are wrapped in manual optimization": (LIGHTNING, fit_manually),
    "averages over time are averaged over the ranks": (LIGHTNING, fit_with_swa),
    "weights swapped for validation do not change it": (LIGHTNING, fit_with_swapped_weights),
    "a fit within the fit ends no gossip": (LIGHTNING, fit_with_a_rate_finder),
    "parameters that a callback adds are gossiped": (LIGHTNING, partial(finetune, adds=True)),
    "parameters that a callback thaws are gossiped": (LIGHTNING, partial(finetune, adds=False)),
    "Fabric trains, accumulates, clips in float16 and resumes": (LIGHTNING, train_with_fabric),
    "Accelerate trains, saves and resumes": (ACCELERATE, accelerate_and_resume),
    "each schedule waits for its own optimizer": (ACCELERATE, accelerate_two_schedules),
    "Join finds the wrapper in what Accelerate returns": (ACCELERATE, accelerate_uneven_data),
    "DDP cannot be left on": (ACCELERATE, prepare_late),
    "Hugging Face's Trainer evaluates, saves and resumes": (TRANSFORMERS, train_with_the_trainer),
    "it keeps the last average and frees earlier models": (TRANSFORMERS, train_again),
    "it trains one model again, and resumes": (TRANSFORMERS, train_one_model_again),
}


@pytest.mark.parametrize(
    "train", [pytest.param(train, marks=needs, id=id) for id, (needs, train) in RUNS.items()]
)
def test_a_framework_does_what_plain_torch_does(run: Run, tmp_path: Path, train: Any) -> None:
    run(train, tmp_path)
