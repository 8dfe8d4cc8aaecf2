"""The command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import netlab
import pytest
import torch
from ranks import print_to, run_processes, start_process

from decent_optim_wrapper import Group, Topology
from decent_optim_wrapper.cli import main
from decent_optim_wrapper.planning import suggest
from decent_optim_wrapper.planning.mesh_probe import pairings
from decent_optim_wrapper.topo.base import REGISTRY


def printed(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(command.split()) == 0
    return output.getvalue()


def refusal(command: str) -> str:
    """The one line with which a command ends."""
    with contextlib.redirect_stderr(io.StringIO()) as output, pytest.raises(SystemExit, match="2"):
        main(command.split())
    (line,) = output.getvalue().strip().splitlines()
    return line


class Apart(Topology):
    """Two pairs that never mix with each other, one of them with weights of its own."""

    def phases(self) -> list[list[Group | list[int]]]:
        return [[Group([0, 1], 0.75), [2, 3]]]


def test_the_table_of_topologies_names_those_that_fit_and_why_others_do_not() -> None:
    command = "topologies --world-size 12 --local-world-size 4"
    header, _, *lines = printed(command).splitlines()
    (legend,) = (line for line in lines if line.startswith("best first"))
    for column in ("consensus_rate", "rounds_to_consensus", "steady_error", "copies_maximum"):
        assert column in header
        assert f"{column}: " in legend
    (cuboid,) = (line for line in lines if line.startswith("hypercuboid"))
    assert re.split(" {2,}", cuboid)[:5] == ["hypercuboid", "3", "2, 3", "0.000", "3"]
    (ring,) = (line for line in lines if line.startswith("ring"))
    assert re.split(" {2,}", ring)[4] == "never"
    assert "one-peer-exp does not fit: it needs a world size that is a power of two" in lines
    data = json.loads(printed(f"{command} --json"))
    assert tuple(row["name"] for row in data["topologies"]) == suggest(12, 4)
    errors = {row["name"]: row["steady_error"] for row in data["topologies"]}
    assert errors["ring"] == pytest.approx(1.889, abs=1e-3)
    power_of_two = {"name": "one-peer-exp", "needs": "a world size that is a power of two"}
    assert power_of_two in data["misfits"]


@mock.patch.dict(REGISTRY, apart=Apart)
def test_ranks_that_drift_apart_and_weights_of_their_own_are_told_and_in_valid_json() -> None:
    command = "topologies --world-size 4 --topology ring apart"
    rows = [line.split() for line in printed(command).splitlines()[2:4]]
    assert [(row[0], row[5] == "inf") for row in rows] == [("ring", False), ("apart", True)]
    text = printed(f"{command} --json")
    assert "Infinity" not in text
    assert [row["steady_error"] is None for row in json.loads(text)["topologies"]] == [False, True]
    lines = printed("show apart --world-size 4").splitlines()
    assert lines[1:] == ["phase 0: 0-1 (self_weight 0.75)  2-3"]
    data = json.loads(printed("show apart --world-size 4 --json"))
    pairs = [{"ranks": [0, 1], "self_weight": 0.75}, {"ranks": [2, 3], "self_weight": 0.5}]
    assert data["phases"] == [pairs]


@pytest.mark.slow
def test_show_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ring.svg"
    # Five phases, in two rows with places for eight.
    assert "phase 4: " in printed(f"show base-2 --world-size 7 -o {path}")
    assert path.read_text().startswith("<?xml")


def test_a_missing_matplotlib_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Where another test has imported it already.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refusal("show ring --world-size 4 -o ring.png")
    assert "pip install '.[plot]' in a clone" in said


def rows_of(arguments: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(printed(f"simulate {arguments} --json"))["rows"]
    return rows


def test_simulate_passes_on_what_describes_the_cluster() -> None:
    command = "simulate --topology ring --compute-time 0.1 --jitter 0.2 --bandwidth 3e6"
    command += " --latency 0.4 --parameters 500 --bytes-per-parameter 2 --steps 6 --seed 7"
    command += " --slow-share 0.8 --slow-factor 9 --bucket-cap-mb 10 --json"
    assert json.loads(printed(command))["cluster"] == {
        **{"compute_time": 0.1, "jitter": 0.2, "bandwidth": 3e6, "latency": 0.4},
        **{"parameter_bytes": 1000, "steps": 6, "seed": 7},
        **{"slow_share": 0.8, "slow_factor": 9, "bucket_cap_mb": 10},
    }


def test_simulate_prints_a_row_for_each_topology_that_fits_and_each_schedule() -> None:
    schedules = "gossip_every=1 gossip_every=4,staleness=4 gossip_every=auto,max_staleness=8"
    arguments = f"--world-size 8 7 --steps 50 --topology ring greedy --schedule {schedules}"
    rows = rows_of(arguments)
    worlds = [(8, "ring"), (8, "greedy"), (7, "greedy")]
    expected = [(*world, schedule) for world in worlds for schedule in schedules.split()]
    assert [(row["world_size"], row["topology"], row["schedule"]) for row in rows] == expected
    every_step, late, auto = (row["overlap_seconds"] for row in rows[:3])
    assert auto < late < every_step
    assert rows[2]["steps_per_round"] > 2
    header, _, *lines = printed(f"simulate {arguments}").splitlines()
    assert header.split()[-1] == "speedup"
    speedups = [float(line.split()[-1]) for line in lines]
    assert speedups == pytest.approx([row["speedup"] for row in rows], abs=1e-3)


def test_nothing_to_compute_and_to_send_is_not_an_error() -> None:
    nothing = "--compute-time 0 --jitter 0 --latency 0 --parameters 0 --steps 3"
    assert {row["speedup"] for row in rows_of(nothing)} == {1.0}


def test_the_simulations_of_the_guide_print_its_rows() -> None:
    guide = (Path(__file__).parent.parent / "examples" / "guides" / "topologies.md").read_text()
    start = "python -m decent_optim_wrapper simulate "
    lines = guide.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix(start) for line in lines if line.startswith(start)]
    assert len(commands) == 3
    # The last --steps counts.
    rows = [row for command in commands for row in rows_of(f"{command} --steps 3")]
    told = re.findall(r"^\| (8|64|1024) \| `([\w=,-]+)` \| \d\.\d{3}", guide, re.MULTILINE)
    assert len(told) == 8 + 9
    found = {(str(row["world_size"]), row[key]) for row in rows for key in ("topology", "schedule")}
    assert {*told} <= found


REFUSED = {
    "nonsense": "invalid choice: 'nonsense'",
    "topologies --world-size 0": "world_size must be 1 or more",
    "topologies --world-size 8 --local-world-size 3": "must divide",
    "topologies --topology rign": "did you mean 'ring'",
    "show ring --world-size 5": "an even world size",
    "show ring --world-size 4 -o ring.doc": "'doc' is not supported",
    "show ring --world-size 4 -o no/such/folder/ring.png": "No such file",
    "simulate --world-size 8 7 --topology ring": "ring does not fit: it needs an even world size",
    "simulate --bandwidth -1": "bandwidth=-1.0",
    "simulate --schedule gossip_every=2,staleness=3": "staleness from 1 to gossip_every",
    "simulate --schedule gossip_every=often": "got 'gossip_every=often'",
    "simulate --schedule gossip_every=2,gossip_every=4": "each at most once",
    "simulate --schedule staleness=auto": "got 'staleness=auto'",
    "simulate --schedule mixing_rate=1": "got 'mixing_rate=1'",
    "comm": "torchrun --nproc-per-node",
    "comm --mib inf": "mib=inf",
    "comm --mib 1e-9": "mib=1e-09",
    "comm --repeats 0": "repeats=0",
    "comm --mesh data=2,pipe=3": "ranks, 8, got 'data=2,pipe=3' with a product of 6",
    "comm --mesh data=2,tensor=2,data=2": "'data' is twice",
    "comm --mesh data=8,tensor=1": "dimensions of one rank",
    "comm --mesh data": "NAME=SIZE",
    "comm --mesh =8": "NAME=SIZE",
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_arguments_give_one_line_and_exit_2_before_the_ranks_meet(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if " -o " in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8" if "--mesh" in command else "1")
    assert REFUSED[command] in refusal(command)
    assert not list(tmp_path.iterdir())


def run_module(rank: int, command: str) -> tuple[object, str]:
    """``python -m decent_optim_wrapper`` with these arguments; its exit status and output."""
    sys.argv[1:] = command.split()
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        mock.patch("os._exit", side_effect=sys.exit),
        pytest.raises(SystemExit) as caught,
    ):
        runpy.run_module("decent_optim_wrapper", run_name="__main__")
    return caught.value.code, output.getvalue()


def run_beside_a_busy_thread(command: str, output: Path) -> None:
    print_to(output)
    threading.Thread(target=time.sleep, args=(60,)).start()
    sys.argv[1:] = command.split()
    runpy.run_module("decent_optim_wrapper", run_name="__main__")


def test_a_thread_in_a_call_does_not_delay_or_abort_the_end(tmp_path: Path) -> None:
    """As that of a launcher whose store has lost its majority."""
    output = tmp_path / "output"
    process = start_process(run_beside_a_busy_thread, "topologies --world-size 4", output)
    process.join(40)
    try:
        assert process.exitcode == 0
        assert "ring" in output.read_text()
    finally:
        process.kill()


def measured(ranks: int, options: str) -> str:
    """What rank 0 prints; the others are silent."""
    command = f"comm --mib 0.1 --repeats 1 {options}"
    (status, text), *others = run_processes(ranks, run_module, command)
    assert status == 0
    assert others == [(0, "")] * (ranks - 1)
    return text


@pytest.mark.slow
def test_comm_measures_every_pair() -> None:
    data = json.loads(measured(3, "--json"))
    assert torch.equal(torch.tensor(data["bandwidth"]) > 0, ~torch.eye(3, dtype=torch.bool))
    assert data["all_reduce_bytes_per_second"] > 0
    assert 0 < data["all_reduce_latency"] < 10


@pytest.mark.slow
def test_comm_measures_every_dimension_of_a_mesh_and_says_on_which_one_to_gossip() -> None:
    data = json.loads(measured(6, "--mesh a=2,b=3 --json"))
    assert data["mesh"] == {"a": 2, "b": 3}
    found = data["dimensions"]
    ranks = {name: [group["ranks"] for group in groups] for name, groups in found.items()}
    assert ranks == {"a": [[0, 3], [1, 4], [2, 5]], "b": [[0, 1, 2], [3, 4, 5]]}
    for group in [*found["a"], *found["b"]]:
        assert set(group["slowest_pair"]) <= set(group["ranks"])
        assert 0 < group["slowest_bandwidth"] <= group["bandwidth"]
        assert 0 < group["latency"] < 10
        assert group["all_reduce_bytes_per_second"] > 0
    assert all(group["slowest_pair"] == group["ranks"] for group in found["a"])
    speeds = {name: min(g["slowest_bandwidth"] for g in groups) for name, groups in found.items()}
    assert data["slowest"] == min(speeds, key=speeds.__getitem__)
    *tables, last = measured(6, "--mesh a=2,b=3").split("\n\n")
    heads = [table.splitlines()[0] for table in tables]
    assert heads == ["a: groups of 2, all at once", "b: groups of 3, all at once"]
    assert [line.split("  ")[0] for line in tables[1].splitlines()[3:5]] == ["0, 1, 2", "3, 4, 5"]
    slowest = re.search(r"^slowest dimension: ([ab]), [1-9]", last)
    assert slowest is not None, last
    assert f'gossip on it: DecentOptimWrapper(..., mesh=mesh, gossip_dim="{slowest[1]}")' in last


def run_on_two_hosts(rank: int, hosts: Sequence[str], command: str) -> tuple[object, str]:
    """Even ranks run on one host and odd ranks on the other."""
    netlab.enter(hosts[rank % 2])
    os.environ.update(
        MASTER_ADDR=netlab.address(0),
        MASTER_PORT="29500",
        TORCHELASTIC_USE_AGENT_STORE="False",
        GLOO_SOCKET_IFNAME="eth0",
    )
    return run_module(rank, command)


@pytest.mark.slow
@pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2")
def test_comm_names_the_dimension_whose_links_are_slow() -> None:
    """Those of the innermost one leave the host, with 100 Mbit/s for the four ranks of a host."""
    with netlab.lab(2, "100mbit") as where:
        command = "comm --json --mib 0.3 --repeats 3 --mesh data=2,pipe=2,tensor=2"
        status, text = run_processes(8, run_on_two_hosts, where.hosts, command)[0]
    assert status == 0
    data = json.loads(text)
    assert data["slowest"] == "tensor"
    # All four groups at once share the link, and each of them would have it for itself alone. On a
    # busy machine some may come late, and find it free.
    assert min(group["bandwidth"] for group in data["dimensions"]["tensor"]) < 8e6


def test_in_a_group_of_any_size_every_rank_meets_every_other_once() -> None:
    for n in range(2, 9):
        rounds = pairings(n)
        assert len(rounds) == n - 1 + n % 2
        assert all(peers[peers[rank]] == rank for peers in rounds for rank in range(n))
        met = [(rank, peers[rank]) for peers in rounds for rank in range(n) if peers[rank] != rank]
        assert sorted(met) == [(a, b) for a in range(n) for b in range(n) if a != b]
