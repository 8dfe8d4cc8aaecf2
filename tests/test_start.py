"""The start: wrong arguments, ranks that cannot start or disagree, equal values, nodes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, cast

import modules
import pytest
import torch
import torch.distributed as dist
from dense import oracle
from modules import make_model
from problem import flatten, make_params, sgd, take_steps, wrap
from ranks import run_processes, run_threads
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import (
    DecentOptimWrapper,
    Elastic,
    Group,
    OuterOptimizer,
    Topology,
    TopologyFactory,
)
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.elastic.membership import rendezvous
from decent_optim_wrapper.start import error_sharing
from decent_optim_wrapper.start.meeting import Meeting, local_world_size_of, ranks_per_node
from decent_optim_wrapper.topo import Ring
from decent_optim_wrapper.wire.broadcast import digest


def failing() -> Any:
    raise ZeroDivisionError("no buffers today")
    yield


ON_META = torch.zeros(2, device="meta", requires_grad=True)
SPARSE = torch.eye(3).to_sparse()

ERRORS = (TypeError, ValueError, RuntimeError, ZeroDivisionError)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ERRORS) as caught:
        call()
    return f"{caught.typename}: {caught.value}"


# What is said of what one rank passes.
BAD: dict[str, Callable[[], dict[str, Any]]] = {
    "ValueError: Invalid learning rate": lambda: {
        "extensions": [OuterOptimizer(partial(torch.optim.SGD, lr=-1.0))]
    },
    "ValueError: contradicts the process group": lambda: {"world_size": 7},
    "ValueError: rank=1 contradicts": lambda: {"rank": 1},
    "ValueError: unknown topology 'rign'": lambda: {"topology": "rign"},
    "ValueError: build the topology with the sizes of this run": lambda: {"topology": Ring(8)},
    "ValueError: overlap=False": lambda: {"base": torch.optim.LBFGS(make_params())},
    "ValueError: on the meta device": lambda: {"base": sgd([ON_META])},
    "ZeroDivisionError: no buffers today": lambda: {"buffers": failing()},
}


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_start_on_all_of_them() -> None:
    starts = [*product(BAD, (0, 2))]

    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[str], Tensor]:
        errors = []
        for said, bad_rank in starts:
            options = BAD[said]() if rank == bad_rank else {}
            errors.append(error_of(partial(wrap, make_params(), group, **options)))
        # Nothing half built is left: the next start works, in phases and over several buckets.
        params = make_params()
        optimizer = wrap(params, group, topology="greedy")
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        return errors, flatten(params)

    errors, rows = zip(*run_threads(3, main), strict=True)
    for rank, texts in enumerate(errors):
        for (said, bad_rank), text in zip(starts, texts, strict=True):
            kind, _, words = said.partition(": ")
            other = f"OtherRankError: the ranks cannot start, because rank {bad_rank} raised {kind}"
            assert text.startswith(f"{kind if rank == bad_rank else other}: ")
            assert words in text
    expected = oracle(TopologyFactory.create("greedy", 3), 3, True, sgd)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-11, atol=1e-12)


NAN = float("nan")
OUT_OF_RANGE = [0, NAN, -1, timedelta(0)]
# An argument, values that it does not take, and what is said of each.
WRONG: list[tuple[str, list[Any], str]] = [
    ("rank", ["0", True], "TypeError: rank expects a whole number"),
    ("rank", [-1], "ValueError: rank must be 0 or more"),
    ("rank", [1], "ValueError: rank=1 contradicts a world of one rank"),
    ("world_size", [0], "ValueError: world_size must be 1 or more"),
    ("world_size", [4], "RuntimeError: .*torchrun --nproc-per-node 4"),
    ("topology", [TopologyFactory, True, 3], "TypeError: .*a name, a Topology or None"),
    ("bucket_cap_mb", [True, "25"], "TypeError: bucket_cap_mb expects a number of MiB"),
    ("bucket_cap_mb", [-1, NAN, 10**400], "ValueError: bucket_cap_mb must be above 0 MiB"),
    ("overlap", ["yes"], "TypeError: overlap expects a bool"),
    ("process_group", [[0, 1]], "TypeError: process_group expects a torch.distributed.ProcessGr"),
    ("buffers", [torch.zeros(2, 2), 3], "TypeError: buffers expects several tensors"),
    ("buffers", [[3]], "TypeError: buffers expects tensors"),
    ("buffers", [[SPARSE]], "ValueError: .*dense buffers .* buffer 0 is torch.sparse_coo"),
    ("buffers", [[ON_META]], "ValueError: .*buffers .* on the meta"),
    ("comm_dtype", ["bfloat16", SPARSE], "TypeError: comm_dtype expects a torch.dtype"),
    ("comm_dtype", [torch.int16], "ValueError: comm_dtype expects torch.float32"),
    ("param_as_bucket_view", [1], "TypeError: param_as_bucket_view expects a bool"),
    ("timeout", ["1", True], "TypeError: timeout expects a number of seconds"),
    ("timeout", OUT_OF_RANGE, "ValueError: timeout must be above 0 seconds"),
    ("on_nonfinite", [SPARSE], "TypeError: on_nonfinite expects one of"),
    ("on_nonfinite", ["warn"], "ValueError: on_nonfinite expects one of .*'skip', 'ignore'"),
    ("elastic", ["continue", Elastic], "TypeError: elastic expects an Elastic or None"),
    ("elastic", [Elastic()], "ValueError: .*needs a store in which the ranks agree"),
    ("schedule", [None, {"gossip_every": 2}], "TypeError: schedule expects a Schedule"),
]


@pytest.mark.parametrize(("name", "values", "said"), WRONG)
def test_a_wrong_argument_is_named_with_what_it_takes(
    name: str, values: list[Any], said: str
) -> None:
    for value in values:
        build = partial(DecentOptimWrapper, sgd(make_params()), **{name: value})
        assert re.match(said, error_of(build))


def sparse_gradient() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = DecentOptimWrapper(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


def emptied() -> None:
    base = sgd(make_params())
    base.param_groups[0]["params"] = []
    DecentOptimWrapper(base)


class AdamW:
    """The optimizer of another library."""


# What is said of a mistake.
MISTAKES: dict[str, Callable[[], object]] = {
    "ValueError: .* expects parameters to train, got a SGD": emptied,
    "ValueError: .*0.0 is torch.sparse_coo": lambda: DecentOptimWrapper(sgd([SPARSE])),
    "RuntimeError: .*gradient of 0.0 is torch.sparse_coo": sparse_gradient,
    "TypeError: .*yet, got .*wrapper.DecentOptim": lambda: wrap([], base=wrap(make_params())),
    "TypeError: .*<class 'list'>": lambda: DecentOptimWrapper(cast(Any, make_params())),
    # Not torch's.
    "TypeError: .*<class 'test_start.AdamW'>": lambda: DecentOptimWrapper(cast(Any, AdamW())),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_one_clear_error(said: str) -> None:
    assert re.match(said, error_of(MISTAKES[said]))


def test_nodes_are_blocks_of_consecutive_ranks() -> None:
    blocks = {"aaaa": 4, "aabb": 2, "abcd": 1}
    others = dict.fromkeys(("aabbb", "aaaabb", "abab", "aabbaa"), 1)
    for nodes, size in (blocks | others).items():
        assert ranks_per_node(nodes) == size


@pytest.mark.parametrize(("place", "size"), [("0", 2), ("1", 1), ("3", 2), ("", 2)])
def test_ranks_that_are_dealt_to_nodes_in_turn_are_in_no_blocks(
    place: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 of nodes of 2 ranks; a number that the node does not have says nothing."""
    for name, value in {"LOCAL_WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": place}.items():
        monkeypatch.setenv(name, value)
    assert local_world_size_of(Meeting(), range(4)) == size


def test_all_ranks_agree_on_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def main(rank: int, group: dist.ProcessGroup) -> list[int]:
        # The last ones are on nodes of 4 and of 2 ranks.
        # Without a GPU, torch.cuda.device_count() is 0.
        given = (None, 0, 1, 3, 4 if rank < 4 else 2)
        built = [
            wrap(make_params(), group, topology="hierarchical", local_world_size=each)
            for each in given
        ]
        # Instances are compared by their schedules: nodes do not matter to a ring.
        ring = TopologyFactory.create("ring", 6, 1 + rank % 2)
        wrap(make_params(), group, topology=ring, local_world_size=0)
        return [optimizer.topology.local_world_size for optimizer in built]

    assert run_threads(6, main) == [[2, 2, 1, 3, 1]] * 6


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_constructor_that_waits_says_which_ranks_have_not_come(
    is_elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (error_sharing, rendezvous):
        monkeypatch.setattr(where, "WARN_AFTER_SECONDS", 0.2)
    # Counts the wrappers of a process, which all these ranks share.
    monkeypatch.setattr(rendezvous, "key_prefix", lambda _: "one")
    store, told = HashStore(), threading.Event()
    texts: list[str] = []

    def show(message: Warning | str, *_: object) -> None:
        texts.append(str(message))
        told.set()

    monkeypatch.setattr("decent_optim_wrapper.comm.store.warn", show)

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        if rank in (1, 3):
            assert told.wait(30)
        options: dict[str, Any] = {"group": group}
        if is_elastic:
            options = {"elastic": Elastic(store=store, stale_after=60.0), "timeout": 40}
            options |= {"rank": rank, "world_size": 4}
        params = make_params()
        optimizer = wrap(params, topology="ring", **options)
        take_steps(optimizer, params, rank, range(3))
        optimizer.global_avg(may_revert=False)
        return flatten(params)

    rows = run_threads(4, main)
    assert len(texts) == 1
    assert texts[0].startswith("rank 0: the constructor of DecentOptimWrapper still waits for")
    assert "ranks [1, 3], which have not called it" in texts[0]
    assert torch.equal(torch.stack(rows), rows[0].expand(4, -1))
    assert not torch.equal(rows[0], flatten(make_params()))


class Tilted(Topology):
    """Looks the same on every rank and is not."""

    weight = 0.5

    def phases(self) -> list[list[Group]]:
        return [[Group([0, 1], self.weight)]]


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
    (third(WIDE.clone().requires_grad_()), "parameter 0.2: torch.float64 (6, 5)"),
    (third(NARROW.clone().requires_grad_()), "parameter 0.2: torch.float32 (5, 6)"),
    (third(WIDE.view(5, 6)), "parameter 0.2: torch.float64 (5, 6) on cpu, frozen"),
    (lambda: {"base": torch.optim.Adam(make_params())}, "optimizer Adam"),
    (lambda: {"bucket_cap_mb": 2}, "bucket_cap_mb=2.0"),
    (lambda: {"topology": "greedy"}, "topology Greedy"),
    (lambda: {"topology": Steeper(3)}, "topology Tilted with schedule"),
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


def test_a_digest_shows_signs_and_differences_that_cancel_in_a_sum() -> None:
    for dtype in (torch.float64, torch.complex128, torch.float32, torch.bfloat16):
        ones = torch.ones(6, dtype=dtype)
        for flipped in ([0], [2, 5], [*range(6)]):
            signs = ones.index_fill(0, torch.tensor(flipped), -1)
            assert digest(signs) != digest(ones), (dtype, flipped)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        curved = torch.tensor([1, 0, -2, 0, 1, 0]).to(dtype)
        assert digest(curved + 7) != digest(torch.full_like(curved, 7))
    assert digest(torch.zeros(0)) == digest(torch.zeros(9)) == 0
    # One element is contiguous with any stride.
    single = torch.arange(4, dtype=torch.float64).as_strided([1], [2], 3)
    assert digest(single) == digest(torch.tensor([3.0], dtype=torch.float64)) != 0


def test_values_that_lie_apart_in_memory_start_as_on_rank_0() -> None:
    """As of a learned diagonal that was taken from a matrix."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        diagonal = torch.eye(6, dtype=torch.float64).diagonal().requires_grad_()
        with torch.no_grad():
            diagonal[4:] += 5.0 * (rank == 0)
        params = [diagonal, *make_params()]
        column = torch.eye(4)[:, 2]
        column[3] += 5.0 * (rank == 0)
        wrap(params, group, buffers=[column])
        return [diagonal.detach(), column]

    for found in run_threads(2, main):
        assert [each.tolist() for each in found] == [[1, 1, 1, 1, 6, 6], [0, 0, 1, 5]]
    square = torch.arange(16.0).view(4, 4)
    for apart in (square.diagonal(), square[:, 1], torch.view_as_complex(square.view(8, 2)).real):
        assert digest(apart) == digest(apart.clone()) != digest(apart + 1.0)


def test_a_misspelt_option_is_an_error_that_names_the_option() -> None:
    model, base = make_model(), sgd(make_params())
    for options, name in (
        ({"topolgy": "ring"}, "topology"),
        ({"extension": []}, "extensions"),
        ({"overlaps": True}, "overlap"),
    ):
        expected = rf"unknown option '{next(iter(options))}' \(did you mean '{name}'\?\)"
        with pytest.raises(TypeError, match=expected):
            DecentOptimWrapper(base, **options)
        with pytest.raises(TypeError, match=expected):
            DecentralizedDataParallel(model, modules.sgd, **options)
    expected = r"'gossip_every' \(pass schedule=Schedule\(gossip_every=...\)\)"
    misplaced: dict[str, Any] = {"gossip_every": 4}
    with pytest.raises(TypeError, match=expected):
        DecentOptimWrapper(base, **misplaced)
    with pytest.raises(TypeError, match=expected):
        DecentralizedDataParallel(model, modules.sgd, **misplaced)
    with pytest.raises(TypeError, match="did you mean 'update_in_backward'"):
        DecentralizedDataParallel(model, modules.sgd, update_in_backwards=True)


def train_with_ddp(rank: int) -> tuple[list[str], list[list[float]]]:
    """On a rank: what is said of models with DDP, and the ends of training without it and with."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([each]) for each in range(2)][rank]
    texts, ends = list[str](), list[list[float]]()
    for group in (dist.group.WORLD, alone):
        of_ddp: Any = partial(DistributedDataParallel, process_group=group)
        for model in (of_ddp(make_model()), nn.Sequential(of_ddp(make_model()), nn.Tanh())):
            if group is dist.group.WORLD:
                base = sgd([*model.parameters()])
                # In a store of their own, ranks have the numbers of the process group, too.
                elastic: Any = {"elastic": Elastic(HashStore()), "rank": rank, "world_size": 2}
                for options in (dict[str, Any](), elastic):
                    wrap_it = partial(DecentOptimWrapper, base, model=model, **options)
                    texts.append(error_of(wrap_it))
            texts.append(error_of(lambda: DecentralizedDataParallel(model, modules.sgd)))  # noqa: B023
    for wrapped in (lambda model: model, partial(DistributedDataParallel, process_group=alone)):
        training = modules.Training(rank, None, model=wrapped(make_model()))
        training.train(range(3))
        ends.append(training.end().tolist())
    dist.destroy_process_group()
    return texts, ends


@pytest.mark.slow
def test_a_model_has_no_ddp_over_ranks_that_gossip() -> None:
    """With which gossip has no effect. Over other ranks, as of one node, it is allowed."""
    for rank, (texts, ends) in enumerate(run_processes(2, train_with_ddp)):
        assert len(texts) == 8
        for text in texts:
            assert text.startswith(f"ValueError: rank {rank}: model expects gradients of this rank")
            assert "train and pass the module in it" in text
        assert [" 0 is a DistributedDataParallel" in text for text in texts] == [
            *(False, False, False, True, True, True, False, True)
        ]
        without, inside = ends
        assert inside == without


def test_signs_that_differ_between_ranks_start_as_on_rank_0() -> None:
    """As in projections to random signs, which a model has beside its parameters."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        signs = torch.where(torch.arange(5) % (rank + 2) == 0, 1.0, -1.0).double()
        wrap(params, group, buffers=[signs])
        return signs

    (first, other), own = run_threads(2, main), torch.arange(5) % 2 == 0
    assert torch.equal(first, torch.where(own, 1.0, -1.0).double())
    assert torch.equal(first, other)
