"""The command line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import run_script, run_script_on_ranks
from torch.distributed.run import determine_local_world_size

from decent_optim_wrapper import __version__
from decent_optim_wrapper.cli import main
from decent_optim_wrapper.elastic.launcher.options import LaunchOptions
from decent_optim_wrapper.elastic.stores.launched_store import StoreUrl
from decent_optim_wrapper.planning import plan
from decent_optim_wrapper.topo import OnePeerExponential
from decent_optim_wrapper.wire.references import keeps_references

PROGRAM = "python -m decent_optim_wrapper"
EXAMPLE = "plan --parameters 124M --ranks 8 --bandwidth 1gbit --step 0.4"
AS_IT_ARRIVES = (
    "DecentOptimWrapper(base, model=model, overlap=AsItArrives(), "
    'topology="one-peer-exp", comm_dtype=torch.int8)'
)


def printed(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(command.split()) == 0
    return output.getvalue()


def refusal(command: str) -> str:
    """The last line, with which a command ends; the usage of the command comes before it."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as output,
        mock.patch("subprocess.Popen") as started,
        pytest.raises(SystemExit, match="2"),
    ):
        main(command.split())
    started.assert_not_called()
    usage, *_, line = output.getvalue().strip().splitlines()
    name = command.split()[0]
    program = PROGRAM if name == "nonsense" else f"{PROGRAM} {name}"
    assert usage.startswith(f"usage: {program} [-h]")
    assert line.startswith(f"{program}: error: ")
    return line


def test_a_plan_knows_ranks_optimizer_and_times_that_vary() -> None:
    plans = [
        printed(f"plan --parameters 5.243M --bandwidth {options} --step 0.3")
        for options in (
            *("218mbit --ranks 4", "2gbit --ranks 4", "218mbit --ranks 16"),
            *("218mbit --ranks 4 --optimizer Muon", "218mbit --ranks 4 --varying"),
            "218mbit --ranks 32",
        )
    ]
    assert len({*plans}) == len(plans)
    for text in plans:
        *_, measured, ratio, pick = text.splitlines()
        assert measured.startswith("losses of 16 ranks (32 were not measured), ") == (
            text is plans[-1]
        )
        assert ("and times of 8 ranks" in measured) == ("losses of 16 ranks" in measured)
        assert re.match(r"an all-reduce takes \d+\.\d+ times as long as computing", ratio)
        assert re.match(r"take .* at ([\d.]+ times )?DDP's learning rate: it has DDP's loss", pick)


def rows_of(plan: str) -> dict[str, list[float]]:
    """The seconds of a step, the steps and the speed-up of each setting of a plan."""
    rows = plan.splitlines()[2:-3]
    return {row.partition("  ")[0]: [*map(float, row.split()[-3:])] for row in rows}


def test_the_steps_of_a_plan_contain_those_of_rounds_that_arrive_later() -> None:
    columns = []
    for rate in ("2gbit", "40mbit"):
        rows = rows_of(printed(f"plan --parameters 5.243M --ranks 4 --step 0.3 --bandwidth {rate}"))
        seconds, steps, speed = zip(rows[AS_IT_ARRIVES], rows["DDP"], strict=True)
        assert speed[0] == pytest.approx(seconds[1] / seconds[0] / steps[0], rel=0.01)
        columns.append(steps)
    assert columns[1][0] > columns[0][0] > columns[0][1] == columns[1][1] == 1


def test_a_plan_says_between_which_ratios_times_were_measured() -> None:
    job = "plan --parameters 5.243M --ranks 4 --step 0.3 --bandwidth 40mbit"
    equal, varying = (printed(f"{job} {more}").splitlines()[-3] for more in ("", "--varying"))
    assert ("and above 8;" in equal, "and above 4;" in varying) == (True, True)


@pytest.mark.parametrize("options", ["", "--varying", "--optimizer Muon", "--optimizer SGD"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_plan_takes_what_no_setting_with_as_many_steps_beats(ranks: int, options: str) -> None:
    for step in (3.2, 0.8, 0.2, 0.1, 0.01):
        job = f"--parameters 124M --bandwidth 10gbit --ranks {ranks} --step {step} {options}"
        text = printed(f"plan {job}")
        table, pick = rows_of(text), text.splitlines()[-1]
        found = re.match(r"take (.*?) with .* after ([\d.]+) times as many steps", pick)
        assert found is not None
        seconds, steps, _ = table[found[1]]
        assert f"{steps:.2f}" == f"{float(found[2]):.2f}"
        offered = (row for name, row in table.items() if name.startswith(("DDP", "Dec")))
        assert all(row[0] >= seconds for row in offered if row[1] <= steps)


@pytest.mark.parametrize("options", ["", "--varying", "--optimizer Muon", "--optimizer SGD"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_plan_promises_no_gain_where_the_network_takes_no_time(ranks: int, options: str) -> None:
    text = printed(f"plan --parameters 124 --bandwidth 1gbit --step 0.4 --ranks {ranks} {options}")
    assert "an all-reduce takes 0.00 times" in text
    # With Muon pairs on 4 ranks need fewer steps than DDP.
    assert text.endswith(" 1.0 times as fast\n")
    assert "take DDP with" in text or (ranks, options) in (
        (2, "--optimizer Muon"),
        (4, "--optimizer Muon"),
    )


def test_above_16_ranks_groups_of_four_take_the_place_of_all_ranks() -> None:
    for ranks, groups in (
        (16, "Hierarchical(16, 4, inner='complete')"),
        (64, "Hierarchical(64, 4, inner=Hierarchical(16, 4, inner='complete'))"),
        (24, "Hierarchical(24, 4, inner='complete')"),
    ):
        text = printed(f"plan --parameters 124M --ranks {ranks} --bandwidth 1gbit --step 0.4")
        assert groups in text
        assert ('topology="complete"' in text) == (ranks == 16)


def test_pairs_are_a_choice_for_all_ranks_that_keep_references_for_them() -> None:
    chosen = [ranks for ranks in range(2, 70) if plan.written('topology="one-peer-exp"', ranks)]
    kept = [n for n in range(3, 70) if OnePeerExponential.fits(n)]
    assert chosen == [n for n in kept if keeps_references(OnePeerExponential(n))] != kept


def test_pairs_are_no_choice_for_two_ranks_which_are_one_in_any_case() -> None:
    for ratio in (8.25, 41):
        text = printed(f"plan --parameters 124M --ranks 2 --bandwidth 1gbit --step {4.13 / ratio}")
        assert "one-peer-exp" not in text
        assert "take " in text


@pytest.mark.parametrize(
    "same",
    [
        ["--bandwidth 1gbit", "--bandwidth 1Gbps", "--bandwidth 1000Mb/s", "--bandwidth 125MB/s"],
        ["--step 0.4", "--step 400ms", "--step .4s"],
        ["--parameters 124M", "--parameters 0.124B", "--parameters 124_000_000"],
    ],
)
def test_figures_of_a_plan_are_read_as_people_write_them(same: list[str]) -> None:
    # The last of an option counts.
    plans = {printed(f"{EXAMPLE} {each}") for each in same}
    assert plans == {printed(EXAMPLE)} != {printed(f"{EXAMPLE} --step 1 --bandwidth 1MBps")}


def helped(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit, match="0"):
        main(command.split())
    return output.getvalue()


def test_each_help_shows_a_command_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    of_all = helped("--help").partition("examples:\n")[2].splitlines()
    ran = []
    for line in of_all:
        _, program, words = line.partition("-m decent_optim_wrapper ")
        assert program
        name = words.split()[0]
        assert helped(f"{name} --help").endswith(f"example:\n{line}\n")
        with (
            mock.patch("decent_optim_wrapper.cli.launch", return_value=0),
            mock.patch("decent_optim_wrapper.cli.link_probe.run", return_value=None),
            mock.patch("decent_optim_wrapper.cli.export_average", return_value=(5, 4)),
        ):
            printed(words)
        ran.append(name)
    assert ran == ["run", "plan", "comm", "average"]
    assert helped("--version").strip() == __version__


def launched(options: str) -> LaunchOptions:
    with mock.patch("decent_optim_wrapper.cli.launch", return_value=0) as launch:
        printed(f"run {options} -m train")
    (given,) = launch.call_args.args
    assert isinstance(given, LaunchOptions)
    return given


def test_run_takes_what_people_write_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        sizes = [launched(f"--nproc-per-node {each}").nproc_per_node for each in ("cpu", "auto")]
        assert sizes == [determine_local_world_size("cpu")] * 2
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 3)
        assert launched("--nproc-per-node gpu").nproc_per_node == 3
    names = "nproc-per-node", "nnodes", "node-rank", "max-restarts", "log-dir"
    given = " ".join(f"--{name} {number}" for number, name in enumerate(names, start=2))
    given = f"--endpoint host:1 {given} --node-rank 1"
    underscores = re.sub(r"(\w)-", r"\1_", given)
    assert underscores != given
    assert (options := launched(given)) == launched(underscores)
    assert (options.nproc_per_node, options.max_restarts, options.log_dir) == (2, 5, Path("6"))
    monkeypatch.setenv("DECENT_STORE", ETCD)
    assert launched("").store is not None
    assert launched("--standalone") == LaunchOptions(command=("-m", "train"))


ETCD = "etcd://host:2379/run"
REFUSED = {
    "nonsense": "invalid choice: 'nonsense'",
    "comm": "torchrun --nproc-per-node",
    "comm --mib inf": "mib=inf",
    "comm --repeats 0": "repeats=0",
    "plan --parameters 1e6 --ranks 1 --bandwidth 1gbit --step 1": "2 ranks or more",
    f"{EXAMPLE} --bandwidth 1g": "--bandwidth: expected a rate such as 400mbit, 1Gbps or 125MB/s, "
    "got '1g'",
    f"{EXAMPLE} --bandwidth 5": "--bandwidth: expected a rate",
    f"{EXAMPLE} --bandwidth nan": "--bandwidth: expected a rate",
    f"{EXAMPLE} --bandwidth 1GBPS": "--bandwidth: expected a rate",
    f"{EXAMPLE} --parameters 1Q": "--parameters: expected a number such as 124M or 1.3B, got '1Q'",
    f"{EXAMPLE} --step 0": "--step: expected the time",
    f"{EXAMPLE} --step 4m": "--step: expected the time",
    f"{EXAMPLE} --stpe 3": "unrecognized arguments: --stpe 3",
    "run --nnodes 2 train.py": "--nnodes 2 needs --endpoint host:port",
    "run --nnodes 2 --node-rank 2 x.py": "--node-rank must be below 2",
    "run --backoff nan -m train": "--backoff must be 0 seconds or more, got nan",
    "run --endpoint 29500 x.py": "host:port, with a port from 1 to 65535, got '29500'",
    "run --nproc-per-node 0 train.py": "--nproc-per-node must be at least 1, got 0",
    "run --nproc-per-node all train.py": "nproc_per_node value: all",
    "run --rdzv_endpoint h:1 x.py": "--rdzv-endpoint is an option of torchrun; use --endpoint",
    "run --master-addr=h x.py": "--master-addr is an option of torchrun; use --endpoint HOST:PORT",
    "run --tee 3 x.py": "--tee is an option of torchrun; use --log-dir",
    "run --no-python x.py": "unrecognized arguments: --no-python",
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


def test_no_record_of_a_store_shows_its_password() -> None:
    url = StoreUrl.parse("etcd://host:2379/run?ca_cert=ca.pem&user=me&password=secret")
    assert url.options["password"] == "secret"
    shown = repr(LaunchOptions(command=("-m", "train"), store=url))
    assert "StoreUrl('host:2379', 'run')" in shown
    assert "secret" not in shown + str(url)


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
    """Such as the thread of a launcher whose store has lost its majority."""
    (tmp_path / "script.py").write_text(f"{BUSY}; {MODULE}")
    job = "--parameters", "10M", "--ranks", "4", "--bandwidth", "1gbit", "--step", "0.4"
    assert "int4" in run_script("script.py", "plan", *job, cwd=tmp_path, seconds=40)


def test_comm_says_what_the_ranks_cannot_start_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2"})
    with pytest.raises(RuntimeError, match=r"expected the variable RANK"):
        main(["comm"])


@pytest.mark.slow
def test_comm_measures_every_pair(tmp_path: Path) -> None:
    """Rank 0 prints; the others are silent."""
    (tmp_path / "script.py").write_text(MODULE)
    command = ("script.py", "comm", "--mib", "1.1", "--repeats", "1")
    text = run_script_on_ranks(3, *command, cwd=tmp_path)
    _, _, *rows = text.splitlines()
    rates = [[float(cell) for cell in row.split()[2:]] for row in rows[:3]]
    assert torch.equal(torch.tensor(rates) > 0, ~torch.eye(3, dtype=torch.bool))
    assert re.search(r"[1-9]\d* us$", text, re.MULTILINE)
    assert len(re.findall(r"all-reduce of all ranks: [1-9]", text)) == 1
