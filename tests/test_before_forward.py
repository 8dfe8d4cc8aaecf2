"""overlap="forward": the trajectory without overlap, whoever reads the parameters or fails."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering_arrays import VIEWS, named, pairwise
from modules import Odd, Training, adamw, batch, fill, flat, loss_of, make_model
from problem import flatten, nesterov
from ranks import run_processes, run_threads
from restartable_processes import STALE_AFTER, RestartableProcesses
from torch import Tensor, nn

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    DecentralizedDataParallel,
    Elastic,
    GradientTracking,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.elastic.membership.ended import key_prefix
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError

STEPS = 5
TIMEOUT = 30.0


def assert_as_without_overlap(
    size: int, trained: Callable[..., Tensor], *others: bool, same: tuple[Any, ...] = ("forward",)
) -> None:
    """Training on ranks goes the same way with these overlaps, and elsewhere with the others."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [trained(rank, group, overlap) for overlap in (False, *same, *others)]

    for without, *rows in run_threads(size, main):
        assert all(torch.equal(each, without) for each in rows[: len(same)])
        for each in rows[len(same) :]:
            assert (each - without).abs().max() > 1e-4


def straight_on(
    rank: int, group: Any, overlap: Any, loss: Any = loss_of, make: Any = None, **options: Any
) -> Tensor:
    """Training with the loss of a model that may be made otherwise than by default."""
    model = make and make()
    training = Training(rank, group, model=model, overlap=overlap, **options)
    training.train(range(STEPS), loss)
    return training.end()


CODED = {"bf16": torch.bfloat16, "int8": torch.int8}
WAYS = named("step", "backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "views", "code", "way"), pairwise(named("ring", "complete"), VIEWS, CODED, WAYS)
)
def test_codes_have_the_trajectory_without_overlap_bit_for_bit(
    topology: str, views: bool, code: torch.dtype, way: str
) -> None:
    """Without codes they follow the oracle, and with extensions their contract."""
    options: dict[str, Any] = {"topology": topology, "comm_dtype": code}
    options["param_as_bucket_view"] = views
    assert_as_without_overlap(4, partial(straight_on, way=way, base=adamw, **options))


class Branches(nn.Sequential):
    """Layers of drawn sizes, some longer than a piece on the wire, called in an order of its own.

    Args:
        seed: of the sizes.
        order: in which the layers are called.
    """

    def __init__(self, seed: int, order: Sequence[int]) -> None:
        widths = [Random(seed + i).choice([3, 500, 40_000, 120_000]) for i in range(len(order))]
        super().__init__(*(nn.Linear(2, width).double() for width in widths))
        self._order = order
        fill(self, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self[i](inputs).square().mean() for i in self._order]).sum()


@pytest.mark.slow
def test_ranks_that_need_their_buckets_in_other_orders_do_not_wait_for_ever() -> None:
    """Also if the data of one have ended, whose idle rounds are no backward passes."""

    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        model = Branches(11, Random(100 * rank).sample(range(5), 5))
        training = Training(rank, group, "backward", model, cap_mb=0.5, overlap=overlap)
        idle = training.optimizer.join_hook().main_hook
        for step in range(STEPS):
            if rank == 1 and step >= 3:
                idle()
            else:
                training.train([step], lambda model, *at: model(batch(*at, 4, 2)))
        return training.end()

    assert_as_without_overlap(4, trained)


def error(outputs: Tensor, rank: int, step: int) -> Tensor:
    return (outputs - batch(rank, step)[:, :3]).square().mean()


def read_by_function(model: nn.Module, rank: int, step: int) -> Tensor:
    params: dict[str, Tensor] = {**dict(model.named_parameters())}
    return error(torch.func.functional_call(model, params, batch(rank, step)), rank, step)


def read_before_the_model(model: Any, rank: int, step: int) -> Tensor:
    # Nothing of `own` is kept for the backward pass, which could not notice a change.
    first: Tensor = (model.first(batch(rank, step)) + model.own).mean()
    return first + loss_of(model, rank, step)


def read_a_part_now_and_then(model: Any, rank: int, step: int) -> Tensor:
    if step % 2:
        return loss_of(model, rank, step)
    # A parameter of the model and the parameters of a layer, which are not called then.
    hidden = model.attention(*3 * (model.first(batch(rank, step)) * model.own,))[0]
    return error(F.linear(hidden, model.last.weight, model.last.bias), rank, step)


def read_before_its_owner(model: Any, rank: int, step: int) -> Tensor:
    # As a model whose output layer also embeds: nothing is kept for the backward pass.
    generator = torch.Generator().manual_seed(1000 * rank + step)
    hidden = F.embedding(torch.randint(3, (8,), generator=generator), model.last.weight)
    return error(model.last(model.frozen(model.blocks[0](hidden))), rank, step)


def read_by_iteration(model: Any, rank: int, step: int) -> Tensor:
    # In the forward pass, and without anything that is kept for the backward pass.
    hidden = model.first(batch(rank, step))
    penalty = sum((param * 0.01).sum() for param in model.parameters() if param.requires_grad)
    loss: Tensor = error(model.last(hidden), rank, step) + penalty
    return loss


def read_on_threads(model: Any, rank: int, step: int) -> Tensor:
    layers = [model.first, model.tied, model.first, model.tied]
    with ThreadPoolExecutor(4) as pool:
        hidden = sum(pool.map(lambda layer: layer(batch(rank, step)), layers))
    return error(model.last(hidden), rank, step)


@pytest.mark.parametrize(
    "read",
    [
        *(read_by_function, read_before_the_model, read_a_part_now_and_then),
        *(read_before_its_owner, read_by_iteration, read_on_threads),
    ],
)
def test_every_way_into_the_parameters_finds_them_mixed(read: Any) -> None:
    """Also in views, which autograd does not see change."""
    options = {"loss": read, "make": Odd, "base": adamw, "param_as_bucket_view": True}
    assert_as_without_overlap(2, partial(straight_on, **options), True)


def values_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def unmixed(model: nn.Module, launched: list[Tensor]) -> int:
    """How many parameters are as they were: all ranks differ, so mixing changes every one."""
    # Without announcing them, as an iteration in the forward pass does.
    now = (param for each in model.modules() for param in vars(each)["_parameters"].values())
    return sum(torch.equal(param, sent) for param, sent in zip(now, launched, strict=True))


class WithoutTheLibrary(pickle.Unpickler):
    """Loads a file as where this library is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        assert "decent_optim_wrapper" not in module
        return super().find_class(module, name)


def test_only_what_is_read_has_waited_and_a_copy_of_the_model_is_whole(tmp_path: Path) -> None:
    """Otherwise it would be `overlap=False` with another name."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        training = Training(rank, group)
        model, left = training.model, []
        training.train(range(2))
        launched = values_of(model)
        hooks = [
            module.register_forward_hook(lambda *_: left.append(unmixed(model, launched)))
            for module in model
        ]
        training.train([2])
        assert len(left) == 5
        assert left == sorted(left, reverse=True)
        assert left[0] >= 2
        assert left[-1] == 0
        for hook in hooks:
            hook.remove()
        launched = values_of(model)
        read = model[4].weight.detach().clone()
        assert 0 < unmixed(model, launched) < len(launched)
        torch.save(model, tmp_path / f"{rank}.pt")
        elsewhere: Any = SimpleNamespace(__name__="elsewhere", Unpickler=WithoutTheLibrary)
        loaded = torch.load(tmp_path / f"{rank}.pt", pickle_module=elsewhere, weights_only=False)
        assert unmixed(model, launched) == 0
        assert torch.equal(read, model[4].weight)
        copies = loaded, copy.deepcopy(model), copy.deepcopy(loaded)
        for each in copies:
            assert torch.equal(flat(each), flat(model))
            assert type(vars(each[4])["_parameters"]) is dict
            assert "decent_optim_wrapper" not in repr([*map(vars, each.modules())])
            assert each.state_dict().keys() == model.state_dict().keys()
        training.train([3])
        launched = values_of(model)
        for each in copies:
            assert loss_of(each, rank, 0).isfinite()
        assert unmixed(model, launched) == len(launched), "a copy tells nobody"
        training.end()
        del training
        gc.collect()
        assert vars(model[4])["_parameters"].watches == [], "its wrapper has ended"

    run_threads(2, main)


@pytest.mark.slow
def test_a_run_is_resumed_between_any_two_calls() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        def make() -> Training:
            options: Any = {"schedule": Schedule(global_avg_every=3)}
            return Training(rank, group, base=adamw, extensions=[StateAverage()], **options)

        undisturbed = make()
        undisturbed.train(range(STEPS))
        for moment in ("after a step", "after a forward pass", "first the optimizer"):
            before, after = make(), make()
            before.train(range(3))
            if moment == "after a forward pass":
                loss_of(before.called, rank, 3)
            parts = "model", "optimizer"
            for part in parts[::-1] if moment == "first the optimizer" else parts:
                state = copy.deepcopy(getattr(before, part).state_dict())
                getattr(after, part).load_state_dict(state)
            after.train(range(3, STEPS))
            assert torch.equal(after.end(), undisturbed.end())

    run_threads(4, main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"extensions": [OuterOptimizer(nesterov(0.5))]}),
        (3, {"topology": "complete"}),
        (2, {"on_nonfinite": "skip"}),
        (2, {"comm_dtype": torch.int8}),
    ],
    ids=["outer", "group", "skip", "int8"],
)
def test_a_round_that_is_not_finite_is_put_back_or_skipped_and_the_next_one_is_right(
    size: int, options: dict[str, Any]
) -> None:
    """The NaN is in the bucket that rank 0 reads last: those before it are mixed already there."""
    skips, coded = "on_nonfinite" in options, "comm_dtype" in options

    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        training = Training(rank, group, overlap=overlap, **options)
        optimizer, model = training.optimizer, training.model
        training.train(range(3))
        optimizer.synchronize()
        last = model[4].weight
        good = last.detach().clone()
        hook = last.register_hook(lambda grad: grad * torch.nan if rank == 1 else grad)
        launched: list[Tensor] = []

        def go_on() -> None:
            training.train([3])
            launched.append(flat(model))
            if rank == 1:
                model[4](torch.ones(6).double())
            loss_of(model, rank, 4)

        with nullcontext() if skips else pytest.raises(NonFiniteError) as caught:
            go_on()
        hook.remove()
        if caught is not None:
            assert caught.value.ranks == (1,)
            for each in launched:
                assert torch.equal(flat(model).nan_to_num(7.0), each.nan_to_num(7.0))
            with torch.no_grad():
                last.copy_(good)
        optimizer.state.clear()
        training.train(range(4, STEPS))
        result = training.end()
        assert result.isfinite().all()
        # At lr 0 they meet: their references are still the same.
        optimizer.param_groups[0]["lr"] = 0.0
        training.train(range(STEPS, STEPS + (50 if coded or "extensions" in options else 2)))
        assert optimizer.consensus_distance() < 1e-9
        return result

    if coded:
        # Without overlap no bucket was mixed, and the references are others.
        run_threads(size, partial(trained, overlap="forward"))
    else:
        assert_as_without_overlap(size, trained)


@pytest.mark.parametrize(("topology", "views"), [("ring", True), ("complete", False)])
def test_a_lost_peer_leaves_the_parameters_as_they_were_sent(topology: str, views: bool) -> None:
    left: dict[int, int] = {}
    all_read = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {"topology": topology, "param_as_bucket_view": views}
        training = Training(rank, group, timeout=TIMEOUT, **options)
        model, optimizer = training.model, training.optimizer
        training.train(range(3))
        launched: list[Tensor] = []

        def look(*_: object) -> None:
            left.setdefault(rank, unmixed(model, launched))
            if len(left) == 3:
                all_read.set()

        def fail(*_: object, **__: object) -> None:
            # While it packs its last bucket, long after it has sent the first ones.
            all_read.wait(TIMEOUT)
            raise OSError("the machine is on fire")

        def go_on() -> None:
            # A neighbour of the one that fails may notice a round later.
            for step in range(3, 9):
                training.train([step])
                launched[:] = values_of(model)
                if step == 3:
                    model[2].register_forward_pre_hook(look)

        if rank == 2:
            optimizer.buckets[-1].pack = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(OSError if rank == 2 else PeerError):
            go_on()
        assert rank == 2 or unmixed(model, launched) == len(launched)

    run_threads(4, main)
    # They had mixed the first bucket when the last did not come.
    assert all(0 < each < 6 for each in left.values())


def spread(model: nn.Module) -> float:
    return float(flat(model).max() - flat(model).min())


def meet_in_a_forward_pass(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> list[float]:
    """Train a model whose values are all one number, and note how far apart they are.

    Rank 2 dies. Rank 1 sends its last bucket only after the members have to meet again: in the
    middle of a forward pass, in which rank 0 has read the first buckets.
    """
    model = make_model()
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
        param.register_hook(lambda grad: torch.full_like(grad, rank + 1.0))  # type: ignore[no-untyped-call]
    base, elastic = partial(torch.optim.SGD, lr=0.05), Elastic(store=store, stale_after=STALE_AFTER)
    options: dict[str, Any] = {"topology": "complete", "timeout": TIMEOUT, "elastic": elastic}
    training = Training(
        *(rank, None), model=model, base=base, rank=rank, world_size=world_size, **options
    )
    optimizer, waits = training.optimizer, threading.Event()
    spreads, keys = [spread(model)], part_of_run(store, key_prefix(0), timedelta(seconds=20))

    def pack_late(*args: Any, **options: Any) -> Any:
        if not waits.is_set() and optimizer.members == (0, 1) and optimizer.round >= 3:
            epoch = int(keys.get("epoch"))
            waits.set()
            report("waits", epoch)
            # Until rank 0 meets the others again.
            while not keys.check([f"{epoch + 1}/note/0"]):
                time.sleep(0.05)
        return pack(*args, **options)

    if optimizer.round == 0:
        training.train(range(2))
        if rank == 1:
            pack = optimizer.buckets[-1].pack
            optimizer.buckets[-1].pack = pack_late  # type: ignore[method-assign]
        if rank == 2:
            os._exit(1)
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        training.train([optimizer.round])
        report(f"round {optimizer.round}", optimizer.members)
        spreads.append(spread(model))
        time.sleep(0.02)
    training.end()
    return [*spreads, spread(model)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_comes_back_in_a_forward_pass_receives_no_half_mixed_values() -> None:
    with RestartableProcesses(3, meet_in_a_forward_pass) as processes:
        processes.wait_for(1, "waits")
        processes.start(2)
        processes.wait_for_members(2, (0, 1, 2))
        processes.finish()
        assert max(map(max, processes.results())) < 1e-12


def test_gradients_at_other_parameters_than_those_in_flight_are_an_error_on_all_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        training = Training(rank, group, timeout=TIMEOUT, param_as_bucket_view=True)
        training.train(range(2))
        # A rank without a batch takes part.
        training.optimizer.zero_grad()
        training.optimizer.step()

        def go_on() -> None:
            if rank == 0:
                training.train(range(3, 6))
            for param in training.model.parameters():
                param.grad = torch.ones_like(param)
            training.optimizer.step()

        with pytest.raises(CallOrderError, match=r"rank 1: step\(\) expects a forward pass"):
            go_on()

    run_threads(2, main)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("how", ["copied", "replaced"])
def test_weights_that_are_swapped_in_flight_are_refused(how: str, views: bool) -> None:
    """As by an EMA for an evaluation; not after synchronize()."""

    def swap(model: nn.Module, values: list[Tensor]) -> list[Tensor]:
        own = values_of(model)
        for param, value in zip(model.parameters(), values, strict=True):
            if how == "copied":
                param.detach().copy_(value)
            else:
                param.data = value.clone()
        return own

    def main(rank: int, group: dist.ProcessGroup) -> None:
        training = Training(rank, group, timeout=TIMEOUT, param_as_bucket_view=views)
        model, optimizer = training.model, training.optimizer
        training.train(range(2))
        other = values_of(make_model(seed=9))
        if how == "copied" or not views:
            optimizer.synchronize()
            own = swap(model, other)
            assert loss_of(model, rank, 0).isfinite()
            swap(model, own)
            assert torch.equal(flat(model), flatten(own))
        training.train([2])
        swap(model, other)
        match = r"0\.weight.* (changed while|was replaced)"
        with pytest.raises(RuntimeError, match=match), torch.no_grad():
            model(batch(rank, 3))

    run_threads(2, main)


def test_an_export_finds_whole_rounds_and_the_training_goes_on() -> None:
    """Only one rank exports: it computes with fake tensors, which must not be mixed in."""

    # While it exports, torch would call every thread a compiler's.
    alone = threading.Barrier(2, timeout=TIMEOUT)

    def trained(rank: int, group: dist.ProcessGroup, overlap: Any) -> Tensor:
        training = Training(rank, group, overlap=overlap)
        training.train(range(3))
        alone.wait()
        if rank == 0:
            torch.export.export(training.model, (batch(0, 0),))
        alone.wait()
        training.train([3])
        return training.end()

    assert_as_without_overlap(2, trained)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_takes_a_model_that_was_not_wrapped() -> None:
    training, fresh = Training(0, None), make_model()
    training.train(range(2))
    with pytest.raises(AttributeError, match="_Hook"):
        torch.jit.script(training.model)
    fresh.load_state_dict(training.model.state_dict())
    traced = torch.jit.trace(training.model, batch(0, 0))  # type: ignore[no-untyped-call]
    for compiled in (torch.jit.script(fresh), traced):
        assert torch.equal(compiled(batch(0, 1)), training.model(batch(0, 1)))
    training.train([2])
    assert not torch.equal(fresh(batch(0, 1)), training.model(batch(0, 1)))


OTHER, TRAINED = make_model(), make_model()
NEEDS: list[tuple[Any, str, dict[str, Any]]] = [
    (ValueError, "pass model=model", {"overlap": "forward"}),
    (ValueError, r"not have parameters 0\.0, 0\.1", {"overlap": "forward", "model": TRAINED[2:]}),
    (ValueError, "got one with none of its parameters", {"model": OTHER}),
    (ValueError, "got one with none of its parameters", {"overlap": True, "model": OTHER}),
    (TypeError, 'expects a bool, "forward" or a Pacing', {"overlap": "backward"}),
    (TypeError, r"did you mean 'forward'\?\), got 'foward'", {"overlap": "foward"}),
    (TypeError, r"as in comm_dtype=torch\.int8, .* got 'int8'", {"comm_dtype": "int8"}),
]


def test_the_model_has_to_contain_all_parameters() -> None:
    for error, match, options in NEEDS:
        with pytest.raises(error, match=match):
            DecentOptimWrapper(modules.sgd(TRAINED.parameters()), **options)
    optimizer = Training(0, None).optimizer
    with pytest.raises(ValueError, match="expects all parameters of the optimizer in the model"):
        optimizer.add_param_group({"params": list(OTHER.named_parameters("other"))})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({}, "'forward'"),
        ({"extensions": [StateGossip("momentum_buffer"), GradientTracking()]}, "'forward'"),
        ({"model": None}, "True"),
        ({"model": slice(2, None)}, "True"),
        ({"extensions": [StateAverage()]}, "True"),
        ({"overlap": AsItArrives()}, "AsItArrives(max_steps=16)"),
        ({"overlap": False}, "False"),
    ],
)
def test_a_known_model_is_mixed_before_its_forward_pass_unless_something_is_against_it(
    options: dict[str, Any], overlap: str
) -> None:
    model = make_model()
    options = {"model": model, **options}
    if isinstance(part := options["model"], slice):
        options["model"] = model[part]
    optimizer = DecentOptimWrapper(modules.sgd(model.parameters()), **options)
    assert f"overlap={overlap})" in repr(optimizer)
    if options["model"] is model:
        module = DecentralizedDataParallel(optim_fn=modules.sgd, **options)
        assert f"overlap={overlap})" in repr(module.optimizer)


class Blocks(nn.Sequential):
    """Blocks before an output layer, whose weight is read before it is called."""

    def __init__(self, rank: int) -> None:
        blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        super().__init__(*blocks, nn.Linear(6, 3))
        fill(self.double(), rank)

    def forward(self, inputs: Tensor) -> Any:
        # The backward pass does not need this weight, and so would not notice a change.
        last: Any = self[-1]
        return super().forward(inputs @ last.weight)  # type: ignore[no-untyped-call]


# What is compiled, before the model is wrapped or before a step, and for how many shapes: where a
# module is compiled for one only, its hooks run now and then.
COMPILED = [("block", -1, 8), ("model in place", -1, 8), ("model", 2, 8), ("block in place", -1, 1)]


def compile_part(model: Any, part: str, whole: bool) -> Any:
    """Compile a part of a model, as one graph or not; returns what is called as the model."""
    how: dict[str, Any] = {"backend": "eager", "dynamic": False, "fullgraph": whole}
    if part == "model":
        return torch.compile(model, **how)
    if part == "block":
        model[1] = torch.compile(model[1], **how)
    else:
        (model if part == "model in place" else model[1]).compile(**how)
    return model


def train_compiled(rank: int) -> list[list[float]]:
    """Train without a compiler, without overlap and with, and then with each part compiled."""
    dist.init_process_group("gloo")

    def trained(overlap: Any, part: str = "", at: int = -1, limit: int = 8) -> list[float]:
        torch.compiler.reset()
        model = called = Blocks(rank)
        # What begins a pass breaks the graph.
        whole = part == "block"
        if part and at < 0:
            model = called = compile_part(model, part, whole)
        training = Training(rank, None, model=model, overlap=overlap, cap_mb=1e-4)
        with torch.compiler.config.patch(recompile_limit=limit):  # type: ignore[attr-defined]
            for step in range(STEPS):
                if part and step == at:
                    called = compile_part(model, part, whole)
                inputs, now = batch(rank, step, 8 - step % 2, 3), called if step < 3 else model
                training.train([step], lambda *_: now(inputs).square().mean())  # noqa: B023
        return training.end().tolist()

    return [trained(False), trained(True), *(trained("forward", *case) for case in COMPILED)]


@pytest.mark.slow
def test_a_compiled_model_finds_mixed_parameters() -> None:
    for without, late, *others in run_processes(2, train_compiled):
        assert late != pytest.approx(without, abs=1e-4)
        assert [case for case, end in zip(COMPILED, others, strict=True) if end != without] == []
