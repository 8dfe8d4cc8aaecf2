"""The launcher: restarts, signals, logs, exit codes, and nobody who outlives it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launched import TRAINING, Launched, children, is_alive, ours, torchruns
from torch._C._distributed_c10d import PrefixStore, TCPStore

from decent_optim_wrapper.cli import main
from decent_optim_wrapper.launcher import nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc"),
]

# Rank 0 dies in its first two processes, rank 1 in all of them. Rank 2 waits for them.
DYING = """
print("rank", rank, "is here")
tell(f"start {rank} {life}", time.monotonic())
if rank == 0 and life < 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    tell(f"{life} of rank 1")
    raise ValueError(f"no luck {life}")
wait_for("2 of rank 1")
wait_for("start 0 2")
wait_for("given up")
"""


def test_ranks_that_die_are_started_again_so_often_and_ever_later(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "3", "--max-restarts", "2", "--backoff", "0.2")
    with Launched(tmp_path, DYING, *options, "--log-dir", "logs") as launcher:
        launcher.wait_until(lambda: "--max-restarts is 2" in launcher.printed)
        (tmp_path / "given up").touch()
        assert launcher.end() == 1
    printed = launcher.printed
    assert printed.count("[rank 1] ValueError: no luck 0") == 1
    assert re.search(r"\[rank 0\] first error: killed by SIGKILL; see .*rank_0/start_1", printed)
    assert re.search(
        r"\[rank 1\] first error: exit code 1: ValueError: no luck 0; .*given", printed
    )
    assert "[rank 2] first error" not in printed
    for rank, lives in ((0, 3), (1, 3), (2, 1)):
        logs = sorted((tmp_path / "logs" / f"rank_{rank}").glob("*.stdout.log"))
        assert [log.read_text() for log in logs] == [f"rank {rank} is here\n"] * lives
        starts = [float(launcher.told(f"start {rank} {life}")) for life in range(lives)]
        pauses = [later - earlier for earlier, later in pairwise(starts)]
        assert all(pause >= 0.2 * 2**life for life, pause in enumerate(pauses))
    assert "no luck 2" in (tmp_path / "logs" / "rank_1" / "start_3.stderr.log").read_text()


ENDING = """
if rank == 1:
    tell("ready")
    wait_for("go")
    {fate}
"""


@pytest.mark.parametrize(
    ("fate", "code", "text"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, "exit code 7; it was given up"),
        ("os.abort()", 128 + signal.SIGABRT, "killed by SIGABRT; it was given up"),
    ],
)
def test_the_launcher_ends_as_the_rank_that_was_given_up(
    fate: str, code: int, text: str, tmp_path: Path
) -> None:
    """A rank is not started again either once another one has ended its training."""
    script = ENDING.format(fate=fate)
    with Launched(tmp_path, script, "--nproc-per-node", "2") as launcher:
        launcher.told("ready")
        (tmp_path / "go").touch()
        assert launcher.end() == code
    assert ("others have ended" in launcher.printed) == (code != 0)
    assert text in launcher.printed


FAILING = """
tell(f"life {rank} {life}")
wait_for(f"go on {rank} {life}")
if life == 0:
    FATE
"""


def let_go_on(folder: Path, life: int, *ranks: int) -> None:
    """Let ranks of `FAILING` go on."""
    for rank in ranks:
        (folder / f"go on {rank} {life}").touch()


def test_ranks_that_all_fail_at_their_first_start_are_not_started_again(tmp_path: Path) -> None:
    """As of a wrong argument."""
    script, options = FAILING.replace("FATE", "sys.exit(7)"), ("--nproc-per-node", "3")
    with Launched(tmp_path, script, *options, "--backoff", "0.1") as launcher:
        let_go_on(tmp_path, 0, 0)
        # It waits for the others now.
        launcher.told("life 0 1")
        let_go_on(tmp_path, 0, 1, 2)
        assert launcher.end() == 7
    assert "all ranks of this node failed within 60 s of their first start" in launcher.printed
    assert not (tmp_path / "life 2 1").exists()


def test_ranks_are_started_again_if_one_was_killed_before_all_others_failed(
    tmp_path: Path,
) -> None:
    fate = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else sys.exit(7)"
    script, options = FAILING.replace("FATE", fate), ("--nproc-per-node", "3")
    with Launched(tmp_path, script, *options, "--backoff", "0.1") as launcher:
        let_go_on(tmp_path, 0, 0, 1, 2)
        for rank in range(3):
            launcher.told(f"life {rank} 1")
        let_go_on(tmp_path, 1, 0, 1, 2)
        assert launcher.end() == 0


# Ends, while what it has started still waits.
UPLOADING = """
subprocess.Popen(["sh", "-c", "until [ -e answered ]; do sleep 0.1; done; touch uploaded"])
tell("pid", os.getpid())
"""


def test_what_a_rank_has_started_may_go_on_after_a_good_end(tmp_path: Path) -> None:
    with Launched(tmp_path, UPLOADING) as launcher:
        rank = int(launcher.told("pid"))
        launcher.wait_until(lambda: not is_alive(rank))
        # Long enough for the launcher to notice.
        launcher.process.join(0.5)
        (tmp_path / "answered").touch()
        assert launcher.end() == 0
    assert (tmp_path / "uploaded").exists()


# Leaves its session, as a daemon does, and would go on for an hour.
WITH_CHILD = """
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell(f"pids {rank}", f"{os.getpid()} {child.pid}")
time.sleep(3600)
"""


def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with Launched(tmp_path, WITH_CHILD, "--nproc-per-node", "2") as launcher:
        ranks = {int(pid) for rank in (0, 1) for pid in launcher.told(f"pids {rank}").split()}
        assert launcher.process.pid is not None
        # The ranks, the store and the guard.
        started = ranks | children(launcher.process.pid)
        assert len(started) == 6
        assert all(map(is_alive, started))
        launcher.signal(signal.SIGKILL)
        launcher.wait_until(lambda: not any(map(is_alive, started)))


WAITING = """
tell(f"pid {rank}", os.getpid())
time.sleep(3600)
"""


def is_guard(pid: int) -> bool:
    return b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_no_rank_and_no_store_outlives_a_launcher_that_is_killed_with_its_guard(
    tmp_path: Path,
) -> None:
    with Launched(tmp_path, WAITING, "--nproc-per-node", "2") as launcher:
        ranks = {int(launcher.told(f"pid {rank}")) for rank in (0, 1)}
        assert launcher.process.pid is not None
        started = children(launcher.process.pid)
        assert len(started) == 4
        assert ranks < started
        (guard,) = filter(is_guard, started)
        # To it, both are killed at the same moment.
        os.kill(guard, signal.SIGSTOP)
        launcher.signal(signal.SIGKILL)
        os.kill(guard, signal.SIGKILL)
        launcher.wait_until(lambda: not any(map(is_alive, started)))


# Rank 1 expects no signal, and neither does what they have started.
ASKED = """
def note(number, frame):
    tell(f"asked {number}")
if rank == 0:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
child = subprocess.Popen(["sleep", "3600"])
tell(f"ready {rank}")
wait_for("go")
unharmed = child.poll() is None
child.kill()
sys.exit(0 if unharmed else 7)
"""


def test_signals_for_the_script_reach_the_ranks_and_end_nothing(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    with Launched(tmp_path, ASKED, *options) as launcher:
        for rank in (0, 1):
            launcher.told(f"ready {rank}")
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.signal(number)
            launcher.told(f"asked {int(number)}")
        (tmp_path / "go").touch()
        assert launcher.end() == 0
    assert "SIGUSR1: passed on to the ranks" in launcher.printed


SIGNALLED = """
def note(number, frame):
    tell(f"signal {rank}", number)
    if CODE is not None:
        sys.exit(CODE)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
tell(f"ready {rank}")
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "arrives", "ends", "code"),
    [
        # They save something, and end well.
        (signal.SIGTERM, signal.SIGTERM, 0, 0),
        (signal.SIGINT, signal.SIGINT, 1, 130),
        (signal.SIGQUIT, signal.SIGTERM, 1, 143),
        # They do not end by themselves.
        (signal.SIGTERM, signal.SIGTERM, None, 143),
    ],
)
def test_signals_reach_the_ranks_and_a_second_one_kills_them(
    number: signal.Signals, arrives: signal.Signals, ends: int | None, code: int, tmp_path: Path
) -> None:
    script = SIGNALLED.replace("CODE", str(ends))
    with Launched(tmp_path, script, "--nproc-per-node", "2") as launcher:
        for rank in (0, 1):
            launcher.told(f"ready {rank}")
        launcher.signal(number)
        for rank in (0, 1):
            assert int(launcher.told(f"signal {rank}")) == arrives
        if ends is None:
            assert launcher.process.is_alive()
            launcher.signal(number)
        assert launcher.end() == code
    assert "started again in" not in launcher.printed


# Each ends as it is told.
NODES = """
tell(f"life {rank} {life}", os.environ["GROUP_RANK"] + " " + os.environ["MASTER_PORT"])
wait_for(f"end {rank} {life}")
sys.exit(int(Path(f"end {rank} {life}").read_text()))
"""


ETCD = "etcd://host:2379/run"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


Launcher = Callable[[Sequence[str]], int]


def node(
    folder: Path, number: int, port: int, backoff: str = "0.1", launcher: Launcher = ours
) -> Launched:
    """The launcher of one of two nodes, with two ranks."""
    sizes = ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number))
    options = (*sizes, "--backoff", backoff, "--endpoint", f"127.0.0.1:{port}")
    return Launched(folder, NODES, *options, launcher=launcher)


@contextmanager
def two_nodes(
    folder: Path, backoff: str = "0.1", port: int | None = None, launcher: Launcher = ours
) -> Iterator[tuple[Launched, Launched]]:
    """Launchers of two nodes, which have started."""
    port = port or free_port()
    with (
        node(folder, 0, port, backoff) as first,
        node(folder, 1, port, backoff, launcher) as second,
    ):
        for rank in range(4):
            assert first.told(f"life {rank} 0") == f"{rank // 2} {port}"
        yield first, second


def end(folder: Path, rank: int, life: int, code: int) -> None:
    """Let a rank end with a code."""
    part = folder / f"ending {rank}"
    part.write_text(str(code))
    part.rename(folder / f"end {rank} {life}")


def test_a_node_goes_on_without_another_that_is_killed(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (first, second):
        second.signal(signal.SIGKILL)
        second.process.join()
        end(tmp_path, rank=1, life=0, code=1)
        first.told("life 1 1")
        for rank, life in ((0, 0), (1, 1)):
            end(tmp_path, rank, life, code=0)
        assert first.end() == 0


def waits_for_the_store(seconds: float, command: Sequence[str]) -> int:
    """Run a launcher that gives a store up that does not answer for so long."""
    with mock.patch.object(nodes, "_SILENT_SECONDS", seconds):
        return ours(command)


def lose_node_0(first: Launched, port: int) -> None:
    """Kill its launcher, once that of node 1 has found the store."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    PrefixStore("decent_optim_wrapper/launcher", store).wait(["beat/1"], timedelta(seconds=60))
    assert first.process.pid is not None
    started = children(first.process.pid)
    first.signal(signal.SIGKILL)
    first.process.join()
    # Its store keeps the port for a moment.
    first.wait_until(lambda: not any(map(is_alive, started)))


def test_no_rank_is_started_again_once_the_node_with_the_store_is_lost(tmp_path: Path) -> None:
    port, impatient = free_port(), partial(waits_for_the_store, 3.0)
    with two_nodes(tmp_path, port=port, launcher=impatient) as (first, second):
        lose_node_0(first, port)
        end(tmp_path, rank=2, life=0, code=5)
        second.wait_until(lambda: "the store of node 0 has not answered for 3 s" in second.printed)
        end(tmp_path, rank=3, life=0, code=0)
        assert second.end() == 5
    # In vain it would wait for the store.
    assert not (tmp_path / "life 2 1").exists()


def test_ranks_are_started_again_once_the_node_with_the_store_has_come_back(
    tmp_path: Path,
) -> None:
    port, patient = free_port(), partial(waits_for_the_store, 90.0)
    with two_nodes(tmp_path, port=port, launcher=patient) as (first, second):
        lose_node_0(first, port)
        end(tmp_path, rank=2, life=0, code=5)
        second.wait_until(lambda: "rank 2 ended" in second.printed)
        with node(tmp_path, 0, port) as again:
            second.told("life 2 1")
            for rank in range(4):
                end(tmp_path, rank, life=int(rank == 2), code=0)
            assert [each.end() for each in (second, again)] == [0, 0]


def test_a_node_with_the_store_ends_last_and_no_rank_starts_after_another_has_ended(
    tmp_path: Path,
) -> None:
    # The other node hears of it within a second, or so.
    with two_nodes(tmp_path, backoff="2") as (first, second):
        for rank in (0, 1):
            end(tmp_path, rank, life=0, code=0)
        for life in range(4):
            end(tmp_path, rank=2, life=life, code=5)
        first.process.join(1.5)
        assert first.process.is_alive()
        second.wait_until(lambda: "others have ended without an error" in second.printed)
        end(tmp_path, rank=3, life=0, code=0)
        assert second.end() == 5
        assert first.end() == 0


def test_the_store_of_torchrun_is_found(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2")
    with Launched(tmp_path, TRAINING, *options, launcher=torchruns) as launcher:
        for rank in (0, 1):
            launcher.wait_until(partial(launcher.has_members, rank, (0, 1)))
        launcher.finish_training(rank=0, rounds=20)
        assert launcher.end() == 0
    assert launcher.told("end 0") == launcher.told("end 1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nnodes", "2", "train.py"), "--nnodes 2 needs --endpoint host:port"),
        (("--nnodes", "2", "--node-rank", "2", "x.py"), "--node-rank must be from 0 to 1"),
        (("--endpoint", "29500", "train.py"), "expected host:port, got '29500'"),
        (("--nproc-per-node", "0", "train.py"), "--nproc-per-node must be at least 1, got 0"),
        (("--max-restarts", "-1", "train.py"), "--max-restarts must be at least 0, got -1"),
        (("--backoff", "inf", "train.py"), "--backoff must be a number of seconds from 0"),
        (("--store", "host1:2379", "train.py"), "expected a store as 'etcd://host1:2379,host2"),
        (("--store", "etcd://host1:2379", "train.py"), "/my-run', got 'etcd://host1:2379'"),
        (("--store", "etcd://host1/run", "train.py"), "expected the servers as"),
        (("--store", f"{ETCD}?colour=red", "train.py"), "unknown options ['colour']"),
        (("--store", f"{ETCD}?user=me", "train.py"), "expected both user and password"),
        (("--store", ETCD, "--endpoint", "host:1", "train.py"), "leave it out, or the others"),
        (("--with-etcd", "--endpoint", "host:1", "train.py"), "leave it out, or the others"),
        (("--with-etcd", "--nnodes", "2", "train.py"), "needs --store etcd://host0:2379"),
        (("--with-etcd", "--nnodes", "2", "--store", ETCD, "x.py"), "got 1 for --nnodes 2"),
        (("--with-etcd", "--store", f"{ETCD}?ca_cert=a", "x.py"), "take no ca_cert"),
        ((), "expected a script"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert text in line


@pytest.mark.parametrize(
    ("patched", "words"),
    [
        (mock.patch.dict(sys.modules, {"pyetcd": None}), "pip install '.[etcd]'"),
        (mock.patch.dict(os.environ, PATH="/nowhere"), "apt-get install etcd-server"),
    ],
    ids=["client", "server"],
)
def test_what_is_not_installed_is_an_error_before_any_rank_is_started(
    patched: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children(os.getpid())
    with patched, pytest.raises(SystemExit) as caught:
        main(["run", "--with-etcd", "train.py"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
    assert children(os.getpid()) == before


def test_a_port_that_is_taken_is_an_error_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        before = children(os.getpid())
        with pytest.raises(SystemExit) as caught:
            main(["run", "--endpoint", endpoint, "train.py"])
    assert caught.value.code == 2
    assert "in use" in capsys.readouterr().err
    assert children(os.getpid()) == before
