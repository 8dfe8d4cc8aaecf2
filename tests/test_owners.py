"""What others do with the parameters of a wrapper: changes and steps that do not come from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import due_matrix, mix, put, train_densely
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

from decent_optim_wrapper import Group, Schedule, Topology, TopologyFactory

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
    """The sum has overwritten what was sent."""

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

    with_looks, without = (
        run_threads(3, lambda rank, group, looks=looks: main(rank, group, looks))
        for looks in (True, False)
    )
    assert all(map(torch.equal, with_looks, without))


@pytest.mark.parametrize(
    "make", [sgd, lambda p: in_one_call(torch.optim.SGD(p, lr=0.1, fused=True))]
)
@pytest.mark.parametrize(("topology", "world_size"), [("ring", 2), ("complete", 3)])
def test_two_wrapped_optimizers_of_one_parameter_lose_no_update(
    topology: str, world_size: int, make: Any
) -> None:
    """As a critic and an actor do that share an encoder."""
    dtype = torch.float64

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        encoder, critic, actor = (make_params(seed, dtype) for seed in range(3))
        bases = [torch.optim.SGD([*encoder, *head], lr=0.1) for head in (critic, actor)]
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
        values = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        embedding = nn.Embedding.from_pretrained(values, freeze=False, max_norm=1.0)
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
