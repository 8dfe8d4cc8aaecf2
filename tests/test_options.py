"""The guide's tables of options that can be combined: every pair is built and trained."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from meshes import CAP_MB, Layout, Spread, batch, loss_of, make_model, run_on_mesh
from problem import flatten, nesterov
from torch.distributed.algorithms.join import Join

from decent_optim_wrapper import DecentOptimWrapper, Elastic, Schedule
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim.shards import local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "options.md"
STEPS = 4
SPREAD = Layout({"gossip": 2, "tp": 2})

# Arguments of the wrapper, and fields of its schedule, as the guide writes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap=False": {"overlap": False},
    '"forward"': {"overlap": "forward"},
    "staleness": {"schedule": {"gossip_every": 2, "staleness": 2}},
    '"auto"': {"schedule": {"gossip_every": "auto"}},
    "bf16": {"comm_dtype": torch.bfloat16},
    "int8": {"comm_dtype": torch.int8},
    "int4": {"comm_dtype": INT4},
    "tracking": {"gradient_tracking": True},
    "outer": {"schedule": {"outer": nesterov(0.5)}},
    "average_state": {"schedule": {"average_state": "average", "global_avg_every": 2}},
    "state names": {"schedule": {"average_state": ("momentum_buffer",)}},
    "views": {"param_as_bucket_view": True},
    "elastic": {"elastic": Elastic()},
    # What follows is no argument of its own here, but another way to train.
    "mesh": {},
    "Join": {},
    "module": {},
}
PAIRS = [*combinations(OPTIONS, 2)]


class Outcome(NamedTuple):
    """What came of a pair: the type and the text of an error, or None."""

    error: str | None = None
    text: str = ""


def excluded(pair: tuple[str, str]) -> bool:
    """Whether the two are values of one argument."""
    one, other = (OPTIONS[name] for name in pair)
    fields = one.get("schedule", {}).keys() & other.get("schedule", {}).keys()
    return bool(one.keys() & other.keys() - {"schedule"}) or "average_state" in fields


def options_of(pair: tuple[str, str]) -> dict[str, Any]:
    one, other = (OPTIONS[name] for name in pair)
    options = {**one, **other, "topology": "ring", "timeout": 30}
    fields = {**one.get("schedule", {}), **other.get("schedule", {})}
    return {**options, "schedule": Schedule(**fields)}


def train(pair: tuple[str, str]) -> None:
    """Build what the pair says, and make steps, one fewer on a rank where Join allows it."""
    spread = Spread(SPREAD) if "mesh" in pair else None
    place = spread.replica if spread else dist.get_rank()
    model = spread.model if spread else make_model()
    options = options_of(pair)
    if spread:
        options |= {"mesh": spread.mesh, "gossip_dim": "gossip"}
    trained: Any = model
    if "module" in pair:
        trained = DecentralizedDataParallel(model, sgd, bucket_size_in_mb=CAP_MB, **options)
        optimizer = trained.optimizer
    else:
        base = sgd(list(model.named_parameters()))
        optimizer = DecentOptimWrapper(base, model=model, bucket_cap_mb=CAP_MB, **options)
    assert len(optimizer.buckets) > 1
    held = [local(param) for param in model.parameters()]
    before = flatten(held)
    with ExitStack() as joined:
        if "Join" in pair:
            joined.enter_context(Join([optimizer]))
        for step in range(STEPS - ("Join" in pair and place == 1)):
            x, y = batch(place, step)
            loss_of(trained(x), y).backward()  # type: ignore[no-untyped-call]
            if trained is model:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.synchronize()
    after = flatten([local(param) for param in model.parameters()])
    assert optimizer.round > 0
    assert after.isfinite().all()
    assert not torch.equal(before, after)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def try_pairs(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Run on every rank."""
    outcomes = {}
    for pair in pairs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(pair)
            outcomes[pair] = Outcome()
        except (TypeError, ValueError) as error:
            outcomes[pair] = Outcome(type(error).__name__, str(error))
        dist.barrier()
    return outcomes


@cache
def outcomes() -> dict[tuple[str, str], Outcome]:
    """What comes of each pair; the same on all ranks."""
    tried = [pair for pair in PAIRS if not excluded(pair)]
    found: dict[tuple[str, str], Outcome] = {}
    # A mesh whose replicas are spread over two ranks needs four.
    for world_size, is_mesh in ((2, False), (4, True)):
        pairs = [pair for pair in tried if ("mesh" in pair) is is_mesh]
        first, *others = run_on_mesh(world_size, try_pairs, pairs)
        for pair, outcome in first.items():
            assert all(other[pair].error == outcome.error for other in others), pair
        found |= first
    return found


def table(heading: str) -> Iterator[list[str]]:
    """The rows of the first table behind a heading of the guide, without its head."""
    page = "\n" + GUIDE.read_text(encoding="utf-8")
    _, _, text = page.partition(f"\n{heading}\n")
    rows = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n?)+)", text, re.MULTILINE)
    assert rows, heading
    for row in rows[1].splitlines():
        yield [cell.strip() for cell in row.strip("|").split("|")]


def pairs_of(cell: str) -> Iterator[tuple[str, str]]:
    for pair in cell.split("; "):
        one, other = pair.split(", ")
        yield one, other


def matrix() -> dict[tuple[str, str], str]:
    names = [*OPTIONS]
    found: dict[tuple[str, str], str] = {}
    for place, row in enumerate(table("## All pairs"), 1):
        assert row[0] == f"**{names[place]}**"
        cells = row[1:]
        assert not any(cells[place:]), row
        found |= {(names[at], names[place]): cells[at] for at in range(place)}
    return found


def test_the_guide_names_every_option_once() -> None:
    assert [row[0] for row in table("# Options that go together")] == [*OPTIONS]
    assert set(matrix()) == set(PAIRS)


def test_the_guide_says_which_pairs_are_trained_and_which_are_refused() -> None:
    said = matrix()
    for pair, cell in said.items():
        assert (cell == "-") == excluded(pair), pair
    for pair, outcome in outcomes().items():
        assert (said[pair] == "no") == (outcome.error is not None), (pair, outcome)


def test_the_guide_quotes_the_error_of_every_pair_that_is_refused() -> None:
    quoted = {pair: row[1:3] for row in table("## What is refused") for pair in pairs_of(row[0])}
    refused = {pair: outcome for pair, outcome in outcomes().items() if outcome.error}
    assert quoted.keys() == refused.keys()
    for pair, (error, text) in quoted.items():
        assert error == refused[pair].error, pair
        assert len(text) > 20
        assert text.strip("`") in refused[pair].text, pair


def test_the_guide_has_a_note_for_every_pair_that_has_one() -> None:
    noted = [pair for row in table("## What to know") for pair in pairs_of(row[0])]
    assert len(noted) == len(set(noted))
    assert {pair for pair, cell in matrix().items() if cell == "note"} == set(noted)


def train_a_pipeline_with_views() -> bool:
    spread = Spread(Layout({"gossip": 2, "pp": 2}))
    optimizer = spread.wrap(sgd, param_as_bucket_view=True)
    before = flatten(list(spread.model.parameters()))
    for step in range(STEPS):
        spread.backward(step)
        optimizer.step()
    optimizer.synchronize()
    return not torch.equal(before, flatten(list(spread.model.parameters())))


def test_a_pipeline_of_plain_tensors_goes_with_views() -> None:
    assert run_on_mesh(4, train_a_pipeline_with_views) == [True] * 4
