"""The command line."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import run_script, run_script_on_ranks
from time_to_loss import step_times

from decent_optim_wrapper.cli import main
from decent_optim_wrapper.planning import suggest


def printed(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(command.split()) == 0
    return output.getvalue()


def refusal(command: str) -> str:
    """The last line, with which a command ends; the usage comes before it."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as output,
        mock.patch("subprocess.Popen") as started,
        pytest.raises(SystemExit, match="2"),
    ):
        main(command.split())
    started.assert_not_called()
    *_, line = output.getvalue().strip().splitlines()
    return line


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
    assert re.split(" {2,}", ring)[4:6] == ["never", "1.889"]
    assert "one-peer-exp does not fit: it needs a world size that is a power of two" in lines
    names = [line.split()[0] for line in lines if "does not fit" not in line and line != legend]
    assert tuple(names) == suggest(12, 4)


def test_a_plan_agrees_with_the_lab_and_names_what_is_fast_enough() -> None:
    # The column of 218 Mbit/s: coding takes no time in a plan, and in the lab four ranks share two
    # cores.
    rows = {method: int(cells[4]) / 1000 for method, *cells in step_times()[1:]}
    alone = rows["no communication"]
    table = printed(f"plan --parameters 5.243e6 --ranks 4 --bandwidth 218mbit --step {alone}")
    lines = (re.split(" {2,}", line) for line in table.splitlines())
    planned = {line[0]: float(line[1]) for line in lines if len(line) == 3 and line[1] != "s/step"}
    for settings, row in {
        "DDP": "DDP",
        "DDP, bf16 hook": "DDP, bf16 hook",
        "DecentOptimWrapper(base, model=model)": "the wrapper",
        "DecentOptimWrapper(..., model=model, int8)": "the wrapper, int8",
    }.items():
        assert planned[settings] == pytest.approx(rows[row], rel=0.1), settings
    takes = {
        "100gbit": "take DDP",
        "1gbit": "take DecentralizedDataParallel(..., topology",
        "400mbit": "take DecentOptimWrapper(..., model=model, int8)",
        "60mbit": "take DecentOptimWrapper(..., overlap=AsItArrives(), int8)",
    }
    for rate, taken in takes.items():
        command = f"plan --parameters 5.243M --ranks 4 --bandwidth {rate} --step 0.3"
        *_, advice, last = printed(command).splitlines()
        assert last.startswith(taken), rate
        assert "Muon x 1.5" in advice


ETCD = "etcd://host:2379/run"
REFUSED = {
    "nonsense": "invalid choice: 'nonsense'",
    "topologies --world-size 0": "world_size must be 1 or more",
    "topologies --topology rign": "did you mean 'ring'",
    "comm": "torchrun --nproc-per-node",
    "comm --mib inf": "mib=inf",
    "comm --repeats 0": "repeats=0",
    "plan --parameters 1e6 --ranks 1 --bandwidth 1gbit --step 1": "2 ranks or more",
    "plan --parameters 1e6 --ranks 4 --bandwidth 1tbit --step 1": "bandwidth=nan",
    "plan --parameters 1Q --ranks 4 --bandwidth 1gbit --step 1": "invalid count value: '1Q'",
    "plan --parameters 1M --ranks 4 --bandwidth 5 --step 1": "invalid bandwidth value: '5'",
    "run --nnodes 2 train.py": "--nnodes 2 needs --endpoint host:port",
    "run --nnodes 2 --node-rank 2 x.py": "--node-rank must be below 2",
    "run --endpoint 29500 x.py": "host:port, with a port from 1 to 65535, got '29500'",
    "run --nproc-per-node 0 train.py": "--nproc-per-node must be at least 1, got 0",
    "run --store host1:2379 train.py": "expected a store as 'etcd://host1:2379,host2",
    f"run --store {ETCD}?colour=red train.py": "of ca_cert, client_cert, client_key, password,",
    "run --store etcd://host:70000/run train.py": "from 1 to 65535, got 'host:70000'",
    "run no_such.py --lr 1": "there is no script 'no_such.py' in ",
    "run": "required: script.py",
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_arguments_are_named_and_exit_2_before_ranks_start_or_meet(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert REFUSED[command] in refusal(command)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "place",
    [
        *("me:secret@host:2379/run", "host:2379,me:secret@host2:2379/run", "me:secret/run"),
        *("host:2379/run;password=secret", "host:2379/run?ca_cert=ca.pem;password=secret"),
        *("host:2379/run?user=me&password=a&secret", "host:2379?password=secret"),
        *("host:2379/run?user=me:secret@host", "host:2379/run?user=me&password=secret"),
    ],
)
def test_a_url_that_is_refused_is_not_quoted_beyond_its_hosts(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("etcd", "http"):
        monkeypatch.setenv("DECENT_STORE", f"{scheme}://{place}")
        assert "secret" not in refusal("run -m train")


def test_a_missing_client_and_a_taken_port_are_errors_before_any_rank_is_started() -> None:
    with mock.patch.dict(sys.modules, {"pyetcd": None}):
        assert "pip install '.[etcd]'" in refusal(f"run --store {ETCD} -m train")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in refusal(f"run --endpoint 127.0.0.1:{port} -m train")


MODULE = 'import runpy; runpy.run_module("decent_optim_wrapper", run_name="__main__")'
BUSY = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"


@pytest.mark.slow
def test_a_thread_in_a_call_does_not_delay_or_abort_the_end(tmp_path: Path) -> None:
    """As that of a launcher whose store has lost its majority."""
    (tmp_path / "script.py").write_text(f"{BUSY}; {MODULE}")
    command = ("script.py", "topologies", "--world-size", "4")
    assert "ring" in run_script(*command, cwd=tmp_path, seconds=40)


@pytest.mark.slow
def test_comm_measures_every_pair(tmp_path: Path) -> None:
    """Rank 0 prints; the others are silent."""
    (tmp_path / "script.py").write_text(MODULE)
    command = ("script.py", "comm", "--mib", "0.1", "--repeats", "1")
    text = run_script_on_ranks(3, *command, cwd=tmp_path)
    _, _, *rows = text.splitlines()
    rates = [[float(cell) for cell in row.split()[2:]] for row in rows[:3]]
    assert torch.equal(torch.tensor(rates) > 0, ~torch.eye(3, dtype=torch.bool))
    assert re.search(r"[1-9]\d* us$", text, re.MULTILINE)
    assert len(re.findall(r"all-reduce of all ranks: [1-9]", text)) == 1
