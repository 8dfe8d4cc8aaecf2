"""overlap="forward": the trajectory without overlap, whoever reads the parameters or fails."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import VIEWS, named, pairwise
from fake_cuda import fake_cuda
from modules import (
    CAP_MB,
    Detached,
    Odd,
    adamw,
    backward,
    batch,
    fill,
    flat,
    loss_of,
    make_model,
    sgd,
    train,
    train_by_steps,
    wrap,
    wrap_base,
)
from problem import nesterov
from ranks import run_processes, run_threads
from restartable_processes import RestartableProcesses
from torch import Tensor, nn

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Elastic,
    NonFiniteError,
    PeerError,
    Schedule,
)
from decent_optim_wrapper.codecs import INT4

STEPS = 6
PATIENCE = 30.0


BASES = {"sgd": sgd, "adamw": adamw}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"comm_dtype": torch.bfloat16},
    "int8": {"comm_dtype": torch.int8},
    "int4": {"comm_dtype": INT4},
}
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "tracking": {"gradient_tracking": True},
    "outer": {"schedule": Schedule(outer=nesterov(0.5))},
    "averages": {"schedule": Schedule(global_avg_every=3, average_state="average")},
    "rare": {"schedule": Schedule(gossip_every=2, mixing_rate=0.8)},
}


def wrap_steps(
    model: nn.Module, group: dist.ProcessGroup | None, base: Any = sgd, **options: Any
) -> DecentOptimWrapper:
    """What a training loop has."""
    options = {"bucket_cap_mb": CAP_MB, "process_group": group, "topology": "ring", **options}
    optimizer = DecentOptimWrapper(base(list(model.named_parameters())), model=model, **options)
    assert len(optimizer.buckets) >= 2
    return optimizer


def run(
    group: dist.ProcessGroup, rank: int, way: str, base: Any, overlap: Any, **options: Any
) -> Tensor:
    """Train a small network in one of three ways; without overlap always by `step()`."""
    model = make_model(seed=rank)
    if way != "step" and overlap != False:  # noqa: E712
        wrapped = wrap(model, group, base, overlap=overlap, **options)
        train(wrapped, rank, range(STEPS))
        wrapped.optimizer.synchronize()
        return flat(model)
    # With the buckets of the module.
    ours = wrap_steps if way == "step" else partial(wrap_base, reverse=True)
    optimizer = ours(model, group, base, overlap=overlap, **options)
    train_by_steps(model, optimizer, rank, range(STEPS))
    optimizer.synchronize()
    return flat(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "base", "views", "message", "feature", "way"),
    pairwise(
        named("ring", "complete"),
        BASES,
        VIEWS,
        MESSAGES,
        FEATURES,
        named("step", "backward"),
    ),
)
def test_the_trajectory_is_that_without_overlap_bit_for_bit(
    topology: str, base: Any, views: bool, message: Any, feature: Any, way: str
) -> None:
    options = {"topology": topology, "param_as_bucket_view": views, **message, **feature}

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        overlaps: list[Any] = [False, "forward", True]
        return [run(group, rank, way, base, overlap, **options) for overlap in overlaps]

    for without, early, late in run_threads(4, main):
        assert torch.equal(early, without)
        assert (late - without).abs().max() > 1e-4


class Branches(nn.Module):
    """Layers of drawn sizes, some longer than a piece on the wire, called in an order of its own.

    Args:
        seed: of the sizes.
        order: in which the layers are called.
    """

    def __init__(self, seed: int, order: Sequence[int]) -> None:
        super().__init__()
        widths = [Random(seed + i).choice([3, 500, 40_000, 120_000]) for i in range(len(order))]
        self.layers = nn.ModuleList(nn.Linear(2, width).double() for width in widths)
        self._order = order
        fill(self, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = [self.layers[index](inputs).square().mean() for index in self._order]
        return torch.stack(parts).sum()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_ranks_that_need_their_buckets_in_different_orders_wait_for_nobody_for_ever(
    seed: int,
) -> None:
    def trained(rank: int, group: dist.ProcessGroup, overlap: bool) -> Tensor:
        model: Any = Branches(seed, Random(seed + 100 * rank).sample(range(7), 7))
        start, network, optimizer = flat(model), model, None
        if overlap:
            wrapped = wrap(model, group, topology="ring", bucket_size_in_mb=0.5, overlap="forward")
            network, finish = wrapped, wrapped.optimizer.synchronize
        else:
            optimizer = wrap_base(
                model, group, reverse=True, topology="ring", bucket_cap_mb=0.5, overlap=False
            )
            finish = optimizer.synchronize
        for step in range(STEPS):
            backward(network(batch(rank, step, 4, 2)))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        finish()
        assert (flat(model) - start).abs().max() > 1e-2
        return flat(model)

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [trained(rank, group, overlap) for overlap in (False, True)]

    for without, early in run_threads(4, main):
        assert torch.equal(early, without)


@pytest.mark.slow
def test_a_rank_whose_data_have_ended_exchanges_in_the_same_form() -> None:
    """Its idle rounds are no backward passes, but the messages are as long."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        flats = []
        for overlap in (False, True):
            model: Any = Branches(15, range(7))
            if overlap:
                options: dict[str, Any] = {"bucket_size_in_mb": 0.5, "overlap": "forward"}
                wrapped = wrap(model, group, topology="ring", **options)
                optimizer: Any = wrapped.optimizer
            else:
                options = {"bucket_cap_mb": 0.5, "overlap": False, "reverse": True}
                wrapped, optimizer = model, wrap_base(model, group, topology="ring", **options)
            idle = optimizer.join_hook().main_hook
            for step in range(STEPS):
                if rank == 1 and step >= 2:
                    idle()
                    continue
                backward(wrapped(batch(rank, step, 4, 2)))
                if not overlap:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.synchronize()
            flats.append(flat(model))
        return flats

    for without, early in run_threads(2, main):
        assert torch.equal(early, without)


def read_twice(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.no_grad():
        loss_of(model, rank, step)
    return loss_of(model, rank, step) + loss_of(model, rank, step + 100)


def read_by_parts(model: Any, rank: int, step: int) -> Tensor:
    inputs = batch(rank, step)
    # A parameter of the model itself, which is not called as a whole.
    hidden = model.attention(*3 * (model.first(inputs) * model.own,))[0]
    result: Tensor = (model.last(hidden) - inputs[:, :3]).square().mean()
    return result


def read_by_function(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = batch(rank, step)
    params: dict[str, Tensor] = {**dict(model.named_parameters())}
    result: Tensor = torch.func.functional_call(model, params, (inputs,))
    return (result - inputs[:, :3]).square().mean()


def read_before_the_model(model: Any, rank: int, step: int) -> Tensor:
    # Nothing of `own` is kept for the backward pass, which could not notice a change.
    first: Tensor = (model.first(batch(rank, step)) + model.own).mean()
    return first + loss_of(model, rank, step)


def read_copies_now_and_then(model: Any, rank: int, step: int) -> Tensor:
    if step % 2:
        return loss_of(model, rank, step)
    inputs = batch(rank, step)
    with torch.no_grad():
        model(inputs)
    copies = {name: param.clone() for name, param in model.named_parameters()}
    result: Tensor = torch.func.functional_call(model, copies, (inputs,))
    return (result - inputs[:, :3]).square().mean()


def read_a_part_now_and_then(model: Any, rank: int, step: int) -> Tensor:
    return (loss_of if step % 2 else read_by_parts)(model, rank, step)


def rows_of(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(len(model.last.weight), (8,), generator=generator)


def read_before_its_owner(model: Any, rank: int, step: int) -> Tensor:
    # As a model whose output layer also embeds: nothing is kept for the backward pass.
    hidden = F.embedding(rows_of(model, rank, step), model.last.weight)
    result: Tensor = (model.last(model.frozen(model.blocks[0](hidden))) - 0.5).square().mean()
    return result


def read_a_method(model: Any, rank: int, step: int) -> Tensor:
    # As `training_step` of a LightningModule: the model is not called.
    hidden = torch.ones(8, 6, dtype=torch.float64) + model.own
    outputs: Tensor = model.last(model.blocks[1](hidden))
    return (outputs - batch(rank, step)[:, :3]).square().mean()


def read_fused_now_and_then(model: Any, rank: int, step: int) -> Tensor:
    # A module that is called in one step, and whose parameters are read by a function in the next.
    inputs, last = batch(rank, step), model.last
    hidden = model.first(inputs)
    outputs = F.linear(hidden, last.weight, last.bias) if step % 2 else last(hidden)
    return (outputs - inputs[:, :3]).square().mean()


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        *(loss_of, read_twice, read_by_parts, read_by_function, read_before_the_model),
        *(read_copies_now_and_then, read_a_part_now_and_then, read_before_its_owner),
        *(read_a_method, read_fused_now_and_then),
    ],
)
def test_every_way_into_the_parameters_finds_them_mixed(read: Any, views: bool) -> None:
    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        model = Odd()
        optimizer = wrap_steps(model, group, adamw, param_as_bucket_view=views, overlap=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(read(model, rank, step))
            optimizer.step()
        optimizer.synchronize()
        return flat(model)

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        # Without overlap, the buckets are those of the groups: the same here.
        return [trained(rank, group, overlap) for overlap in (False, "forward", True)]

    for without, early, late in run_threads(4, main):
        assert torch.equal(early, without)
        assert (late - without).abs().max() > 1e-4


def test_a_parameter_that_is_read_between_two_steps_is_mixed_and_so_is_a_copy_of_the_model() -> (
    None
):
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model: Any = make_model(seed=rank)
        optimizer = wrap_steps(model, group, overlap="forward")
        train_by_steps(model, optimizer, rank, range(2))
        launched = values_of(model)
        read = model[4].weight.detach().clone()
        assert 0 < unmixed(model, launched) < len(launched)
        copied = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert unmixed(model, launched) == 0
        assert torch.equal(read, model[4].weight)
        for each in copied:
            assert torch.equal(flat(each), flat(model))
            assert type(vars(each[4])["_parameters"]) is dict

    run_threads(4, main)


def test_two_wrappers_watch_one_model_until_they_end() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model: Any = make_model(seed=rank)
        parts = [[*model[0].parameters()], [*model[2].parameters(), *model[4].parameters()]]
        both = [
            DecentOptimWrapper(
                sgd(part), topology="ring", process_group=group, model=model, overlap="forward"
            )
            for part in parts
        ]
        for step in range(3):
            loss = loss_of(model, rank, step)
            backward(loss)
            for optimizer in both:
                optimizer.step()
        launched = values_of(model)
        assert [len(optimizer.buckets) for optimizer in both] == [1, 1]
        assert model[0].weight is not None
        assert unmixed(model, launched) == len(parts[1])
        assert model[4].weight is not None
        assert unmixed(model, launched) == 0
        for optimizer in both:
            optimizer.synchronize()
        assert type(vars(model[4])["_parameters"]) is not dict
        del both, optimizer
        gc.collect()
        assert type(vars(model[4])["_parameters"]) is dict

    run_threads(2, main)


def test_only_the_modules_that_are_reached_have_waited() -> None:
    """Otherwise it would be `overlap=False` with another name."""

    def main(rank: int, group: dist.ProcessGroup) -> list[int]:
        model = make_model(seed=rank)
        optimizer = wrap_steps(model, group, overlap="forward")
        train_by_steps(model, optimizer, rank, range(2))
        launched, left = values_of(model), []
        for module in model.children():
            module.register_forward_hook(lambda *_: left.append(unmixed(model, launched)))
        loss_of(model, rank, 2)
        return left

    for left in run_threads(4, main):
        assert len(left) == 5
        assert left == sorted(left, reverse=True)
        assert left[0] >= 2
        assert left[-1] == 0


def values_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def unmixed(model: nn.Module, launched: list[Tensor]) -> int:
    """How many parameters are as they were: all ranks differ, so mixing changes every one."""
    now = model.parameters()
    return sum(torch.equal(param, sent) for param, sent in zip(now, launched, strict=True))


LOOKS = "state_dict", "average", "distance", "group", "added", "by hand", "copy", "wrapper"


@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_between_two_steps_finds_a_whole_round(look: str) -> None:
    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> list[Any]:
        model: Any = make_model(seed=rank)
        last = model[4].requires_grad_(look != "group")
        first = [*model[:4].parameters()]
        base = (lambda named: adamw(first)) if look == "added" else adamw
        optimizer = wrap_steps(model, group, base, overlap=overlap)
        seen: list[Any] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(loss_of(model, rank, step))
            optimizer.step()
            match look:
                case "state_dict":
                    # Of a part: the whole round is mixed.
                    model[2].state_dict()
                    seen.append(flat(model))
                case "average":
                    with optimizer.averaged():
                        seen.append(loss_of(model, rank, 0).detach())
                case "distance":
                    seen.append(torch.tensor(optimizer.consensus_distance()))
                case "group" if step == 2:
                    last.requires_grad_(True)
                    optimizer.rebuild_buckets()
                case "added" if step == 2:
                    optimizer.add_param_group({"params": list(last.parameters())})
                case "by hand":
                    optimizer.synchronize()
                    with torch.no_grad():
                        last.weight.clamp_(-0.3, 0.3)
                case "copy":
                    twin = copy.deepcopy(model)
                    assert torch.isfinite(loss_of(twin, rank, 0))
                case "wrapper":
                    assert optimizer.state_dict()["gossip"]["in_flight"] == (overlap is True)
        optimizer.synchronize()
        return [*seen, flat(model)]

    def main(rank: int, group: dist.ProcessGroup) -> list[list[Any]]:
        return [trained(rank, group, overlap) for overlap in (False, "forward")]

    for without, early in run_threads(4, main):
        assert len(early) == len(without)
        for ours, theirs in zip(early, without, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("feature", ["none", "tracking", "averages", "rare"])
def test_a_run_is_resumed_between_any_two_calls(feature: str, way: str) -> None:
    def make(rank: int, group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
        model = make_model(seed=rank)
        options = {"topology": "ring", "comm_dtype": torch.int8, **FEATURES[feature]}
        if way == "backward":
            wrapped = wrap(model, group, adamw, overlap="forward", **options)
            return wrapped, wrapped.optimizer
        return model, wrap_steps(model, group, adamw, overlap="forward", **options)

    def go_on(model: Any, optimizer: Any, rank: int, steps: range) -> None:
        if way == "backward":
            train(model, rank, steps)
        else:
            train_by_steps(model, optimizer, rank, steps)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
        model, optimizer = make(rank, group)
        go_on(model, optimizer, rank, range(STEPS))
        optimizer.synchronize()
        resumed = []
        for moment in ("after a step", "after a forward pass", "first the optimizer"):
            model_, optimizer_ = make(rank, group)
            go_on(model_, optimizer_, rank, range(3))
            if moment == "after a forward pass":
                loss_of(model_, rank, 3)
            parts = [getattr(model_, "module", model_), optimizer_]
            order = (1, 0) if moment == "first the optimizer" else (0, 1)
            saved = {index: copy.deepcopy(parts[index].state_dict()) for index in order}
            model_, optimizer_ = make(rank, group)
            for index in order:
                [getattr(model_, "module", model_), optimizer_][index].load_state_dict(saved[index])
            go_on(model_, optimizer_, rank, range(3, STEPS))
            optimizer_.synchronize()
            resumed.append(flat(model_))
        return flat(model), resumed

    for undisturbed, resumed in run_threads(4, main):
        for each in resumed:
            assert torch.equal(each, undisturbed)


def test_a_run_with_delayed_mixing_goes_on_before_the_forward_pass() -> None:
    """What was in flight is launched again, and its memory is not received into before."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        model = make_model(seed=rank)
        late = wrap(model, group, adamw, topology="ring")
        train(late, rank, range(3))
        saved = copy.deepcopy((model.state_dict(), late.optimizer.state_dict()))
        flats = []
        for overlap in (False, True):
            model = make_model(seed=rank)
            if overlap:
                early = wrap(model, group, adamw, topology="ring", overlap="forward")
                optimizer: Any = early.optimizer
            else:
                optimizer = wrap_base(model, group, adamw, True, topology="ring", overlap=False)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            if overlap:
                train(early, rank, range(3, STEPS))
            else:
                train_by_steps(model, optimizer, rank, range(3, STEPS))
            optimizer.synchronize()
            flats.append(flat(model))
        return flats

    for without, early in run_threads(4, main):
        assert torch.equal(early, without)


def test_an_outer_optimizer_takes_no_step_in_a_round_that_is_refused() -> None:
    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        model: Any = make_model(seed=rank)
        optimizer = wrap_steps(model, group, overlap=overlap, **FEATURES["outer"])
        train_by_steps(model, optimizer, rank, range(3))
        optimizer.synchronize()
        last = model[4].weight
        good = last.detach().clone()
        hook = last.register_hook(lambda grad: grad * torch.nan if rank == 1 else grad)

        def refused() -> None:
            train_by_steps(model, optimizer, rank, range(3, 4))
            loss_of(model, rank, 4)

        with pytest.raises(NonFiniteError):
            refused()
        hook.remove()
        optimizer.state.clear()
        with torch.no_grad():
            last.copy_(good)
        train_by_steps(model, optimizer, rank, range(4, STEPS))
        optimizer.synchronize()
        return flat(model)

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [trained(rank, group, overlap) for overlap in (False, "forward")]

    for without, early in run_threads(2, main):
        assert torch.equal(early, without)
        assert early.isfinite().all()


@pytest.mark.parametrize("comm", [None, torch.int8])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_round_that_is_not_finite_is_put_back_and_the_next_one_is_right(
    topology: str, comm: Any
) -> None:
    """The NaN is in the bucket that is read last: those before it are mixed already."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, tuple[int, ...], Tensor]:
        model: Any = make_model(seed=rank)
        optimizer = wrap_steps(model, group, topology=topology, overlap="forward", comm_dtype=comm)
        train_by_steps(model, optimizer, rank, range(3))
        last = model[4].weight
        good = last.detach().clone()
        hook = last.register_hook(lambda grad: grad * torch.nan if rank == 1 else grad)
        train_by_steps(model, optimizer, rank, range(3, 4))
        hook.remove()
        launched = flat(model)
        with pytest.raises(NonFiniteError) as caught:
            loss_of(model, rank, 4)
        after = flat(model)
        with torch.no_grad():
            last.copy_(good)
        for group_ in optimizer.param_groups:
            group_["lr"] = 0.0
        optimizer.state.clear()
        train_by_steps(model, optimizer, rank, range(5, 45))
        optimizer.synchronize()
        return launched, after, caught.value.ranks, flat(model)

    results = run_threads(2, main)
    for launched, after, ranks, _ in results:
        assert torch.equal(after.nan_to_num(7.0), launched.nan_to_num(7.0))
        assert ranks == (1,)
    # At lr 0 they meet: their references are still the same.
    torch.testing.assert_close(results[0][3], results[1][3], rtol=0, atol=1e-9)


def test_a_rank_that_is_skipped_takes_the_others_values_of_that_bucket() -> None:
    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        model: Any = make_model(seed=rank)
        optimizer = wrap_steps(model, group, overlap=overlap, on_nonfinite="skip")
        train_by_steps(model, optimizer, rank, range(2))
        hook = model[2].weight.register_hook(lambda grad: grad * torch.nan if rank == 1 else grad)
        train_by_steps(model, optimizer, rank, range(2, 3))
        hook.remove()
        optimizer.state.clear()
        train_by_steps(model, optimizer, rank, range(3, STEPS))
        optimizer.synchronize()
        return flat(model)

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [trained(rank, group, overlap) for overlap in (False, "forward")]

    for without, early in run_threads(4, main):
        assert torch.equal(early, without)
        assert early.isfinite().all()


def fail_late(optimizer: DecentOptimWrapper, fault: Callable[[], None]) -> None:
    """Let a rank fail while it packs its last bucket, long after it has sent the first ones."""
    bucket = optimizer.buckets[-1]

    def pack(*_: object, **__: object) -> object:
        time.sleep(0.5)
        fault()
        raise OSError("the machine is on fire")

    bucket.pack = pack  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_lost_peer_leaves_the_parameters_as_they_were_sent(topology: str, views: bool) -> None:
    left: list[int] = []

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model: Any = make_model(seed=rank)
        optimizer = wrap_steps(
            *(model, group),
            topology=topology,
            overlap="forward",
            timeout=PATIENCE,
            param_as_bucket_view=views,
        )
        train_by_steps(model, optimizer, rank, range(3))
        loss = loss_of(model, rank, 3)
        if rank == 2:
            fail_late(optimizer, lambda: None)
            backward(loss)
            with pytest.raises(OSError, match="on fire"):
                optimizer.step()
            return flat(model), flat(model)
        backward(loss)
        optimizer.step()
        launched = values_of(model)
        model[2].register_forward_pre_hook(lambda *_: left.append(unmixed(model, launched)))

        def go_on() -> None:
            # A neighbour of the one that fails may notice a round later.
            for step in range(4, 9):
                launched[:] = values_of(model)
                backward(loss_of(model, rank, step))
                optimizer.step()

        with pytest.raises(PeerError):
            go_on()
        return torch.cat([each.reshape(-1) for each in launched]), flat(model)

    results = run_threads(4, main)
    for launched, now in results:
        assert torch.equal(now, launched)
    # Some had mixed the first bucket when the last did not come.
    assert any(0 < each < 6 for each in left)


def lose_one(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[str, Any]:
    model = make_model(seed=rank)
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.05),
        rank=rank,
        world_size=world_size,
        topology="ring",
        bucket_cap_mb=CAP_MB,
        timeout=PATIENCE,
        overlap="forward",
        model=model,
        elastic=Elastic(store=store),
    )
    train_by_steps(model, optimizer, rank, range(4))
    backward(loss_of(model, rank, 4))
    if rank == 2:
        fail_late(optimizer, lambda: os.kill(os.getpid(), signal.SIGKILL))
    optimizer.step()
    launched = flat(model)
    # From here on nothing moves the mean of those that are left.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    while len(optimizer.members) == world_size or optimizer.round < 40:
        train_by_steps(model, optimizer, rank, range(5, 6))
    optimizer.synchronize()
    return "done", (launched.tolist(), flat(model).tolist(), optimizer.members)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_with_elastic_the_forward_pass_goes_on_and_the_mean_of_the_members_stays() -> None:
    with RestartableProcesses(4, lose_one) as processes:
        results = [processes.wait_for(rank, "result") for rank in (0, 1, 3)]
    launched = torch.tensor([each[1][0] for each in results], dtype=torch.float64)
    now = torch.tensor([each[1][1] for each in results], dtype=torch.float64)
    assert {each[1][2] for each in results} == {(0, 1, 3)}
    torch.testing.assert_close(now.mean(0), launched.mean(0), rtol=0, atol=1e-12)
    assert (now - launched).abs().max() > 1e-3


def test_a_step_whose_gradients_are_those_at_other_parameters_is_refused() -> None:
    """The others hear of it."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = make_model(seed=rank)
        optimizer = wrap_steps(model, group, overlap="forward", timeout=PATIENCE)
        train_by_steps(model, optimizer, rank, range(2))
        # A rank without a batch takes part.
        optimizer.zero_grad()
        optimizer.step()
        if rank == 1:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            with pytest.raises(CallOrderError, match="rank 1: step\\(\\) expects a forward pass"):
                optimizer.step()
        else:
            with pytest.raises(CallOrderError, match="rank 1: step\\(\\) expects a forward pass"):
                train_by_steps(model, optimizer, rank, range(3, 6))

    run_threads(2, main)


def test_a_parameter_that_is_changed_by_hand_while_it_is_sent_is_found_in_the_forward_pass() -> (
    None
):
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model: Any = make_model(seed=rank)
        options: dict[str, Any] = {"overlap": "forward", "timeout": PATIENCE}
        optimizer = wrap_steps(model, group, param_as_bucket_view=True, **options)
        # Read before: who reads `model[4].weight` later gets the mixed values, and may change them.
        weight = model[4].weight
        train_by_steps(model, optimizer, rank, range(2))

        @torch.no_grad()
        def change(*_: object) -> None:
            if rank == 1:
                weight.clamp_(-0.3, 0.3)

        # Between two modules: the first one is mixed, and the last one is not.
        model[0].register_forward_hook(change)
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"the values of 4\.weight were changed while"):
                loss_of(model, rank, 2)
        else:
            with pytest.raises(PeerError, match="were changed while"):
                train_by_steps(model, optimizer, rank, range(2, 5))

    run_threads(2, main)


def test_the_constructor_says_what_it_needs() -> None:
    model, other = make_model(), make_model()
    with pytest.raises(ValueError, match="pass model=model"):
        DecentOptimWrapper(sgd(model.parameters()), overlap="forward")
    with pytest.raises(ValueError, match=r"does not have parameters 0\.0, 0\.1"):
        DecentOptimWrapper(sgd(other.parameters()), overlap="forward", model=model)
    with pytest.raises(TypeError, match='expects a bool, "forward" or a Pacing'):
        DecentOptimWrapper(sgd(model.parameters()), overlap="backward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='expects True or "forward" here'):
        wrap(model, None, overlap=False)
    optimizer = DecentOptimWrapper(
        sgd(model.parameters()), overlap="forward", model=model, bucket_cap_mb=CAP_MB
    )
    with pytest.raises(ValueError, match="expects all parameters of the optimizer in the model"):
        optimizer.add_param_group({"params": list(other.parameters())})
    assert len(optimizer.param_groups) == 1


def train_compiled(rank: int) -> list[list[float]]:
    dist.init_process_group("gloo")

    def trained(overlap: Any, compiles: bool) -> Tensor:
        model = make_model(seed=rank)
        optimizer = wrap_steps(model, None, overlap=overlap)
        called = torch.compile(model, backend="eager") if compiles else model
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = batch(rank, step)
            backward((called(inputs) - inputs[:, :3]).square().mean())
            optimizer.step()
        optimizer.synchronize()
        return flat(model)

    cases = (False, False), ("forward", True), (True, False)
    return [trained(*case).tolist() for case in cases]


@pytest.mark.slow
def test_a_compiled_model_finds_mixed_parameters() -> None:
    for without, early, late in run_processes(2, train_compiled):
        assert early == without
        assert late != pytest.approx(without, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize(("topology", "size"), [("ring", 2), ("complete", 4)])
def test_on_a_gpu_the_host_waits_for_nothing_and_mixes_each_bucket_before_its_module(
    topology: str, size: int, views: bool
) -> None:
    with fake_cuda("cpu:gloo,cuda:nccl", size) as (mode, group):
        model = nn.Sequential(*(Detached(31, 31, device="cuda") for _ in range(8)))
        optimizer = wrap_steps(
            *(model, group),
            topology=topology,
            bucket_cap_mb=0.016,
            overlap="forward",
            param_as_bucket_view=views,
            # Without flags, which a stream waits for as well.
            on_nonfinite="ignore" if views else "raise",
        )
        mixed: list[int] = []

        def look(*_: object) -> None:
            kinds = [each.kind for each in mode.noted if "round.py:_mix" in each.where]
            # The stream waits for a bucket before it mixes it, and so before the module reads it.
            assert not kinds or kinds[0] == "order"
            mixed.append(len(kinds))

        for module in model:
            module.register_forward_hook(look)
        for _ in range(STEPS):
            mode.step += 1
            mode.noted.clear()
            mixed.clear()
            model(torch.empty(3, 31, device="cuda"))
            for param in model.parameters():
                param.grad = torch.empty_like(param)
            optimizer.step()
        assert 0 < mixed[0] < mixed[-1]
        assert mixed == sorted(mixed)
        assert not [each for each in mode.noted if each.kind in ("read", "copy", "spin", "wait")]


def test_a_model_is_saved_as_a_whole_without_what_listens_to_it(tmp_path: Any) -> None:
    model = make_model()
    optimizer = DecentOptimWrapper(
        sgd(model.parameters()), overlap="forward", model=model, bucket_cap_mb=CAP_MB
    )
    train_by_steps(model, optimizer, 0, range(2))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(flat(loaded), flat(model))
    train_by_steps(model, optimizer, 0, range(2, 3))
    assert torch.isfinite(loss_of(loaded, 0, 0))
    hooks = partial(sum, start=0)
    count = hooks(len(module._forward_pre_hooks) for module in model.modules())
    assert count
    del optimizer
    assert not hooks(len(module._forward_pre_hooks) for module in model.modules())
