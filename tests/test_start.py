"""The start: wrong arguments, an error of one rank that all learn of, ranks and their nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from dense import oracle
from modules import make_model
from modules import wrap as wrap_module
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import run_processes, run_threads
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, Schedule, TopologyFactory
from decent_optim_wrapper.start.world import ranks_per_node


def wrap(params: list[Tensor], group: dist.ProcessGroup | None = None, **kw: Any) -> Any:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    return DecentOptimWrapper(kw.pop("base", None) or sgd(params), process_group=group, **kw)


def failing() -> Any:
    raise ZeroDivisionError("no buffers today")
    yield


# What one rank passes, and the error that it raises itself.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "settings": (lambda: {"bucket_cap_mb": "x"}, TypeError, "bucket_cap_mb expects"),
    "timeout": (lambda: {"timeout": "soon"}, TypeError, "timeout expects"),
    "elastic": (lambda: {"elastic": True}, TypeError, "elastic expects an Elastic or None"),
    "schedule": (lambda: {"schedule": 2}, TypeError, "schedule expects a Schedule"),
    "outer": (
        lambda: {"schedule": Schedule(outer=cast(Any, len))},
        TypeError,
        "from a list of tensors, but it has returned a int",
    ),
    "size": (lambda: {"world_size": 7}, ValueError, "contradicts the process group"),
    "nodes": (lambda: {"local_world_size": "a"}, TypeError, "local_world_size expects"),
    "topology": (lambda: {"topology": "rign"}, ValueError, "unknown topology 'rign'"),
    "instance": (
        lambda: {"topology": TopologyFactory.create("ring", 8)},
        ValueError,
        "was built for world_size=8",
    ),
    "base": (lambda: {"base": torch.optim.LBFGS(make_params())}, ValueError, "overlap=False"),
    "parameters": (
        lambda: {"base": sgd([torch.zeros(2, device="meta", requires_grad=True)])},
        ValueError,
        "on the meta device",
    ),
    "buffers": (lambda: {"buffers": failing()}, ZeroDivisionError, "no buffers today"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("case", BAD)
def test_an_error_of_one_rank_ends_the_start_on_all_of_them(case: str, bad_rank: int) -> None:
    make_options, kind, words = BAD[case]

    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, Tensor]:
        bad = rank == bad_rank
        with pytest.raises(kind if bad else ValueError) as caught:
            wrap(make_params(), group, **(make_options() if bad else {}))
        # Nothing half built is left: the next start works, in phases and over several buckets.
        params = make_params()
        optimizer = wrap(params, group, topology="greedy")
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return str(caught.value), flatten(params)

    results = run_threads(3, main)
    for rank, (text, _) in enumerate(results):
        if rank == bad_rank:
            assert words in text
            assert "the ranks cannot start" not in text
        else:
            assert f"rank {bad_rank} raised {kind.__name__}: " in text
            assert words in text
    expected = oracle(TopologyFactory.create("greedy", 3), 3, True, sgd)
    rows = torch.stack([row for _, row in results])
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)


def test_errors_of_several_ranks_are_each_their_own() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        options: list[dict[str, Any]] = [{}, {"overlap": 1}, {"topology": "rign"}]
        with pytest.raises((TypeError, ValueError)) as caught:
            wrap(make_params(), group, **options[rank])
        return str(caught.value)

    text, *own = run_threads(3, main)
    # Rank 2 would only fail after an exchange, in which it learns of rank 1.
    assert "rank 1 raised TypeError: overlap expects a bool" in text
    assert own[0].startswith("overlap expects a bool")
    assert "rank 1 raised TypeError" in own[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grad_clip_norm": "x"}, "TypeError: grad_clip_norm expects"),
        ({"optim_fn": torch.optim.LBFGS}, "ValueError: LBFGS"),
        ({"topology": "rign"}, "ValueError: unknown topology"),
        ({"buffer": torch.eye(2).to_sparse()}, "ValueError: expected dense tensors"),
    ],
)
def test_an_error_of_one_module_ends_the_start_of_all(options: dict[str, Any], words: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        own = dict(options) if rank else {}
        model = make_model()
        model.register_buffer("extra", own.pop("buffer", None))
        with pytest.raises((TypeError, ValueError)) as caught:
            wrap_module(model, group, **own)
        return str(caught.value)

    text, _ = run_threads(2, main)
    assert f"rank 1 raised {words}" in text


def fail_on_one_rank(rank: int) -> tuple[str, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=80))
    dist.barrier()
    start = time.monotonic()
    with pytest.raises((TypeError, ValueError)) as caught:
        wrap(make_params(), bucket_cap_mb="x" if rank == 1 else 1, topology="ring")
    seconds = time.monotonic() - start
    # The failed rank need not stay for the others to know.
    dist.destroy_process_group()
    return str(caught.value), seconds


@pytest.mark.slow
def test_processes_learn_why_another_one_cannot_start() -> None:
    results = run_processes(2, fail_on_one_rank)
    assert "rank 1 raised TypeError: bucket_cap_mb expects a number of MiB" in results[0][0]
    assert results[1][0].startswith("bucket_cap_mb expects a number of MiB")
    assert max(seconds for _, seconds in results) < 40, "they waited for each other's timeout"


class Wrong(NamedTuple):
    options: dict[str, Any]
    error: type[Exception]
    words: str


WRONG = [
    Wrong({"rank": "0"}, TypeError, "rank expects a whole number"),
    Wrong({"rank": True}, TypeError, "rank expects a whole number"),
    Wrong({"rank": -1}, ValueError, "rank must be 0 or more"),
    Wrong({"world_size": 1.0}, TypeError, "world_size expects a whole number"),
    Wrong({"local_world_size": "a"}, TypeError, "local_world_size expects a whole number"),
    Wrong({"local_world_size": 0}, ValueError, "local_world_size must be 1 or more"),
    Wrong({"local_world_size": 2}, ValueError, "local_world_size must divide world_size"),
    Wrong({"topology": TopologyFactory}, TypeError, "a name or a Topology"),
    Wrong({"topology": None}, TypeError, "a name or a Topology"),
    Wrong({"bucket_cap_mb": None}, TypeError, "bucket_cap_mb expects a number"),
    Wrong({"bucket_cap_mb": True}, TypeError, "bucket_cap_mb expects a number"),
    Wrong({"bucket_cap_mb": 10**400}, ValueError, "bucket_cap_mb must be above 0"),
    Wrong({"overlap": "yes"}, TypeError, "overlap expects a bool"),
    Wrong({"process_group": [0, 1]}, TypeError, "process_group expects"),
    Wrong({"buffers": torch.zeros(2, 2)}, TypeError, "buffers expects several tensors"),
    Wrong({"buffers": None}, TypeError, "buffers expects several tensors"),
    Wrong({"buffers": 3}, TypeError, "buffers expects several tensors"),
    Wrong({"buffers": [3]}, TypeError, "buffers expects tensors"),
    Wrong(
        {"buffers": [torch.eye(2).to_sparse()]},
        ValueError,
        "dense buffers .* buffer 0 is torch.sparse_coo",
    ),
    Wrong({"buffers": [torch.zeros(2, device="meta")]}, ValueError, "buffers .* on the meta"),
    Wrong({"sync_at_start": None}, TypeError, "sync_at_start expects a bool"),
    Wrong({"comm_dtype": "bfloat16"}, TypeError, "comm_dtype expects a torch.dtype"),
    Wrong({"comm_dtype": torch.ones(2)}, TypeError, "comm_dtype expects a torch.dtype"),
    Wrong({"comm_dtype": torch.int16}, ValueError, "comm_dtype expects torch.bfloat16"),
    Wrong({"param_as_bucket_view": 1}, TypeError, "param_as_bucket_view expects a bool"),
    Wrong({"timeout": "1"}, TypeError, "timeout expects"),
    Wrong({"timeout": True}, TypeError, "timeout expects a number"),
    Wrong({"timeout": 1e-9}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": timedelta(microseconds=1)}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": 1e10}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": timedelta.max}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": 1e300}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": float("nan")}, ValueError, "timeout must be 0.001 to"),
    Wrong({"timeout": -1}, ValueError, "timeout must be 0.001 to"),
    Wrong({"on_nonfinite": torch.ones(2)}, TypeError, "on_nonfinite expects one of"),
    Wrong({"on_nonfinite": "warn"}, ValueError, "on_nonfinite expects one of"),
    Wrong({"elastic": "continue"}, TypeError, "elastic expects an Elastic or None"),
    Wrong({"elastic": Elastic}, TypeError, "elastic expects an Elastic or None"),
    Wrong({"elastic": Elastic(store=HashStore())}, ValueError, "needs rank and"),
    Wrong(
        {"elastic": Elastic(store=HashStore()), "rank": "0", "world_size": 1},
        TypeError,
        "rank expects a whole number",
    ),
    Wrong({"schedule": None}, TypeError, "schedule expects a Schedule"),
    Wrong({"schedule": {"gossip_every": 2}}, TypeError, "schedule expects a Schedule"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: "-".join(wrong.options))
def test_a_wrong_argument_is_named_with_what_it_takes(wrong: Wrong) -> None:
    with pytest.raises(wrong.error, match=wrong.words):
        DecentOptimWrapper(sgd(make_params()), **wrong.options)


@pytest.mark.parametrize("timeout", [0.001, 2_000_000, Fraction(3, 2), timedelta(days=20)])
def test_timeouts_at_the_ends_of_the_range_are_taken(timeout: Any) -> None:
    assert wrap(make_params(), timeout=timeout).world_size == 1


def test_nodes_are_blocks_of_consecutive_ranks() -> None:
    assert ranks_per_node("aaaa") == 4
    assert ranks_per_node("aabb") == 2
    assert ranks_per_node("aabbb") == 1
    assert ranks_per_node("aaaabb") == 1
    assert ranks_per_node("abab") == 1
    assert ranks_per_node("aabbaa") == 1
    assert ranks_per_node("abcd") == 1


@pytest.mark.parametrize("name", ["complete", "ring", "hierarchical"])
def test_nodes_with_different_numbers_of_ranks_start(name: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, Tensor]:
        params = make_params()
        own = 4 if rank < 4 else 2
        optimizer = wrap(params, group, topology=name, local_world_size=own)
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return optimizer.topology.local_world_size, flatten(params)

    results = run_threads(6, main)
    assert [local for local, _ in results] == [1] * 6
    expected = oracle(TopologyFactory.create(name, 6), 3, True, sgd)
    rows = torch.stack([row for _, row in results])
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)


def test_simulated_nodes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        named = wrap(make_params(), group, topology="hierarchical")
        given = wrap(make_params(), group, topology="hierarchical", local_world_size=1)
        return named.topology.local_world_size, given.topology.local_world_size

    assert run_threads(4, main) == [(2, 1)] * 4


def test_instances_are_compared_by_their_schedules() -> None:
    def build(name: str) -> Callable[[int, dist.ProcessGroup], int]:
        def main(rank: int, group: dist.ProcessGroup) -> int:
            topology = TopologyFactory.create(name, 4, 2 if rank else 1)
            return int(wrap(make_params(), group, topology=topology).world_size)

        return main

    assert run_threads(4, build("ring")) == [4] * 4
    with pytest.raises(RuntimeError) as caught:
        run_threads(4, build("alternating-exp-ring"))
    assert "topology AlternatingExponentialRing with schedule" in str(caught.value.__cause__)


def start_in_odd_places(rank: int) -> tuple[int, ...]:
    """Eight ranks on nodes of two, their even and odd halves, and two nodes of 5 and 3."""
    dist.init_process_group("gloo")
    halves: list[Any] = [dist.new_group(list(range(start, 8, 2))) for start in (0, 1)]
    sizes = []
    for group in (None, halves[rank % 2]):
        optimizer = wrap(make_params(), group, topology="hierarchical")
        sizes.append(optimizer.topology.local_world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "5" if rank < 5 else "3")
        patch.setenv("LOCAL_RANK", str(rank if rank < 5 else rank - 5))
        optimizer = wrap(make_params(), topology="complete")
        sizes.append(optimizer.topology.local_world_size)
        elastic = wrap(make_params(), elastic=Elastic(), timeout=30)
        sizes.append(elastic.world_size)
    dist.barrier()
    dist.destroy_process_group()
    return tuple(sizes)


@pytest.mark.slow
def test_processes_agree_on_their_nodes() -> None:
    rows = run_processes(8, start_in_odd_places, local_world_size=2)
    assert rows == [(2, 1, 1, 8)] * 8


def start_with_a_wrong_record(rank: int) -> tuple[str, str, float]:
    """Rank 1 passes a number where the others go on without lost ranks."""
    dist.init_process_group("gloo")
    elastic: Any = 5 if rank == 1 else Elastic()
    start = time.monotonic()
    with pytest.raises((TypeError, ValueError)) as caught:
        DecentOptimWrapper(sgd(make_params()), topology="ring", timeout=60, elastic=elastic)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_record_of_the_wrong_type_is_refused_on_all_ranks_although_it_holds_their_store() -> None:
    results = run_processes(4, start_with_a_wrong_record)
    assert results[1][0] == "TypeError"
    for kind, text, seconds in results:
        assert "elastic expects" in text
        assert seconds < 30
        assert kind == "TypeError" or "rank 1 could not start" in text
