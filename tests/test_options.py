"""The guide's tables of options that can be combined: every pair is built and trained."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import CAP_MB, Layout, Spread, batch, loss_of, make_model, run_on_mesh
from modules import backward, sgd
from problem import flatten, nesterov
from torch.distributed.algorithms.join import Join

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    Elastic,
    GradientTracking,
    Late,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim.shards import local

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_on_a_mesh")]

GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "options.md"
STEPS = 3
# Two or three buckets on every rank.
BUCKET_MB = 1.5 * CAP_MB
SPREAD = Layout({"gossip": 2, "tp": 2})

# Arguments of the wrapper, and fields of its schedule, as the guide writes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap=False": {"overlap": False},
    '"forward"': {"overlap": "forward"},
    "Late": {"overlap": Late(2), "gossip_every": 2},
    "AsItArrives": {"overlap": AsItArrives()},
    "bf16": {"comm_dtype": torch.bfloat16},
    "int8": {"comm_dtype": torch.int8},
    "int4": {"comm_dtype": INT4},
    "tracking": {"extensions": [GradientTracking()]},
    "outer": {"extensions": [OuterOptimizer(nesterov(0.5))]},
    "StateAverage": {"extensions": [StateAverage()], "global_avg_every": 2},
    "StateGossip": {"extensions": [StateGossip("momentum_buffer")]},
    "views": {"param_as_bucket_view": True},
    "elastic": {"elastic": Elastic()},
    # What follows is no argument of its own here, but another way to train.
    "mesh": {},
    "Join": {},
    "module": {},
}
Pair = tuple[str, str]
Names = tuple[str, ...]
PAIRS: list[Pair] = [*combinations(OPTIONS, 2)]
# Values of one argument, but for the list of extensions.
EXCLUDED = {
    (one, other)
    for one, other in PAIRS
    if OPTIONS[one].keys() & OPTIONS[other].keys() - {"extensions"}
}


def train(names: Names) -> None:
    """Build with these options, and make steps, one fewer on a rank where Join allows it."""
    spread = Spread(SPREAD, blocks=1) if "mesh" in names else None
    place = spread.replica if spread else dist.get_rank()
    model = spread.model if spread else make_model(blocks=1)
    options: dict[str, Any] = {"topology": "ring", "timeout": 30}
    for name in names:
        extensions = [*options.get("extensions", ()), *OPTIONS[name].get("extensions", ())]
        options |= {**OPTIONS[name], "extensions": extensions}
    of_schedule = {field.name for field in fields(Schedule)} & options.keys()
    options["schedule"] = Schedule(**{name: options.pop(name) for name in of_schedule})
    if spread:
        options |= {"mesh": spread.mesh, "gossip_dim": "gossip"}
    trained: Any = model
    if "module" in names:
        trained = DecentralizedDataParallel(model, sgd, bucket_size_in_mb=BUCKET_MB, **options)
        optimizer = trained.optimizer
    else:
        base = sgd(list(model.named_parameters()))
        optimizer = DecentOptimWrapper(base, model=model, bucket_cap_mb=BUCKET_MB, **options)
    assert len(optimizer.buckets) > 1
    before = flatten([local(param) for param in model.parameters()])
    with Join([optimizer]) if "Join" in names else nullcontext():
        for step in range(STEPS - ("Join" in names and place == 1)):
            x, y = batch(place, step)
            backward(loss_of(trained(x), y))
            if trained is model:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.synchronize()
    after = flatten([local(param) for param in model.parameters()])
    assert optimizer.round > 0
    assert after.isfinite().all()
    assert not torch.equal(before, after)


def try_all(cases: list[Names]) -> dict[Names, str]:
    """On every rank, the type and the text of the error of each case; empty if it is trained."""
    errors = {}
    for names in cases:
        errors[names] = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(names)
        except (TypeError, ValueError) as error:
            errors[names] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return errors


def table(heading: str) -> Iterator[list[str]]:
    """The rows of the first table behind a heading of the guide, without its head."""
    page = "\n" + GUIDE.read_text(encoding="utf-8")
    _, _, text = page.partition(f"\n{heading}\n")
    rows = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n?)+)", text, re.MULTILINE)
    assert rows, heading
    for row in rows[1].splitlines():
        yield [cell.strip() for cell in row.strip("|").split("|")]


def pairs_of(cell: str) -> Iterator[Pair]:
    for pair in cell.split("; "):
        one, other = pair.split(", ")
        yield one, other


def cells() -> dict[Pair, str]:
    """What the page says of each pair, by the tables of errors and of notes."""
    found = dict.fromkeys(PAIRS, "yes") | dict.fromkeys(EXCLUDED, "-")
    for heading, cell in (("## What is refused", "no"), ("## What to know", "note")):
        for pair in (pair for row in table(heading) for pair in pairs_of(row[0])):
            assert found[pair] == "yes", pair
            found[pair] = cell
    return found


def page() -> str:
    """The page, with the matrix of all pairs made again."""
    said, names = cells(), [*OPTIONS]
    rows = [["", *names[:-1]], ["---"] * len(names)]
    for place, name in enumerate(names[1:], 1):
        row = [said[other, name] for other in names[:place]]
        rows.append([f"**{name}**", *row, *[""] * (len(names) - 1 - place)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines[:2] = [lines[0].replace("|  |", "| |", 1), lines[1].replace(" ", "")]
    text = GUIDE.read_text(encoding="utf-8")
    return re.sub(r"^\| \| .*\n(\|.*\n)+", "\n".join(lines) + "\n", text, flags=re.MULTILINE)


def test_the_guide_has_all_options_and_pairs() -> None:
    assert [row[0] for row in table("# Options that go together")] == [*OPTIONS]
    stale = "write it again: python tests/test_options.py"
    assert GUIDE.read_text(encoding="utf-8") == page(), stale


def together(pairs: list[Pair]) -> Iterator[Names]:
    """Options of which any two go together; each of these pairs is in one of the cases."""
    missing = dict.fromkeys(pairs)
    while missing:
        names: Names = next(iter(missing))
        for name in OPTIONS:
            more = tuple(each for each in OPTIONS if each in (*names, name))
            added = {*combinations(more, 2)} - {*combinations(names, 2)}
            if added <= {*pairs} and added & missing.keys():
                names = more
        for pair in combinations(names, 2):
            missing.pop(pair, None)
        yield names


def test_a_pair_is_trained_or_raises_what_the_guide_quotes() -> None:
    quoted = {pair: row[1:3] for row in table("## What is refused") for pair in pairs_of(row[0])}
    refused = {*quoted}
    rest = [pair for pair in PAIRS if pair not in EXCLUDED and pair not in refused]
    cases = [*refused, *together(rest)]
    assert len(cases) < len(PAIRS) / 2
    # A mesh whose replicas are spread over two ranks needs four.
    for world_size, is_mesh in ((2, False), (4, True)):
        tried = [names for names in cases if ("mesh" in names) is is_mesh]
        for errors in run_on_mesh(world_size, try_all, tried):
            assert {names for names, error in errors.items() if error} == refused & {*tried}
            for pair in refused & {*tried}:
                kind, text = quoted[pair]
                assert len(text) > 20
                assert errors[pair].startswith(f"{kind}: ")
                assert text.strip("`") in errors[pair], pair


if __name__ == "__main__":
    GUIDE.write_text(page(), encoding="utf-8")
