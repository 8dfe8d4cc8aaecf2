"""Parameters that are views of the buckets: who notices that their values change, and exports."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import backward, batch, fill, flat
from modules import wrap as wrap_module
from problem import CODED, MODES, flatten, make_params, take_steps, wrap
from ranks import run_threads
from safetensors.torch import load_model, save_model
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from decent_optim_wrapper import DecentOptimWrapper, Late, Schedule
from decent_optim_wrapper.ddp.module import wants_views

TRAVEL = {name: (MODES | CODED)[name] for name in ("copies", "views", "bf16-views", "int8")}


def average_and_revert(optimizer: DecentOptimWrapper) -> None:
    with optimizer.averaged():
        pass


def step_without_a_gradient(optimizer: DecentOptimWrapper) -> None:
    optimizer.zero_grad()
    optimizer.step()


WRITES: list[Callable[[DecentOptimWrapper], None]] = [
    lambda optimizer: optimizer.synchronize(),
    lambda optimizer: optimizer.global_avg(may_revert=False),
    lambda optimizer: optimizer.global_avg(),
    average_and_revert,
    step_without_a_gradient,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "topology"), [*zip(TRAVEL.values(), cycle(["ring", "complete"]))], ids=TRAVEL
)
def test_a_backward_pass_notices_that_values_it_saved_were_mixed(
    mode: dict[str, Any], topology: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        fill(model, seed=rank)
        params: list[Tensor] = list(model.parameters())
        base = optim.SGD(params, lr=0.1)
        optimizer = wrap(params, group, base, topology=topology, sync_at_start=False, **mode)
        assert len(optimizer.buckets) > 1
        x = batch(rank, 0, 2, 4, dtype=torch.float32)
        for write in WRITES:
            for _ in range(2):
                model(x).square().sum().backward()
                optimizer.step()
            loss = model(x).square().sum()
            before = flatten(params)
            write(optimizer)
            assert write is average_and_revert or not torch.equal(flatten(params), before)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            # What is computed after the writing is fine.
            if optimizer.is_averaged:
                optimizer.revert_global_avg()
        model(x).square().sum().backward()

    run_threads(4, main)


def swap(param: Tensor) -> None:
    """As an average of the values does that is put in place and taken out again."""
    with torch.no_grad():
        own = param.clone()
        param.mul_(2)
        param.copy_(own)


def change_a_part(param: Tensor) -> None:
    param.detach()[0] = 1


CHANGES = [swap, change_a_part]
NOTICED = r"the values of 0\.2 were changed .* call synchronize\(\) before"


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_values_changed_while_they_travel_are_named_by_whatever_comes_next(topology: str) -> None:
    options: Any = {"topology": topology, "sync_at_start": False, "param_as_bucket_view": True}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, **options)
        saved = optimizer.state_dict()
        for change in CHANGES:
            take_steps(optimizer, params, rank, range(2))
            change(params[2])
            before = flatten(params)
            for call in (
                optimizer.step,
                optimizer.synchronize,
                optimizer.global_avg,
                optimizer.consensus_distance,
                optimizer.step,
            ):
                with pytest.raises(RuntimeError, match=rf"rank {rank}: .*{NOTICED}"):
                    call()
            assert torch.equal(flatten(params), before)
            optimizer.load_state_dict(saved)
        take_steps(optimizer, params, rank, [0])
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)

    run_threads(4, main)


VIEWS: dict[str, Any] = {"param_as_bucket_view": True}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (2, {"overlap": False, **VIEWS}),
        (2, {"schedule": Schedule(gossip_every=2), "overlap": Late(2), **VIEWS}),
        (1, VIEWS),
    ],
    ids=["copies", "no overlap", "idle and frozen", "alone"],
)
def test_values_may_be_changed_where_none_of_them_travel(
    world_size: int, options: dict[str, Any]
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, topology="ring", **options)
        assert len(optimizer.buckets) > 1
        for change in CHANGES:
            for _ in range(2):
                before = flatten(params)
                take_steps(optimizer, params, rank, [optimizer.round])
                assert not torch.equal(flatten(params), before)
                if optimizer.round % 2:
                    change(params[2])
            with optimizer.averaged():
                change(params[2])
        optimizer.synchronize()

    run_threads(world_size, main)


def recurrent() -> nn.Sequential:
    model = nn.Sequential(nn.LSTM(3, 4))
    fill(model)
    return model


def flatten_weights(rnn: nn.Module, _: Any) -> None:
    """What flatten_parameters() does on a GPU, and nowhere else."""
    vector_to_parameters(parameters_to_vector(rnn.parameters()), rnn.parameters())


def train_recurrent(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        backward(model(batch(rank, step, 5, 2, 3, dtype=torch.float32))[0].square().sum())


def test_flattened_weights_of_an_rnn_are_named_with_views_and_trained_as_copies() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        plain, flattened = recurrent(), recurrent()
        flattened[0].register_forward_pre_hook(flatten_weights)
        for model in (plain, flattened):
            wrapped = wrap_module(model, group, topology="ring", param_as_bucket_view=False)
            train_recurrent(wrapped, rank, range(4))
            wrapped.optimizer.synchronize()
        assert torch.equal(flat(plain), flat(flattened))
        assert not torch.equal(flat(plain), flat(recurrent()))

        model = recurrent()
        wrapped = wrap_module(model, group, topology="ring", **VIEWS)
        train_recurrent(wrapped, rank, range(2))
        model[0].register_forward_pre_hook(flatten_weights)
        before = flat(model)
        words = rf"rank {rank}: .* storage of .*0\.weight_hh_l0.*flatten_parameters\(\) .* pass"
        with pytest.raises(RuntimeError, match=f"{words} param_as_bucket_view=False"):
            train_recurrent(wrapped, rank, range(2, 3))
        assert torch.equal(flat(model), before)

    run_threads(2, main)


def test_the_module_makes_views_unless_there_is_an_rnn_on_a_gpu_or_a_mesh() -> None:
    # Without cuDNN, or the GRU would look for the addresses of its fake weights.
    with FakeTensorMode(), torch.device("cuda"), torch.backends.cudnn.flags(enabled=False):
        on_gpu = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4))
        assert not wants_views(on_gpu, mesh=None)
        assert wants_views(on_gpu[0], mesh=None)
    on_cpu = recurrent()
    assert wants_views(on_cpu, mesh=None)
    assert not wants_views(on_cpu, mesh=object())


def tied_model(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    model[4].weight = model[1].weight
    fill(model, seed)
    return model


def saved_bytes(part: nn.Module) -> int:
    torch.save(part.state_dict(), file := io.BytesIO())
    return len(file.getvalue())


def test_a_copy_of_a_model_with_views_is_exported_whole_and_in_part(tmp_path: Path) -> None:
    """The recipe of the guide to checkpoints."""
    bucket_mb = 3 * 40 * 41 * 4 / 2**20

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = wrap_module(tied_model(), group, bucket_size_in_mb=bucket_mb)
        for step in range(2):
            inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank + 10 * step))
            backward(model(inputs).square().mean())
        with model.optimizer.averaged():
            expected = flat(model)
            exported = copy.deepcopy(model.module)
        # Torch would save the whole bucket of a part, and safetensors refuse it.
        assert saved_bytes(exported.get_submodule("2")) == saved_bytes(tied_model()[2])
        save_model(exported, str(tmp_path / f"{rank}.safetensors"))
        loaded = tied_model(seed=1)
        load_model(loaded, tmp_path / f"{rank}.safetensors")
        assert torch.equal(flat(loaded), expected)
        assert exported.get_parameter("4.weight") is exported.get_parameter("1.weight")
        assert not torch.equal(flat(model), expected)
        assert not torch.equal(flat(tied_model()), expected)
        return expected

    assert torch.equal(*run_threads(2, main))
