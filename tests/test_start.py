"""The start: wrong arguments, ranks that cannot start or disagree, equal values, nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from dense import oracle
from modules import make_model
from modules import wrap as wrap_module
from problem import flatten, make_params, sgd, take_steps, wrap
from ranks import KeptRanks, run_processes, run_threads
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from warned import warned_texts

from decent_optim_wrapper import (
    DecentOptimWrapper,
    Elastic,
    Group,
    Schedule,
    Topology,
    TopologyFactory,
)
from decent_optim_wrapper.start.world import ranks_per_node


def failing() -> Any:
    raise ZeroDivisionError("no buffers today")
    yield


# What one rank passes, and the error that it raises itself.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "settings": (lambda: {"bucket_cap_mb": "x"}, TypeError, "bucket_cap_mb expects"),
    "elastic": (lambda: {"elastic": True}, TypeError, "elastic expects an Elastic or None"),
    "outer": (
        lambda: {"schedule": Schedule(outer=cast(Any, len))},
        TypeError,
        "from a list of tensors, but it has returned a int",
    ),
    "size": (lambda: {"world_size": 7}, ValueError, "contradicts the process group"),
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
@pytest.mark.parametrize("case", BAD)
def test_an_error_of_one_rank_ends_the_start_on_all_of_them(case: str) -> None:
    make_options, kind, words = BAD[case]

    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[str], Tensor]:
        texts = []
        for bad_rank in (0, 2):
            bad = rank == bad_rank
            with pytest.raises(kind if bad else ValueError) as caught:
                wrap(make_params(), group, **(make_options() if bad else {}))
            texts.append(str(caught.value))
        # Nothing half built is left: the next start works, in phases and over several buckets.
        params = make_params()
        optimizer = wrap(params, group, topology="greedy")
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        return texts, flatten(params)

    results = run_threads(3, main)
    for rank, (texts, _) in enumerate(results):
        for bad_rank, text in zip((0, 2), texts, strict=True):
            assert words in text
            told = f"rank {bad_rank} raised {kind.__name__}: " in text
            assert told == (rank != bad_rank)
            assert rank != bad_rank or "the ranks cannot start" not in text
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


def fail_on_one_rank() -> list[tuple[str, float]]:
    """Rank 1 passes something else, the last time where the others go on without lost ranks."""
    results = []
    others: dict[str, Any]
    for others, wrong in (
        ({}, {"bucket_cap_mb": "x"}),
        ({"elastic": Elastic()}, {"elastic": 5}),
    ):
        dist.barrier()
        start = time.monotonic()
        with pytest.raises((TypeError, ValueError)) as caught:
            wrap(make_params(), timeout=80, **(wrong if dist.get_rank() == 1 else others))
        text = f"{type(caught.value).__name__}: {caught.value}"
        results.append((text, time.monotonic() - start))
    return results


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_processes_learn_why_another_one_cannot_start(four_ranks: KeptRanks) -> None:
    for rank, (cap, elastic) in enumerate(four_ranks.run(fail_on_one_rank)):
        for (text, seconds), words in (
            (cap, "TypeError: bucket_cap_mb expects a number of MiB"),
            (elastic, "TypeError: elastic expects"),
        ):
            assert text.startswith(words) if rank == 1 else words in text
            assert seconds < 40, "it has waited for the timeout"
        assert rank == 1 or "rank 1 raised TypeError" in cap[0]
        assert rank == 1 or elastic[0].startswith("ValueError")
        assert rank == 1 or "rank 1 could not start" in elastic[0]


# An argument, values that it does not take, and what is said of each.
WRONG: list[tuple[str, list[Any], type[Exception], str]] = [
    ("rank", ["0", True], TypeError, "rank expects a whole number"),
    ("rank", [-1], ValueError, "rank must be 0 or more"),
    ("world_size", [1.0], TypeError, "world_size expects a whole number"),
    ("local_world_size", ["a"], TypeError, "local_world_size expects a whole number"),
    ("local_world_size", [0], ValueError, "local_world_size must be 1 or more"),
    ("local_world_size", [2], ValueError, "local_world_size must divide world_size"),
    ("topology", [TopologyFactory, None, 3], TypeError, "a name or a Topology"),
    ("bucket_cap_mb", [None, True, "25"], TypeError, "bucket_cap_mb expects a number of MiB"),
    ("bucket_cap_mb", [-1, 10**400], ValueError, "bucket_cap_mb must be above 0 MiB"),
    ("bucket_cap_mb", [float("nan"), float("inf")], ValueError, "MiB and finite, got (nan|inf)"),
    ("overlap", ["yes"], TypeError, "overlap expects a bool"),
    ("process_group", [[0, 1]], TypeError, "process_group expects a torch.distributed.ProcessGr"),
    ("buffers", [torch.zeros(2, 2), None, 3], TypeError, "buffers expects several tensors"),
    ("buffers", [[3]], TypeError, "buffers expects tensors"),
    (
        "buffers",
        [[torch.eye(2).to_sparse()]],
        ValueError,
        "dense buffers .* buffer 0 is torch.sparse_coo",
    ),
    ("buffers", [[torch.zeros(2, device="meta")]], ValueError, "buffers .* on the meta"),
    ("sync_at_start", [None], TypeError, "sync_at_start expects a bool"),
    ("comm_dtype", ["bfloat16", torch.ones(2)], TypeError, "comm_dtype expects a torch.dtype"),
    ("comm_dtype", [torch.int16], ValueError, "comm_dtype expects torch.bfloat16"),
    ("param_as_bucket_view", [1], TypeError, "param_as_bucket_view expects a bool"),
    ("timeout", ["1", True], TypeError, "timeout expects a number of seconds, a timedelta"),
    (
        "timeout",
        [*(1e-9, 1e10, 1e300, float("nan"), -1), timedelta(microseconds=1), timedelta.max],
        ValueError,
        "timeout must be 0.001 to",
    ),
    ("on_nonfinite", [torch.ones(2)], TypeError, "on_nonfinite expects one of"),
    ("on_nonfinite", ["warn"], ValueError, "on_nonfinite expects one of .*'skip', 'ignore'"),
    ("elastic", ["continue", Elastic], TypeError, "elastic expects an Elastic or None"),
    ("elastic", [Elastic()], ValueError, "needs a store in which the ranks agree"),
    ("elastic", [Elastic(store=HashStore())], ValueError, "needs rank and"),
    ("schedule", [None, {"gossip_every": 2}], TypeError, "schedule expects a Schedule"),
]


@pytest.mark.parametrize(("name", "values", "error", "words"), WRONG)
def test_a_wrong_argument_is_named_with_what_it_takes(
    name: str, values: list[Any], error: type[Exception], words: str
) -> None:
    for value in values:
        with pytest.raises(error, match=words):
            DecentOptimWrapper(sgd(make_params()), **{name: value})


def sparse_parameter() -> Any:
    return DecentOptimWrapper(
        torch.optim.SGD([nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)])
    )


def sparse_gradient() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = DecentOptimWrapper(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


def emptied() -> Any:
    base = sgd(make_params())
    base.param_groups[0]["params"] = []
    return DecentOptimWrapper(base)


def meta() -> Any:
    return DecentOptimWrapper(torch.optim.SGD([torch.zeros(3, device="meta", requires_grad=True)]))


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "emptied optimizer": (emptied, ValueError, "expects parameters to train, got a SGD"),
    "sparse parameter": (sparse_parameter, ValueError, "0.0 is torch.sparse_coo"),
    "meta parameter": (meta, ValueError, "0.0 is on the meta device"),
    "sparse gradient": (sparse_gradient, RuntimeError, "that of 0.0 is torch.sparse_coo"),
    "wrapped twice": (
        lambda: DecentOptimWrapper(DecentOptimWrapper(sgd(make_params()))),
        TypeError,
        "not wrapped yet, got DecentOptimWrapper",
    ),
    "rank of an elastic start": (
        lambda: wrap(make_params(), elastic=Elastic(store=HashStore()), rank="0", world_size=1),
        TypeError,
        "rank expects a whole number",
    ),
    "no optimizer": (lambda: DecentOptimWrapper(make_params()), TypeError, "got list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error(mistake: str) -> None:
    make, kind, words = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"on_membership_change": 5}, "on_membership_change expects a function .* got 5"),
        ({"store": "tcp://"}, r"store expects a torch\.distributed\.Store"),
    ],
)
def test_a_wrong_field_of_elastic_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Elastic(**wrong)


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
        take_steps(optimizer, params, rank, range(3))
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
        # Instances are compared by their schedules: nodes do not matter to a ring.
        wrap(make_params(), group, topology=TopologyFactory.create("ring", 4, 1 + rank % 2))
        return named.topology.local_world_size, given.topology.local_world_size

    assert run_threads(4, main) == [(2, 1)] * 4


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


class Tilted(Topology):
    """Looks the same on every rank and is not."""

    weight = 0.5

    def assign_groups(self) -> list[list[Group]]:
        groups = [Group([0, 1], self.weight), Group([2])]
        return [[groups[rank // 2]] for rank in range(3)]


class Steeper(Tilted):
    weight = 0.7


# Only its schedule tells.
Steeper.__name__ = "Tilted"


def odd_base(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[], dict[str, Any]]:
    return lambda: {"base": sgd(change(make_params()))}


def third(new: Tensor) -> Callable[[], dict[str, Any]]:
    """A base whose third parameter is another one."""
    return odd_base(lambda p: [*p[:2], new, *p[3:]])


WIDE, NARROW = torch.zeros(6, 5, dtype=torch.float64), torch.zeros(5, 6)
# What one rank does otherwise, and what is said of it; the others have a Tilted topology.
ODD: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (odd_base(lambda p: p[:2]), "nothing more"),
    (odd_base(lambda p: [*p[:2], *p[3:]]), "parameter 0.2: torch.float64 ()"),
    (odd_base(lambda p: [*p[:2], p[3], p[2], p[4]]), "parameter 0.2"),
    (third(WIDE.clone().requires_grad_()), "parameter 0.2: torch.float64 (6, 5)"),
    (third(NARROW.clone().requires_grad_()), "parameter 0.2: torch.float32 (5, 6)"),
    (third(WIDE.view(5, 6)), "parameter 0.2: torch.float64 (5, 6) on cpu, frozen"),
    (lambda: {"base": torch.optim.Adam(make_params())}, "optimizer Adam"),
    (lambda: {"bucket_cap_mb": 2}, "bucket_cap_mb=2.0"),
    (lambda: {"overlap": False}, "overlap=False"),
    (lambda: {"topology": "greedy"}, "topology Greedy"),
    (lambda: {"topology": Steeper(3)}, "topology Tilted with schedule"),
    (lambda: {"sync_at_start": False}, "sync_at_start=False"),
    (lambda: {"buffers": [torch.zeros(2)]}, "buffer 0: torch.float32"),
]


@pytest.mark.parametrize(("odd", "words"), ODD, ids=[words for _, words in ODD])
def test_every_rank_names_the_rank_that_differs_and_what(
    odd: Callable[[], dict[str, Any]], words: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        options = {"topology": Tilted(3), **(odd() if rank == 2 else {})}
        with pytest.raises(ValueError, match="the ranks disagree") as caught:
            wrap(make_params(), group, **options)
        return str(caught.value)

    for rank, text in enumerate(run_threads(3, main)):
        assert f"rank 2 has <{words}" in text
        assert "rank 0 has <" in text
        assert "parameter" not in words or "<parameter 0.2: torch.float64 (5, 6) on cpu>" in text
        assert f"seen on rank {rank}" in text


def test_a_parameter_that_differs_is_named_as_in_its_model_and_also_later() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + rank))
        base = torch.optim.SGD(model.named_parameters())
        with pytest.raises(ValueError, match=r"the ranks disagree.*parameter 1\.weight: "):
            wrap([], group, base=base, sync_at_start=False)
        optimizer = wrap(make_params(), group)
        with pytest.raises(ValueError, match=r"the ranks disagree.*parameter 1\.2"):
            optimizer.add_param_group({"params": make_params()[: 2 + rank]})

    run_threads(2, main)


def test_parameters_and_buffers_of_every_dtype_come_from_rank_0_or_stay() -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.complex64]
    buffer_dtypes = [torch.float32, torch.int64, torch.bool]

    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        values = []
        for sync in (True, False):
            params = [torch.full((3,), rank, dtype=dtype, requires_grad=True) for dtype in dtypes]
            params[0].requires_grad_(False)
            buffers = [torch.full((2,), rank, dtype=dtype) for dtype in buffer_dtypes]
            base = torch.optim.SGD(params, lr=0.1)
            wrap([], group, base=base, buffers=buffers, sync_at_start=sync)
            values.append(sum(t.detach().sum().abs().item() for t in params + buffers))
        return values

    assert run_threads(2, main) == [[0, 0], [0, 3 * 3 + 2 * 3]]


@pytest.mark.parametrize("loaded", [True, False])
def test_weights_that_one_rank_alone_has_loaded_are_warned_of_when_they_are_replaced(
    loaded: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        for param in params[1:4] if loaded and rank == 2 else []:
            param.data.add_(1)
        # Not a number is no other value.
        wrap(params, group, buffers=[torch.full((3,), float("nan"))])
        return flatten(params)

    with warned_texts() as lines:
        rows = run_threads(3, main)
    assert all(torch.equal(row, flatten(make_params())) for row in rows)
    text = "the values of rank 0 have replaced others, tensors by rank: {2: 3} (of 6)"
    found = [line for line in lines if "have replaced others" in line]
    assert [line.startswith(text) for line in found] == [True] * loaded
