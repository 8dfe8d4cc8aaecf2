"""What others do with the parameters of a wrapper: changes and steps that do not come from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import due_matrix, mix, train_densely
from modules import backward as backward_of
from modules import batch, fill
from modules import wrap as wrap_module
from problem import (
    backward,
    draw_gradients,
    flatten,
    in_one_call,
    make_params,
    sgd,
    take_steps,
    wrap,
)
from ranks import run_threads
from scripted_ranks import listed
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from decent_optim_wrapper import (
    DecentOptimWrapper,
    DecentralizedDataParallel,
    Group,
    Schedule,
    Topology,
    TopologyFactory,
)
from decent_optim_wrapper.config import Overlap
from decent_optim_wrapper.errors import CallOrderError

STEPS = 6
LOPSIDED = [[Group([0, 1], 0.9), Group([2, 3], 0.2)], [Group([1, 2, 3], 0.6)]]
CREATED = {
    "pairs": TopologyFactory.create("ring", 4),
    "groups": TopologyFactory.create("complete", 3),
    "other weights": listed(4, LOPSIDED),
}


@torch.no_grad()
def push(params: Sequence[Tensor], rank: int, step: int) -> None:
    """What another optimizer does with some of the parameters."""
    for param in params[:: 1 + step % 2]:
        param.add_(0.1 * rank + step)


def clip(params: Sequence[Tensor], rank: int, step: int) -> None:
    """Half of the clipped values are put in place of the old ones."""
    for param in params[::2]:
        param.data = param.data.clamp(-0.2, 0.2)
    with torch.no_grad():
        params[1].clamp_(-0.2, 0.2)


Change = Callable[[Sequence[Tensor], int, int], None]


def train(
    topology: Topology | str, world_size: int, change: Change, **options: Any
) -> list[list[Tensor]]:
    """Train with changes after each step; the parameters by rank."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, overlap=True, **options)
        assert len(optimizer.buckets) > 1
        for step in range(STEPS):
            take_steps(optimizer, params, rank, [step])
            change(params, rank, step)
        optimizer.synchronize()
        return params

    return run_threads(world_size, main)


@pytest.mark.parametrize("average_every", [None, 3])
@pytest.mark.parametrize("change", [push, clip])
@pytest.mark.parametrize("topology", CREATED.values(), ids=CREATED)
def test_parameters_that_others_change_between_two_steps_follow_the_oracle(
    topology: Topology, change: Change, average_every: int | None
) -> None:
    size, schedule = topology.world_size, Schedule(global_avg_every=average_every)
    worlds = [make_params() for _ in range(size)]
    bases = [sgd(params) for params in worlds]
    expected = train_densely(
        worlds,
        STEPS,
        overlap=True,
        compute=lambda rank, step: backward(worlds[rank], rank, step),
        update=lambda rank, step: bases[rank].step(),
        land=lambda step: mix(worlds, due_matrix(topology, 1, average_every, 1.0, step)),
        change=lambda rank, step: change(worlds[rank], rank, step),
    )
    rows = torch.stack([*map(flatten, train(topology, size, change, schedule=schedule))])
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-11)
    unchanged = torch.stack([*map(flatten, train(topology, size, lambda *_: None))])
    assert (unchanged - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("topology", "world_size"), [("ring", 2), ("complete", 3)])
def test_parameters_that_nobody_changes_keep_their_bits(topology: str, world_size: int) -> None:
    def change_first(params: Sequence[Tensor], rank: int, step: int) -> None:
        push(params[:1], rank, step)

    def put_elsewhere(params: Sequence[Tensor], rank: int, step: int) -> None:
        params[0].data = params[0].data.clone()

    plain = train(topology, world_size, lambda *_: None)
    changed = train(topology, world_size, change_first)
    for one, other in zip(plain, changed, strict=True):
        assert not torch.equal(one[0], other[0])
        assert all(map(torch.equal, one[1:], other[1:]))
    elsewhere = train(topology, world_size, put_elsewhere)
    assert all(torch.equal(*map(flatten, pair)) for pair in zip(plain, elsewhere, strict=True))


def test_a_change_after_flights_without_one_is_named_in_larger_groups() -> None:
    """The sum has overwritten what was sent, unless a flight before had changes."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        optimizer = wrap(params, group, topology="complete", overlap=True)
        take_steps(optimizer, params, rank, range(3))
        push(params[:1], rank, 0)
        before = flatten(params)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=rf"rank {rank}: .* of 0\.0 were changed .* call"
            ):
                optimizer.step()
        assert torch.equal(flatten(params), before)
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3):
            take_steps(optimizer, params, rank, [step])
            push(params[:1], rank, 0)
        optimizer.synchronize()
        return flatten(params)

    assert not torch.equal(*run_threads(3, main)[:2])


@pytest.mark.parametrize("average_every", [None, 2])
def test_an_average_that_is_put_in_place_and_out_again_is_no_change(
    average_every: int | None,
) -> None:
    def main(rank: int, group: dist.ProcessGroup, looks: bool) -> Tensor:
        params = make_params(seed=rank)
        schedule = Schedule(global_avg_every=average_every)
        options: Any = {"overlap": True, "sync_at_start": False, "schedule": schedule}
        optimizer = wrap(params, group, topology="complete", **options)
        for step in range(STEPS):
            take_steps(optimizer, params, rank, [step])
            push(params[:1], rank, step)
            if looks:
                own = flatten(params)
                with optimizer.averaged():
                    assert not torch.equal(flatten(params), own)
                assert torch.equal(flatten(params), own)
            push(params[1:2], rank, step)
        optimizer.synchronize()
        return flatten(params)

    with_looks, without = (run_threads(3, partial(main, looks=looks)) for looks in (True, False))
    assert all(map(torch.equal, with_looks, without))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("topology", "world_size"), [("ring", 2), ("complete", 3)])
def test_two_wrapped_optimizers_of_one_parameter_lose_no_update(
    topology: str, world_size: int, whole: bool
) -> None:
    """As a critic and an actor do that share an encoder; fused kernels do not count changes."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        encoder, critic, actor = map(make_params, range(3))
        heads = [[*encoder, *head] for head in (critic, actor)]
        bases: list[Optimizer] = [torch.optim.SGD(each, lr=0.1, fused=True) for each in heads]
        bases = [*map(in_one_call, bases)] if whole else bases
        wrappers = [wrap((), group, base, topology=topology, overlap=True) for base in bases]
        start = flatten(encoder)
        moved = torch.zeros_like(start)
        for step in range(STEPS):
            for number, wrapper in enumerate(wrappers):
                wrapper.zero_grad()
                moved -= 0.1 * draw_gradients(encoder, rank, 2 * step + number)
                wrapper.step()
        for wrapper in wrappers:
            wrapper.synchronize()
        return torch.stack([flatten(encoder) - start, moved])

    moved, expected = torch.stack(run_threads(world_size, main)).mean(0)
    torch.testing.assert_close(moved, expected, rtol=1e-11, atol=1e-11)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(("topology", "world_size"), [("ring", 2), ("complete", 3)])
def test_an_embedding_that_renormalises_in_its_forward_pass_moves_the_mean_by_that(
    topology: str, world_size: int
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        values = nn.Parameter(torch.randn(6, 5, generator=generator, dtype=torch.float64))
        embedding = nn.Embedding(6, 5, max_norm=1.0)
        embedding.weight = values
        params = [*embedding.parameters(), *make_params()]
        base = torch.optim.SGD(params, lr=0.1)
        optimizer = wrap(params, group, base, topology=topology, overlap=True)
        start = flatten(params)
        moved = torch.zeros_like(start)
        for step in range(STEPS):
            before = flatten(params)
            embedding(torch.tensor([rank, step, 0]))
            assert not torch.equal(flatten(params), before)
            moved += flatten(params) - before - 0.1 * draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return torch.stack([flatten(params) - start, moved])

    moved, expected = torch.stack(run_threads(world_size, main)).mean(0)
    torch.testing.assert_close(moved, expected, rtol=1e-11, atol=1e-11)


def scheduled(base: Optimizer) -> Optimizer:
    """A scheduler replaces the base's step."""
    StepLR(base, 1)
    return base


class InTwoSteps(Optimizer):
    """As SAM is published: a pair of steps, the second one by an optimizer inside it."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        torch._foreach_add_(self.param_groups[0]["params"], 0.01)

    @torch.no_grad()
    def second_step(self) -> None:
        torch._foreach_sub_(self.param_groups[0]["params"], 0.01)
        self.base_optimizer.step()

    apply = second_step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_is_moved_to_another_group_has_the_options_of_that(overlap: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        groups: list[Any] = [{"params": params[:-1]}, {"params": params[-1:], "lr": 0.0}]
        base = torch.optim.SGD(groups, lr=0.1)
        optimizer = wrap(params, group, base, topology="complete", overlap=overlap)
        assert len(optimizer.buckets) > 1
        # The same gradients on all ranks, so that mixing moves nothing.
        take_steps(optimizer, params, 0, [0])
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].insert(0, moved)
        before, other = moved.clone(), params[0].clone()
        take_steps(optimizer, params, 0, [1, 2])
        optimizer.synchronize()
        assert torch.equal(moved, before)
        assert not torch.equal(params[0], other)

    run_threads(2, main)


@pytest.mark.parametrize("kind", [None, in_one_call, scheduled])
def test_a_step_of_the_base_itself_is_refused_as_long_as_a_wrapper_exists(kind: Any) -> None:
    params = make_params(dtype=torch.float32)
    base: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    base = base if kind is None else kind(base)
    wrapper = wrap(params, base=base, topology="ring")
    scaler = GradScaler("cpu", init_scale=8.0)
    for own in (2, 4):
        backward(params, 0, 0)
        before = flatten(params)
        scaler.scale(torch.ones(1))
        for step in (base.step, wrapper.optimizer.step, lambda: scaler.step(base)):
            with pytest.raises(CallOrderError, match=r"rank 0: .* makes no round; call step\(\)"):
                step()
        scaler.update()
        assert torch.equal(flatten(params), before)
        take_steps(wrapper, params, 0, range(2))
        assert wrapper.round == own
        assert not torch.equal(flatten(params), before)
    # Another training phase with the same base.
    later = wrap(params, base=base, topology="ring")
    take_steps(later, params, 0, range(2))
    take_steps(wrapper, params, 0, range(2))
    del wrapper
    with pytest.raises(CallOrderError, match="makes no round"):
        base.step()
    del later
    before = flatten(params)
    base.step()
    assert not torch.equal(flatten(params), before)


def test_a_step_that_only_creates_the_state_of_the_base_is_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapper = wrap((), base=base)
    before = flatten([*model.parameters()])
    assert get_optimizer_state_dict(model, base)["state"]
    assert torch.equal(flatten([*model.parameters()]), before)
    assert wrapper.round == 0


def test_a_step_in_two_parts_is_refused_and_made_by_a_closure() -> None:
    params = make_params()
    base = InTwoSteps(params)
    wrapper: Any = wrap(params, base=base, topology="ring", overlap=False)
    backward(params, 0, 0)
    before = flatten(params)
    for part in (wrapper.first_step, wrapper.second_step, wrapper.apply):
        with pytest.raises(RuntimeError, match=r"pass a closure to step\(\)"):
            part()
    base.first_step()
    with pytest.raises(CallOrderError, match=r"pass a closure to step\(\)"):
        base.second_step()
    torch.testing.assert_close(flatten(params), before)
    assert wrapper.round == 0
    for step in range(2):
        wrapper.step(lambda step=step: backward(params, 0, step))
    assert wrapper.round == 2
    assert not torch.allclose(flatten(params), before)


def make_model(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    fill(model, seed)
    return model


def train_model(optimizer: Optimizer, model: nn.Module, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward_of(model(batch(rank, step, 2, 4)).square().sum())
        optimizer.step()


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("overlap", ["forward", True])
@pytest.mark.parametrize(("topology", "world_size"), [("ring", 2), ("complete", 3)])
def test_a_wrapper_starts_when_the_rounds_of_older_ones_are_finished(
    topology: str, world_size: int, overlap: Overlap, views: bool, sync: bool, replaces: bool
) -> None:
    """As after a search for a learning rate, or in the next phase of a training."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        models = [make_model(rank) for _ in range(2)]
        options: Any = {"overlap": overlap, "param_as_bucket_view": views, "topology": topology}
        ends = []
        for model, again in zip(models, (False, True), strict=True):
            params = [*model.parameters()]
            options |= {"comm_dtype": torch.float32}
            made: Any = partial(wrap, (), group, model=model, sync_at_start=sync, **options)
            older = made(torch.optim.SGD(params, lr=0.1))
            assert len(older.buckets) > 1
            train_model(older, model, rank, 3)
            if replaces:
                if not again:
                    older.synchronize()
                model.load_state_dict(make_model(rank + 9).state_dict())
            elif not again:
                older.synchronize()
            if again:
                newer = made(torch.optim.SGD(params, lr=0.1))
                start = flatten(params)
                model(batch(rank, 9, 2, 4))
                newer.synchronize()
                assert torch.equal(flatten(params), start)
            ends.append(flatten(params))
        return ends[0], ends[1]

    settled, starts = zip(*run_threads(world_size, main), strict=True)
    for rank, start in enumerate(starts):
        assert torch.equal(start, settled[0 if sync else rank])


def test_a_backward_pass_of_a_module_that_a_newer_one_has_replaced_is_refused() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = make_model(0)
        wrapped: Any = partial(wrap_module, model, group, param_as_bucket_view=False)
        older = wrapped()
        newer = wrapped()
        before = flatten([*model.parameters()])
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .* drop it \(del\) before"):
            backward_of(newer(batch(rank, 0, 2, 4)).square().sum())
        assert torch.equal(flatten([*model.parameters()]), before)
        assert newer.optimizer.round == older.optimizer.round == 0
        del older
        newer.optimizer.zero_grad()
        backward_of(newer(batch(rank, 0, 2, 4)).square().sum())
        assert newer.optimizer.round == 1
        assert not torch.equal(flatten([*model.parameters()]), before)

    run_threads(2, main)


def test_a_module_that_ignores_the_parameters_of_an_older_one_does_not_replace_it() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model, head = make_model(0), make_model(1)
        both = nn.Sequential(model, head)
        wrapped: Any = partial(wrap_module, group=group, param_as_bucket_view=False)
        older = wrapped(head)
        newer = wrapped(both, ignored_params=[*head.parameters()])
        before = flatten([*both.parameters()])
        backward_of(newer(batch(rank, 0, 2, 4)).square().sum())
        assert newer.optimizer.round == older.optimizer.round == 1
        assert not torch.equal(flatten([*both.parameters()]), before)

    run_threads(2, main)


@pytest.mark.parametrize("kind", ["wrapper", "module"])
def test_ranks_go_on_from_a_checkpoint_after_a_change_by_hand(kind: str) -> None:
    """Nothing of the round is mixed yet when the change is found, so no connection is closed."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        fill(model, 0)
        changed = next(model.parameters())
        options: dict[str, Any] = {"process_group": group, "topology": "one-peer-exp"}
        optimizer: DecentOptimWrapper
        run: nn.Module = model
        if kind == "wrapper":
            base = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = DecentOptimWrapper(base, model=model, bucket_cap_mb=1e-4, **options)
        else:
            sgd = partial(torch.optim.SGD, lr=0.01)
            wrapped = DecentralizedDataParallel(model, sgd, bucket_size_in_mb=1e-4, **options)
            run, optimizer = wrapped, wrapped.optimizer
        assert len(optimizer.buckets) >= 2

        def step() -> None:
            run(torch.full((3, 9), float(rank))).sum().backward()
            if kind == "wrapper":
                optimizer.step()
                optimizer.zero_grad()

        step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step()
        if rank == 0:
            with torch.no_grad():
                changed.add_(1)
            with pytest.raises(RuntimeError, match="changed"):
                run(torch.ones(3, 9))
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        before = flatten([*model.parameters()])
        for _ in range(3):
            step()
        assert not torch.equal(flatten([*model.parameters()]), before)
        optimizer.global_avg(may_revert=False)
        return flatten([*model.parameters()])

    first, *others = run_threads(4, main)
    assert all(torch.equal(first, other) for other in others)
