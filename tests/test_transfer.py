"""How values travel: split updates, parameters as bucket views, half the bytes, statistics."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, cast

import problem
import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from problem import (
    TINY_CAP_MB,
    backward,
    deviations,
    flatten,
    in_one_call,
    make_params,
    sgd,
    take_steps,
)
from ranks import run_processes, run_threads
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from decent_optim_wrapper import DecentOptimWrapper, Group, Topology, TopologyFactory
from decent_optim_wrapper.comm import connections
from decent_optim_wrapper.comm.process_groups import new_communicator
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.optim.splittable import SPLITTABLE
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.plan import plan_buckets

STEPS = 5
BYTES = sum(param.nbytes for param in make_params())


wrap = partial(problem.wrap, topology="ring")


def train(
    rank: int,
    group: dist.ProcessGroup | None,
    make_base: Callable[[Sequence[Tensor]], Optimizer],
    **options: Any,
) -> Tensor:
    params = make_params(dtype=torch.float32)
    optimizer = wrap(params, group, base=make_base(params), **options)
    take_steps(optimizer, params, rank, range(STEPS))
    optimizer.synchronize()
    return flatten(params)


CASES = [
    *((kind, variant) for kind in SPLITTABLE for variant in ({}, {"foreach": True})),
    *((kind, {"fused": True}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)),
]


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_a_split_update_is_the_whole_one_bit_for_bit(
    kind: type[Optimizer], variant: dict[str, Any]
) -> None:
    def make_base(params: Sequence[Tensor]) -> Optimizer:
        wanted = {"lr": 0.05, "weight_decay": 0.01, **variant}
        known = inspect.signature(kind.__init__).parameters
        arguments: dict[str, Any] = {key: wanted[key] for key in wanted if key in known}
        if kind is optim.Muon:
            params = [param for param in params if param.ndim == 2]
            return kind(params, **arguments)
        groups: list[Any] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
        return kind(groups, **arguments)

    split = train(0, None, make_base)
    whole = train(0, None, lambda params: in_one_call(make_base(params)))
    assert torch.equal(split, whole)
    assert not torch.equal(split, flatten(make_params(dtype=torch.float32)))


def test_only_listed_types_without_hooks_are_split() -> None:
    class Coupled(optim.SGD):
        pass

    params = make_params()
    base = sgd(params)
    wrap(params, base=base)
    assert LocalUpdate(base).splits
    handle = base.register_step_post_hook(lambda *_: None)
    assert not LocalUpdate(base).splits
    handle.remove()
    coupled = Coupled(params, lr=0.1)
    assert not LocalUpdate(coupled).splits
    StepLR(base, 1)
    assert LocalUpdate(base).splits
    base.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert not LocalUpdate(base).splits


def test_a_parameter_in_no_bucket_is_still_updated() -> None:
    params, reference = make_params(), make_params()
    params[1].requires_grad_(False)
    optimizer, plain = wrap(params), sgd(reference)
    params[1].requires_grad_(True)
    for step in range(3):
        backward(params, 0, step)
        backward(reference, 0, step)
        optimizer.step()
        plain.step()
    assert torch.equal(flatten(params), flatten(reference))
    assert not torch.equal(params[1], make_params()[1])


def test_the_groups_survive_an_update_that_raises() -> None:
    params = make_params()
    optimizer = wrap(params)
    groups = optimizer.param_groups
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == len(params)


def test_views_keep_values_shapes_and_layouts_and_share_storage() -> None:
    torch.manual_seed(0)
    params = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).T,
        torch.randn(()),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(2, 2, dtype=torch.complex64),
    ]
    before = [param.clone() for param in params]
    strides = [param.stride() for param in params]
    for param in params:
        param.requires_grad_()
    optimizer = DecentOptimWrapper(sgd(params), param_as_bucket_view=True)
    assert all(map(torch.equal, params, before))
    assert [param.stride() for param in params] == strides
    assert len({param.untyped_storage().data_ptr() for param in params if param.numel()}) == 2
    sum(param.abs().sum() for param in params).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(params[0], before[0])


def replace_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


def transpose_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.T


def reshape_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.view(-1)


def convert(layer: nn.Linear) -> None:
    layer.double()


@pytest.mark.parametrize("replace", [replace_data, transpose_data, reshape_data, convert])
def test_a_replaced_storage_is_named_by_whatever_comes_next(
    replace: Callable[[nn.Linear], None],
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    base = optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(base, param_as_bucket_view=True, bucket_cap_mb=TINY_CAP_MB)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    replace(cast(nn.Linear, model[1]))
    words = r"rank 0: .* storage of 1\.weight was replaced .*; move"
    for call in ("step", "global_avg", "consensus_distance", "synchronize"):
        with pytest.raises(RuntimeError, match=words):
            getattr(optimizer, call)()


def test_parameters_on_the_same_memory_are_named() -> None:
    whole = torch.zeros(10)
    params = [("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(whole[:6]))]
    DecentOptimWrapper(optim.SGD([*params, ("c", nn.Parameter(whole[6:]))]))
    base = optim.SGD([*params, ("c", nn.Parameter(whole[5:]))])
    for views in (True, False):
        with pytest.raises(ValueError, match="b and c overlap; tie them by using the same"):
            DecentOptimWrapper(base, param_as_bucket_view=views)


def test_views_of_some_size_start_at_aligned_addresses_and_small_ones_lie_close() -> None:
    params = make_params()
    DecentOptimWrapper(sgd(params), param_as_bucket_view=True)
    assert {param.data_ptr() % 64 for param in params if param.nbytes >= 64} == {0}
    tiny = [torch.ones(1, requires_grad=True) for _ in range(1000)]
    DecentOptimWrapper(sgd(tiny), param_as_bucket_view=True)
    assert tiny[0].untyped_storage().nbytes() == 4000


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_a_difference_beyond_the_wires_range_is_no_overflow(views: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = [torch.full((5,), 40_000.0 * (-1) ** rank, requires_grad=True) for _ in range(3)]
        optimizer = wrap(
            params,
            group,
            base=optim.SGD(params, lr=0.0),
            sync_at_start=False,
            comm_dtype=torch.float16,
            param_as_bucket_view=views,
        )
        optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    for row in run_threads(2, main):
        assert torch.equal(row, torch.zeros(15, dtype=torch.float64))


def test_views_may_be_made_under_inference_mode() -> None:
    params = make_params()
    with torch.inference_mode():
        optimizer = wrap(params, param_as_bucket_view=True)
    backward(params, 0, 0)
    optimizer.step()
    assert not torch.equal(flatten(params), flatten(make_params()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "views", "name"),
    pairwise({"bf16": torch.bfloat16, "f16": torch.float16}, VIEWS, named("ring", "one-peer-exp")),
)
def test_rounding_on_the_wire_moves_no_mean_and_still_reaches_consensus(
    dtype: torch.dtype, views: bool, name: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(
            params,
            group,
            topology=name,
            comm_dtype=dtype,
            base=optim.SGD(params, lr=0.0),
            sync_at_start=False,
            param_as_bucket_view=views,
        )
        history = [flatten(params)]
        for _ in range(40):
            optimizer.step()
            history.append(flatten(params))
        return torch.stack(history)

    histories = run_threads(4, main)
    spread = deviations(histories).abs().amax(dim=(1, 2))
    rounding = torch.finfo(dtype).eps * max(history[0].abs().max() for history in histories)
    assert spread[0] > 0.5
    assert spread[-1] < 2 * rounding


@pytest.mark.parametrize(("comm", "share"), [(None, 1.0), (torch.bfloat16, 0.25)])
def test_stats_are_those_of_the_last_step_whatever_came_after(
    comm: torch.dtype | None, share: float
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, comm_dtype=comm)
        assert optimizer.stats().bytes_sent == 0
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
            stats = optimizer.stats()
            assert stats.bytes_sent == BYTES * share
            assert stats.rounds == step + 1
            assert stats.buckets == 3
            assert stats.mix_seconds > 0
            assert stats.update_seconds > 0
            assert (stats.wait_seconds > 0) == (step > 0)
        if rank:
            time.sleep(0.2)
        with optimizer.averaged():
            optimizer.consensus_distance()
        optimizer.synchronize()
        assert optimizer.stats() == stats

    run_threads(2, main)


def profiled(rank: int) -> tuple[int, set[str]]:
    """The bytes that mixing takes at most, and the ranges of some steps."""
    (bucket,) = plan_buckets([torch.ones(6_000_000)], Layout(25, as_view=True))
    outgoing, incoming = bucket.pair(needs_snapshot=True)
    incoming.data.zero_()
    bucket.pack(outgoing)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        bucket.shift_(incoming, outgoing, 0.5)
    assert bucket.members[0].eq(0.5).all()
    taken = int(max(abs(event.cpu_memory_usage) for event in recorded.events()))
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = wrap(params)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        take_steps(optimizer, params, rank, range(2))
    dist.destroy_process_group()
    return taken, {event.key for event in recorded.key_averages()}


@pytest.mark.slow
def test_a_profile_shows_the_ranges_and_no_second_copy_where_late_views_are_mixed() -> None:
    # In processes: a profile that is freed by another thread can crash.
    for taken, names in run_processes(2, profiled):
        assert 0 < taken < 6_000_000
        assert {f"decent::{what}" for what in ("wait", "mix", "update", "launch")} <= names


def reachable(root: object) -> Iterator[object]:
    """What `root` holds, directly or not."""
    seen: set[int] = set()
    found = [root]
    while found:
        thing = found.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(thing))
        yield thing
        found += gc.get_referents(thing)


def held_bytes(root: object) -> dict[int, int]:
    """Size of every storage that can be reached from `root`, by address."""
    storages = [each.untyped_storage() for each in reachable(root) if isinstance(each, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comm", "dtype", "views", "topology"),
    pairwise(
        {"exact": None, "bf16": torch.bfloat16, "int8": torch.int8},
        {"float32": torch.float32, "bfloat16": torch.bfloat16},
        VIEWS,
        named("ring", "complete", "pairs-and-all"),
    ),
)
def test_wire_buffers_stay_within_their_limit(
    views: bool, topology: str, dtype: torch.dtype, comm: torch.dtype | None
) -> None:
    """Counts the bytes of every tensor that the rounds hold, beyond the parameters."""
    limit = 1.0 if views else 2.0
    # Values that take no more bytes than their codes travel as they are, but in no sum.
    coded_pairs = comm is not None and comm.itemsize < dtype.itemsize
    if comm is not None and (topology != "ring" or coded_pairs):
        # Two messages, and a packed copy without views.
        codes = 2 * comm.itemsize * 65 / 64
        if topology != "ring":
            # In float32 the error of this rank's quarter, beside what it is sent as.
            codes += (4 + comm.itemsize * 65 / 64) / 4
        # A reference in float32 for each group.
        pairs = coded_pairs * {"ring": 2, "complete": 0, "pairs-and-all": 1}[topology]
        codes += 4 * (pairs + (topology != "ring"))
        limit += codes / dtype.itemsize - 1
    elif dtype == torch.bfloat16 and topology != "ring":
        limit = 2.0  # summed in float32

    class PairsAndAll(Topology):
        def assign_groups(self) -> list[list[list[int]]]:
            return [[[rank - rank % 2, rank - rank % 2 + 1], [0, 1, 2, 3]] for rank in range(4)]

    built = PairsAndAll(4) if topology == "pairs-and-all" else topology

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float, float]:
        params = [torch.zeros(50_000, dtype=dtype, requires_grad=True) for _ in range(4)]
        size = sum(param.nbytes for param in params)
        optimizer = DecentOptimWrapper(
            optim.SGD(params, lr=0.1),
            topology=built,
            process_group=group,
            bucket_cap_mb=0.4,
            param_as_bucket_view=views,
            comm_dtype=comm,
        )
        own = {param.untyped_storage().data_ptr() for param in params}

        def beyond() -> float:
            held = held_bytes([optimizer])
            return sum(n for address, n in held.items() if address not in own) / size

        for _ in range(3):
            optimizer.step()
        rounds = beyond()
        optimizer.global_avg()
        averaged = beyond()
        optimizer.revert_global_avg()
        return rounds, averaged, beyond()

    for rounds, averaged, after in run_threads(4, main):
        assert 0 < rounds <= limit + 0.01
        assert averaged == pytest.approx(rounds + 1, abs=0.01)
        assert after == pytest.approx(rounds, abs=0.01)


def groups_held(topology: Topology) -> int:
    return sum(isinstance(each, Group) for each in reachable(topology))


def test_a_topology_made_by_name_keeps_no_schedules_of_other_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        # Its schedules are built for all ranks together.
        optimizer = wrap(make_params(), group, topology="greedy")
        for _ in range(3):
            optimizer.step()
        optimizer.synchronize()
        kept = groups_held(optimizer.topology)
        assert len(optimizer.topology.groups(0)) == 2
        return kept, groups_held(optimizer.topology)

    for kept, built in run_threads(4, main):
        assert kept == 0 < built


def test_pairs_need_no_process_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counting(like: Any, store: Any, rank: int, size: int, *bounds: Any) -> Any:
        sizes.append(size)
        return new_communicator(like, store, rank, size, *bounds)

    monkeypatch.setattr(connections, "new_communicator", counting)

    def main(rank: int, group: dist.ProcessGroup) -> None:
        topology = TopologyFactory.create("one-peer-exp", 8)
        optimizer = wrap(make_params(), group, topology=topology)
        optimizer.step()
        optimizer.synchronize()

    run_threads(8, main)
    # One for all ranks, on each of them.
    assert sizes == [8] * 8


def test_a_round_costs_calls_per_bucket_and_not_per_parameter() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # To look at an attribute costs nothing on a GPU.
            Counting.calls += func.__name__ != "__get__"
            return func(*args, **(kwargs or {}))

    def main(rank: int, group: dist.ProcessGroup, count: int) -> int:
        params = [torch.zeros(10, requires_grad=True) for _ in range(count)]
        optimizer = wrap(params, group, bucket_cap_mb=25, base=optim.SGD(params, lr=0.1))
        optimizer.step()
        idle_round = optimizer.join_hook().main_hook
        if rank == 0:
            Counting.calls = 0
        with Counting() if rank == 0 else nullcontext():
            idle_round()
        optimizer.synchronize()
        return Counting.calls

    few = run_threads(2, lambda rank, group: main(rank, group, 4))[0]
    many = run_threads(2, lambda rank, group: main(rank, group, 400))[0]
    assert few > 0
    assert many == few


def test_a_comm_dtype_that_saves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8, torch\.int4, a Codec or None"):
        wrap(make_params(), comm_dtype=torch.float32)
