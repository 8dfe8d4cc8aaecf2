"""The command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import netlab
import pytest
import torch
from ranks import run_processes

from decent_optim_wrapper import Group, Topology
from decent_optim_wrapper.cli import main
from decent_optim_wrapper.planning import suggest
from decent_optim_wrapper.planning.mesh_probe import pairings
from decent_optim_wrapper.topo.base import REGISTRY


class Apart(Topology):
    """Two pairs that never mix with each other, one of them with weights of its own."""

    def phases(self) -> list[list[Group | list[int]]]:
        return [[Group([0, 1], 0.75), [2, 3]]]


@pytest.fixture
def apart() -> Iterator[None]:
    before = dict(REGISTRY)
    REGISTRY["apart"] = Apart
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_table_of_topologies_names_those_that_fit_and_why_others_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "topologies", "--world-size", "7")
    assert "greedy" in text
    assert "ring does not fit: it needs an even world size" in text
    (legend,) = (line for line in text.splitlines() if line.startswith("best first"))
    header = text.splitlines()[0]
    for column in ("consensus_rate", "rounds_to_consensus", "steady_error", "copies_maximum"):
        assert column in header
        assert f"{column}: " in legend
    data = json.loads(printed(capsys, "topologies", "--world-size", "7", "--json"))
    greedy = next(row for row in data["topologies"] if row["name"] == "greedy")
    assert greedy["steady_error"] == pytest.approx(1.195, abs=1e-3)
    assert {"name": "ring", "needs": "an even world size"} in data["misfits"]


@pytest.mark.slow
def test_show_draws_in_text_and_in_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"ring{suffix}"
        assert main(["show", "ring", "--world-size", "4", "-o", str(path)]) == 0
        assert path.read_bytes().startswith(start)
    assert "phase 1: 0-3  1-2" in capsys.readouterr().out


def test_a_missing_matplotlib_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Where another test has imported it already.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ("show", "ring", "--world-size", "4", "-o", "ring.png")
    assert "pip install '.[plot]' in a clone" in refusal(capsys, *command)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    text = printed(capsys, "simulate", *arguments, "--json")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows


def test_simulate_prints_the_speed_up_of_the_topologies_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("--world-size", "8", "7", "--steps", "5", "--topology", "greedy", "ring")
    rows = simulated(capsys, *command)
    assert [(row["world_size"], row["topology"]) for row in rows] == [
        (8, "greedy"),
        (8, "ring"),
        (7, "greedy"),
    ]
    header, _, first, *_ = printed(capsys, "simulate", *command).splitlines()
    assert header.split()[-1] == "speedup"
    assert float(first.split()[-1]) == pytest.approx(rows[0]["speedup"], abs=1e-3)
    assert all(row["speedup"] > 0 for row in rows)


def test_simulate_prints_a_row_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    schedules = (
        "gossip_every=1",
        "gossip_every=4,staleness=4",
        "gossip_every=auto,max_staleness=8",
    )
    command = ("--topology", "ring", "--steps", "50", "--schedule", *schedules)
    rows = simulated(capsys, *command)
    assert [row["schedule"] for row in rows] == [*schedules]
    every_step, late, auto = (row["overlap_seconds"] for row in rows)
    assert auto < late < every_step
    assert rows[2]["steps_per_round"] > 2
    slow = simulated(capsys, *command, "--slow-share", "0.1")
    assert slow[1]["overlap_seconds"] > 2 * late, "a slow rank holds up all others"
    assert slow[2]["overlap_waiting"] < 0.05, "or none of them"


def test_the_simulations_of_the_guide_print_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parent.parent / "examples" / "guides" / "topologies.md").read_text()
    start = "python -m decent_optim_wrapper "
    lines = guide.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix(start) for line in lines if line.startswith(f"{start}simulate")]
    assert len(commands) == 3
    rows = []
    for command in commands:
        # The last --steps counts.
        rows += simulated(capsys, *command.split()[1:], "--steps", "3")
    told = re.findall(r"^\| (8|64|1024) \| `([\w=,-]+)` \| \d\.\d{3}", guide, re.MULTILINE)
    assert len(told) == 8 + 9
    found = {(str(row["world_size"]), row[key]) for row in rows for key in ("topology", "schedule")}
    assert {*told} <= found


@pytest.mark.parametrize(
    "arguments",
    [
        ["topologies", "--world-size", "0"],
        ["topologies", "--world-size", "8", "--local-world-size", "3"],
        ["show", "rign", "--world-size", "4"],
        ["show", "ring", "--world-size", "5"],
        ["show", "ring", "--world-size", "4", "-o", "ring.doc"],
        ["simulate", "--world-size", "4", "--bandwidth", "-1"],
        ["simulate", "--world-size", "0", "8"],
        ["simulate", "--world-size", "8", "7", "--topology", "ring"],
        ["simulate", "--topology", "rign"],
        ["simulate", "--world-size", "8", "--local-world-size", "3"],
        ["simulate", "--compute-time", "nan"],
        ["simulate", "--bandwidth", "inf"],
        ["simulate", "--parameters", "inf"],
        ["simulate", "--bytes-per-parameter", "nan"],
        ["simulate", "--bucket-cap-mb", "0"],
        ["simulate", "--slow-share", "1.1"],
        ["simulate", "--slow-factor", "0.5"],
        ["simulate", "--compute-time", "0"],
        ["simulate", "--schedule", "gossip_every=2,staleness=3"],
        ["simulate", "--schedule", "gossip_every=often"],
        ["simulate", "--schedule", "gossip_every=2,gossip_every=4"],
        ["simulate", "--schedule", "staleness=auto"],
        ["simulate", "--schedule", "mixing_rate=1"],
        ["topologies", "--topology", "rign"],
        ["show", "ring", "--world-size", "4", "-o", "no/such/folder/ring.png"],
        ["comm"],
        ["comm", "--mib", "inf"],
        ["comm", "--mib", "1e-9"],
        ["comm", "--repeats", "0"],
        ["nonsense"],
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def run_module(rank: int, *arguments: str) -> tuple[object, str]:
    """``python -m decent_optim_wrapper`` with these arguments; its exit status and output."""
    sys.argv[1:] = arguments
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as caught:
        runpy.run_module("decent_optim_wrapper", run_name="__main__")
    return caught.value.code, output.getvalue()


@pytest.mark.slow
def test_comm_measures_every_pair() -> None:
    command = ("comm", "--json", "--mib", "0.1", "--repeats", "2")
    (status, text), *others = run_processes(3, run_module, *command)
    assert status == 0
    assert others == [(0, ""), (0, "")]
    data = json.loads(text)
    bandwidth = torch.tensor(data["bandwidth"])
    assert torch.equal(bandwidth > 0, ~torch.eye(3, dtype=torch.bool))
    assert data["all_reduce_bytes_per_second"] > 0
    assert 0 < data["all_reduce_latency"] < 1


MESH = "data=2,pipe=2,tensor=2"
GROUPS = {
    "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "pipe": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
}


@pytest.mark.slow
def test_comm_measures_every_dimension_of_a_mesh() -> None:
    command = ("comm", "--json", "--mib", "0.1", "--repeats", "1", "--mesh", MESH)
    (status, text), *others = run_processes(8, run_module, *command)
    assert status == 0
    assert others == [(0, "")] * 7
    data = json.loads(text)
    assert data["mesh"] == {"data": 2, "pipe": 2, "tensor": 2}
    assert data["slowest"] in data["mesh"]
    for name, groups in data["dimensions"].items():
        assert [group["ranks"] for group in groups] == GROUPS[name]
        for group in groups:
            assert group["slowest_pair"] == group["ranks"]
            assert 0 < group["slowest_bandwidth"] == group["bandwidth"]
            assert 0 < group["latency"] < 10
            assert group["all_reduce_bytes_per_second"] > 0


@pytest.mark.slow
def test_comm_prints_a_table_for_every_dimension_and_on_which_one_to_gossip() -> None:
    command = ("comm", "--mib", "0.1", "--repeats", "1", "--mesh", "a=2,b=3")
    text = run_processes(6, run_module, *command)[0][1]
    tables = text.split("\n\n")
    assert [table.splitlines()[0] for table in tables[:2]] == [
        "a: groups of 2, all at once",
        "b: groups of 3, all at once",
    ]
    assert [line.split("  ")[0] for line in tables[1].splitlines()[3:5]] == ["0, 1, 2", "3, 4, 5"]
    slowest = re.search(r"^slowest dimension: ([ab]), [1-9]", tables[2])
    assert slowest is not None, text
    assert f'gossip on it: DecentOptimWrapper(..., mesh=mesh, gossip_dim="{slowest[1]}")' in text


def run_on_two_hosts(rank: int, hosts: Sequence[str], *arguments: str) -> tuple[object, str]:
    """Even ranks run on one host and odd ranks on the other."""
    netlab.enter(hosts[rank % 2])
    os.environ.update(
        MASTER_ADDR=netlab.address(0),
        MASTER_PORT="29500",
        TORCHELASTIC_USE_AGENT_STORE="False",
        GLOO_SOCKET_IFNAME="eth0",
    )
    return run_module(rank, *arguments)


@pytest.mark.slow
@pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2")
def test_comm_names_the_dimension_whose_links_are_slow() -> None:
    """Those of the innermost one leave the host, with 100 Mbit/s for the four ranks of a host."""
    with netlab.lab(2, "100mbit") as where:
        command = ("comm", "--json", "--mib", "1", "--repeats", "2", "--mesh", MESH)
        status, text = run_processes(8, run_on_two_hosts, where.hosts, *command)[0]
    assert status == 0
    data = json.loads(text)
    assert data["slowest"] == "tensor"
    # All four groups at once share the link, and each of them would have it for itself alone.
    assert all(group["bandwidth"] < 8e6 for group in data["dimensions"]["tensor"])


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("data=2,pipe=3", "the number of ranks, 8, got 'data=2,pipe=3' with a product of 6"),
        ("data=2,tensor=2,data=2", "'data' is twice"),
        ("data=2,tensor=four", "got 'tensor=four'"),
        ("data=8,tensor=1", "dimensions of one rank"),
        *((mesh, "NAME=SIZE") for mesh in ("data", "=8", "")),
    ],
)
def test_a_mesh_that_is_none_is_refused_before_the_ranks_meet(
    mesh: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert said in refusal(capsys, "comm", "--mesh", mesh)


def test_in_a_group_of_any_size_every_rank_meets_every_other_once() -> None:
    for n in range(2, 9):
        rounds = pairings(n)
        assert len(rounds) == n - 1 + n % 2
        assert all(peers[peers[rank]] == rank for peers in rounds for rank in range(n))
        met = [(rank, peers[rank]) for peers in rounds for rank in range(n) if peers[rank] != rank]
        assert sorted(met) == [(a, b) for a in range(n) for b in range(n) if a != b]


def test_ranks_that_drift_apart_are_told_in_words_and_in_valid_json(
    apart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("topologies", "--world-size", "4", "--topology", "ring", "apart")
    lines = printed(capsys, *command).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["ring", "apart"]
    assert lines[3].split()[5] == "inf"
    text = printed(capsys, *command, "--json")
    assert "Infinity" not in text
    rows = json.loads(text)["topologies"]
    assert [row["steady_error"] is None for row in rows] == [False, True]


def test_weights_that_are_not_the_plain_mean_are_shown(
    apart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "show", "apart", "--world-size", "4")
    assert text.splitlines()[1] == "phase 0: 0-1 (self_weight 0.75)  2-3"
    data = json.loads(printed(capsys, "show", "apart", "--world-size", "4", "--json"))
    assert data["phases"] == [
        [{"ranks": [0, 1], "self_weight": 0.75}, {"ranks": [2, 3], "self_weight": 0.5}]
    ]


def test_the_table_is_in_the_order_of_the_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in ((8, 2), (12, 1)):
        command = ("--world-size", str(sizes[0]), "--local-world-size", str(sizes[1]), "--json")
        rows = json.loads(printed(capsys, "topologies", *command))["topologies"]
        assert tuple(row["name"] for row in rows) == suggest(*sizes)


def test_nothing_to_compute_and_to_send_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = ("--compute-time", "0", "--jitter", "0", "--latency", "0", "--parameters", "0")
    assert {row["speedup"] for row in simulated(capsys, "--steps", "3", *nothing)} == {1.0}


def test_greedy_is_for_at_most_256_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("topologies", "--world-size", "257", "--topology", "greedy", "hypercuboid")
    text = printed(capsys, *command)
    assert "greedy does not fit: it needs at most 256 ranks" in text
    assert ["hypercuboid", "1", "257"] in [line.split()[:3] for line in text.splitlines()]
    found = {row["topology"] for row in simulated(capsys, "--world-size", "257", "--steps", "2")}
    assert "hypercuboid" in found
    assert "greedy" not in found


@pytest.mark.slow
def test_the_table_of_32_ranks_has_known_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "topologies", "--world-size", "32")
    (exponential,) = (line for line in text.splitlines() if line.startswith("one-peer-exp"))
    assert exponential.split()[:5] == ["one-peer-exp", "5", "2", "0.000", "5"]
