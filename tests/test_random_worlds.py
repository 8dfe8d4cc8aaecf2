"""Random worlds, schedules, parameters and calls: what is true of all of them."""

from __future__ import annotations

import math

import pytest
import torch
from dense import Oracle
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scripted_ranks import Spec, World, perform, stack

from decent_optim_wrapper import Group
from decent_optim_wrapper.wire.layout import MIB, Layout
from decent_optim_wrapper.wire.plan import plan_buckets

pytestmark = pytest.mark.slow

# The same examples in every run.
seeded = settings(derandomize=True, database=None, deadline=None)

CALLS = [
    *("step", "step", "step", "step_at_lr_zero", "synchronize", "grow", "thaw", "reload", "resume"),
    *("average", "average_for_good", "revert", "averaged", "look"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]


@st.composite
def phases(draw: st.DrawFn, size: int, largest: int) -> list[Group]:
    left = list(draw(st.permutations(range(size))))
    groups = []
    while left:
        count = min(draw(st.sampled_from([2, 3, 1, 5])), largest)
        weight = draw(st.none() | st.floats(0.05, 0.95))
        groups.append(Group(left[:count], weight))
        left = left[count:]
    return groups


SHAPES = st.sampled_from([(), (0,), (2, 0), (700,), (3, 2, 4)]) | st.tuples(st.integers(1, 9))
CAPS = st.sampled_from([1e-9, 100 / MIB, 4096 / MIB, 25])
TRAINING = st.sampled_from(["step", "step_at_lr_zero", "synchronize", "average_for_good", "thaw"])


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    """Any parameters behind one that is neither frozen nor empty."""
    dtype = st.sampled_from(DTYPES)
    others = st.lists(st.builds(Spec, SHAPES, dtype, st.booleans()), max_size=6)
    return [Spec((3,), draw(dtype), frozen=False), *draw(others)]


def looks() -> st.SearchStrategy[list[str]]:
    inside = st.lists(st.sampled_from(["average", "averaged", "look"]), max_size=3)
    return st.sampled_from([["averaged"], ["look"], ["reload"], ["resume"]]) | st.builds(
        lambda names: ["average", *names, "revert"], inside
    )


@st.composite
def worlds(draw: st.DrawFn, smallest: int = 1, largest_group: int = 5) -> World:
    size = draw(st.sampled_from([n for n in (2, 3, 4, 5, 1) if n >= smallest]))
    options = {
        "bucket_cap_mb": CAPS,
        "overlap": st.sampled_from([True, False]),
        "param_as_bucket_view": st.booleans(),
        "comm_dtype": st.sampled_from([None, torch.bfloat16]),
        "in_one_call": st.booleans(),
        "mixing_rate": st.sampled_from([1.0, 0.3]),
        "gossip_every": st.sampled_from([1, 1, 2, 3]),
        "global_avg_every": st.sampled_from([None, None, 2, 3]),
    }
    return World(
        size,
        draw(st.lists(phases(size, largest_group), min_size=1, max_size=4)),
        draw(specs()),
        draw(st.fixed_dictionaries(options)),
    )


PAIR = World(
    2,
    [[Group([0, 1], 0.75)]],
    [Spec((3,), torch.float64, frozen=False)],
    {"overlap": True, "param_as_bucket_view": False, "comm_dtype": None},
)


@settings(seeded, max_examples=20)
@given(world=worlds(), calls=st.lists(st.sampled_from(CALLS), min_size=8, max_size=16))
@example(world=PAIR, calls=["step", "grow", "step", "step"])
@example(world=PAIR, calls=["average", "grow", "average", "revert"])
@example(world=PAIR, calls=["step", "average", "reload", "step"])
@example(world=PAIR, calls=["step", "reload", "resume", "step", "reload", "synchronize"])
def test_whatever_is_called_the_ranks_follow_the_oracle(world: World, calls: list[str]) -> None:
    seen = perform(world, calls), Oracle(world).perform(calls)
    history = zip(["start", *calls], *seen, strict=True)
    for count, (call, ranks, expected) in enumerate(history):
        square = 0.0
        for index, value in enumerate(expected.values):
            slack = world.slack(index, count)
            torch.testing.assert_close(stack(ranks, index), value, rtol=0, atol=slack)
            square += 2 * value[0].numel() * slack**2
        if "step" not in call:
            # A distance is between two values.
            number = pytest.approx(expected.number, rel=0, abs=2 * math.sqrt(square))
            assert [rank.number for rank in ranks] == [number] * world.size


@settings(seeded, max_examples=6)
@given(world=worlds(), script=st.lists(st.tuples(TRAINING, looks()), min_size=3, max_size=6))
def test_evaluating_and_resuming_change_no_bit_of_the_training(
    world: World, script: list[tuple[str, list[str]]]
) -> None:
    plain = perform(world, ["step", *(call for call, _ in script)])
    looked = perform(world, ["step", *(name for call, looks in script for name in (*looks, call))])
    for before, one, other in zip(plain[0], plain[-1], looked[-1], strict=True):
        assert all(map(torch.equal, one.values, other.values))
        assert not torch.equal(before.values[0], one.values[0])


@settings(seeded, max_examples=12)
@given(world=worlds(smallest=2, largest_group=2), rounds=st.integers(1, 6))
def test_pairs_that_agree_stay_bit_for_bit(world: World, rounds: int) -> None:
    assume(any(group.size == 2 for group in world.phases[0]))
    # An exact average of more than two sums, and a first round that is idle sends nothing.
    world.options.update(gossip_every=1, global_avg_every=None)
    calls = ["average_for_good", *["step_at_lr_zero"] * rounds, "synchronize"]
    _, start, *history = perform(world, calls)
    assert any(rank.number > 0 for rank in history[0])
    for ranks in history:
        for rank in ranks:
            assert all(map(torch.equal, rank.values, start[0].values))


@settings(seeded, max_examples=60)
@given(specs=specs(), cap=CAPS, as_view=st.booleans())
def test_every_tensor_is_in_one_bucket_up_to_the_cap(
    specs: list[Spec], cap: float, as_view: bool
) -> None:
    tensors = [spec.draw(index) for index, spec in enumerate(specs)]
    buckets = plan_buckets(tensors, Layout(cap, as_view=as_view))

    order = {id(tensor): index for index, tensor in enumerate(tensors)}
    plan = [[order[id(tensor)] for tensor in bucket.members] for bucket in buckets]
    assert sorted(index for members in plan for index in members) == list(range(len(tensors)))
    assert plan == sorted(sorted(members) for members in plan)
    last: dict[torch.dtype, int] = {}
    for members in plan:
        (dtype,) = {tensors[i].dtype for i in members}
        size = sum(tensors[i].nbytes for i in members)
        assert len(members) == 1 or size <= cap * MIB
        assert dtype not in last or last[dtype] + tensors[members[0]].nbytes > cap * MIB
        last[dtype] = size
