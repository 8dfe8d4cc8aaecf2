"""The launcher: restarts, signals, logs, exit codes, and nobody who outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import etcd_servers, free_ports
from launched import Launched, Launcher, children, hurried, ours
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run as torch_run

from decent_optim_wrapper import EtcdStore
from decent_optim_wrapper.elastic.launcher.options import LaunchOptions
from decent_optim_wrapper.elastic.launcher.output import Output
from decent_optim_wrapper.elastic.stores.launched_store import find_launched_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc"),
]
TWO, THREE = ("--nproc-per-node", "2"), ("--nproc-per-node", "3")

# Tells where it is and how to find the others, and ends as it is told.
OBEDIENT = """
print("rank", rank, "is here")
tell(f"environ {rank} {life}", json.dumps(dict(os.environ)))
tell(f"pid {rank} {life}", os.getpid())
tell(f"life {rank} {life}", os.environ["GROUP_RANK"] + " " + os.environ.get("MASTER_PORT", ""))
wait_for(f"end {rank} {life}")
exec(Path(f"end {rank} {life}").read_text())
"""


def end(launcher: Launched, fate: str, *ranks: int, life: int = 0) -> None:
    """End ranks of `OBEDIENT`."""
    for rank in ranks:
        launcher.tell(f"end {rank} {life}", fate)


WELL, KILLED = "sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"


def test_ranks_that_die_are_started_again_so_often_and_ever_later(tmp_path: Path) -> None:
    options = (*THREE, "--max-restarts", "2", "--backoff", "0.2", "--log-dir", "logs")
    with Launched(tmp_path, OBEDIENT, *options) as launcher:
        for life in range(3):
            end(launcher, f"raise ValueError('no luck {life}')", 1, life=life)
        for life in range(2):
            end(launcher, KILLED, 0, life=life)
        launcher.told("life 0 2")
        launcher.wait_until_printed("--max-restarts is 2")
        end(launcher, WELL, 2)
        end(launcher, WELL, 0, life=2)
        assert launcher.end() == 1
    printed = launcher.printed
    assert printed.count("[rank 1] ValueError: no luck 0") == 1
    assert "[launcher] rank 0 ended (signal 9, Killed); see logs/rank_0" in printed
    assert "rank 1 is started again (restart 2 of 2)" in printed
    assert "rank 2 ended" not in printed
    for rank, lives in ((0, 3), (1, 3), (2, 1)):
        logs = sorted((tmp_path / "logs" / f"rank_{rank}").glob("*.stdout.log"))
        assert [log.read_text() for log in logs] == [f"rank {rank} is here\n"] * lives
        starts = [(tmp_path / f"life {rank} {life}").stat().st_mtime for life in range(lives)]
        pauses = [later - earlier for earlier, later in pairwise(starts)]
        assert all(pause >= 0.2 * 2**life for life, pause in enumerate(pauses))
    assert "no luck 2" in (tmp_path / "logs" / "rank_1" / "start_3.stderr.log").read_text()


@pytest.mark.parametrize(
    ("fate", "code", "text"),
    [
        (WELL, 0, ""),
        ("sys.exit(7)", 7, "rank 1 ended (exit code 7)"),
        # A real-time signal, which has no name.
        ("os.kill(os.getpid(), 40)", 128 + 40, "rank 1 ended (signal 40, Real-time signal 6)"),
    ],
)
def test_the_launcher_ends_as_the_rank_that_was_given_up(
    fate: str, code: int, text: str, tmp_path: Path
) -> None:
    """A rank is not started again either once another one has ended its training."""
    with Launched(tmp_path, OBEDIENT, *TWO) as launcher:
        end(launcher, WELL, 0)
        launcher.told("life 1 0")
        # Whatever the launcher sees of rank 1, it sees the end of rank 0 no later.
        launcher.wait_until_ended(int(launcher.told("pid 0 0")))
        end(launcher, fate, 1)
        assert launcher.end() == code
    assert ("others have ended" in launcher.printed) == (code != 0)
    assert text in launcher.printed


INCOMPLETE = "[launcher] the log of rank 0 is not complete: "


@pytest.mark.parametrize(("fault", "why"), [("full", "No space left"), ("closed", "File exists")])
def test_what_the_logs_cannot_take_is_dropped_and_the_ranks_go_on(
    fault: str, why: str, tmp_path: Path
) -> None:
    options = (*TWO, "--backoff", "0.1", "--log-dir", "logs")
    logs = tmp_path / "logs" / "rank_0"
    logs.parent.mkdir()
    if fault == "closed":
        logs.write_text("in the way")
    else:
        logs.mkdir()
        for stream in ("stdout", "stderr"):
            (logs / f"start_2.{stream}.log").symlink_to("/dev/full")
    with Launched(tmp_path, OBEDIENT, *options) as launcher:
        # It has printed before.
        launcher.told("life 0 0")
        end(launcher, "raise ValueError('no luck')", 0)
        launcher.told("life 0 1")
        end(launcher, WELL, 1)
        end(launcher, WELL, 0, life=1)
        assert launcher.end() == 0
    printed = launcher.printed
    assert printed.count(INCOMPLETE) == printed.count(why) == 1
    # The reason is on the console, and the other rank has its log.
    assert printed.count("[rank 0] ValueError: no luck") == 1
    assert printed.count("[rank 0] rank 0 is here") == 2
    assert list((tmp_path / "logs" / "rank_1").glob("*.stdout.log"))


MIB = 1 << 20


def with_temporary_folder(command: Sequence[str]) -> int:
    tempfile.tempdir = "temporary"
    return ours(command)


def test_without_a_folder_for_logs_the_end_of_a_process_that_fails_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "temporary"
    kept.mkdir()
    options = (*TWO, "--backoff", "0.1")
    with Launched(tmp_path, OBEDIENT, *options, launcher=with_temporary_folder) as launcher:
        launcher.told("life 0 0")
        assert not list(kept.iterdir())
        long = f"for _ in range(300): print('x' * {10_000}, file=sys.stderr)"
        end(launcher, f"{long}\nraise ValueError('no luck')", 1)
        launcher.told("life 1 1")
        end(launcher, WELL, 0)
        end(launcher, WELL, 1, life=1)
        assert launcher.end() == 0
    assert launcher.printed.count("[rank 1] " + 10_000 * "x") == 300
    (folder,) = kept.iterdir()
    assert [path.name for path in folder.iterdir()] == ["rank_1"]
    assert (folder / "rank_1").stat().st_mode & 0o077 == 0
    text = (folder / "rank_1" / "start_1.stderr.log").read_text()
    assert len(text) == MIB
    assert text.endswith("ValueError: no luck\n")
    assert (folder / "rank_1" / "start_1.stdout.log").read_text() == "rank 1 is here\n"


def test_a_line_that_does_not_end_is_shown_in_parts(tmp_path: Path) -> None:
    """In time that grows with its length, not with the square of it."""
    with Launched(tmp_path, OBEDIENT) as launcher:
        end(launcher, "print('x' * 1_000_000, end=''); wait_for('shown')", 0)
        launcher.wait_until(lambda: launcher.printed.count("x") > 800_000)
        launcher.tell("shown")
        assert launcher.end() == 0
    assert launcher.printed.count("x") == 1_000_000


def test_output_that_a_console_does_not_take_is_forgotten_in_the_end() -> None:
    said, shown = list[str](), os.memfd_create("shown")
    output = Output(3, shown, Path("nowhere"), keeps_all=False, say=said.append)
    for part in range(40):
        os.write(output.file.fileno(), b"%d\n" % part + b"x" * MIB)
        assert output.keep()
    assert os.fstat(output.file.fileno()).st_blocks * 512 < 20 * MIB
    output.show()
    text = os.pread(shown, 40 * MIB, 0)
    assert re.search(rb"^\[rank 3\] \(\d{8} bytes are not shown\)\n", text)
    assert 12 * MIB < text.count(b"x") < 17 * MIB
    # What it has taken is forgotten, too, but for the last MiB.
    assert output.keep()
    assert os.fstat(output.file.fileno()).st_blocks * 512 < 2 * MIB
    assert not said


def test_the_pause_before_a_restart_has_a_limit() -> None:
    options = LaunchOptions(command=("-m", "train"), backoff=0.5)
    restarts = 1, 2, 7, 8, 1025, 5000
    assert [*map(options.pause_before, restarts)] == [0.5, 1, 32, 60, 60, 60]
    assert replace(options, backoff=0.0).pause_before(5000) == 0


def to_a_pipe(command: Sequence[str], is_read: bool) -> int:
    """Run our launcher on a console that nobody empties, or that has gone."""
    reading, writing = os.pipe()
    if not is_read:
        os.close(reading)
    for stream in (1, 2):
        os.dup2(writing, stream)
    return ours(command)


@pytest.mark.parametrize("is_read", [True, False])
def test_no_console_stops_restarts_or_signals(is_read: bool, tmp_path: Path) -> None:
    console = partial(to_a_pipe, is_read=is_read)
    with Launched(tmp_path, OBEDIENT, "--backoff", "0.1", launcher=console) as launcher:
        # More than fits into a pipe.
        end(launcher, f"print('x' * 200_000, file=sys.stderr); {KILLED}", 0)
        launcher.told("life 0 1")
        launcher.signal(signal.SIGTERM)
        assert launcher.end() == 128 + signal.SIGTERM


def test_what_a_rank_has_started_may_go_on_after_a_good_end(tmp_path: Path) -> None:
    upload = "until [ -e answered ]; do sleep 0.1; done; touch uploaded"
    with Launched(tmp_path, OBEDIENT) as launcher:
        end(launcher, f"subprocess.Popen(['sh', '-c', {upload!r}])", 0)
        assert launcher.end() == 0
        launcher.tell("answered")
        launcher.told("uploaded")


# In the place of what a spare process imports, which takes seconds: test_after_a_kill.py has torch.
STAND_INS = {
    "stand_ins/torch.py": "",
    "stand_ins/decent_optim_wrapper.py": "import os, torch; open(f'ready {os.getpid()}', 'w')",
}
# Sees itself, also from a process that it has spawned.
RETURNING = """
import multiprocessing, pickle
def look(_):
    return sys.argv, sys.orig_argv, sys.path, __name__, __file__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seen = [look(0), pool.map(look, [0]), pickle.dumps(look).hex()]
    tell(f"pid {life}", os.getpid())
    tell(f"has torch {life}", "torch" in sys.modules)
    tell(f"seen {life}", json.dumps(seen))
    wait_for(f"end {life}")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def beside_stand_ins(command: Sequence[str]) -> int:
    os.environ["PYTHONPATH"] = "stand_ins"
    return hurried(command, spare=0.3)


@pytest.mark.parametrize("options", [(), ("-m",)])
def test_a_process_that_has_imported_torch_becomes_the_rank_that_dies(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = ("--spare", *options)
    with Launched(tmp_path, RETURNING, *options, launcher=beside_stand_ins) as launcher:
        launcher.wait_until(lambda: len(children(launcher.pid)) == 2)
        (spare,) = children(launcher.pid) - {int(launcher.told("pid 0"))}
        launcher.told(f"ready {spare}")
        # As all processes of a machine may be for a while.
        os.kill(spare, signal.SIGSTOP)
        launcher.tell("end 0")
        assert launcher.told("seen 1") == launcher.told("seen 0")
        assert launcher.told("pid 1") == str(spare)
        assert [launcher.told(f"has torch {life}") for life in (0, 1)] == ["False", "True"]


# Before torch, as scripts do: starts a helper, and changes a variable that torch reads.
BEFORE_TORCH = """
helper = subprocess.Popen(["sleep", "3600"])
os.environ["OMP_NUM_THREADS"] = "2"
with Path(f"begun {rank} {life}").open("a") as begun:
    print(helper.pid, file=begun)
"""


def test_a_script_begins_once_in_each_life_and_its_helpers_with_it(tmp_path: Path) -> None:
    with Launched(tmp_path, BEFORE_TORCH + OBEDIENT, "--backoff", "0.1") as launcher:
        for life in range(2):
            launcher.told(f"life 0 {life}")
            assert len(launcher.told(f"begun 0 {life}").split()) == 1
            assert children(launcher.pid) == {int(launcher.told(f"pid 0 {life}"))}
            end(launcher, KILLED, 0, life=life)
        launcher.told("life 0 2")
        launcher.wait_until_ended(*(int(launcher.told(f"begun 0 {life}")) for life in range(2)))


# Rank 1 expects no signal that is for the script, and neither does what they have started.
SIGNALLED = """
def note(number, frame):
    tell(f"signal {number} {rank}")
    if number in (signal.SIGINT, signal.SIGTERM) and CODE is not None:
        sys.exit(CODE)
handled = [signal.SIGINT, signal.SIGTERM, *(() if rank else (signal.SIGUSR1, signal.SIGUSR2))]
for number in handled:
    signal.signal(number, note)
child = subprocess.Popen(["sleep", "3600"])
tell(f"ready {rank}")
wait_for("look")
tell(f"unharmed {rank}", child.poll() is None)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "ends", "code"),
    # They save something and end well, end with an error, or do not end by themselves.
    [(signal.SIGTERM, 0, 0), (signal.SIGINT, 1, 1), (signal.SIGTERM, None, 128 + signal.SIGKILL)],
)
def test_signals_reach_the_ranks_and_a_second_one_of_those_that_end_them_kills_them(
    number: signal.Signals, ends: int | None, code: int, tmp_path: Path
) -> None:
    with Launched(tmp_path, SIGNALLED.replace("CODE", str(ends)), *TWO) as launcher:
        for rank in (0, 1):
            launcher.told(f"ready {rank}")
        for request in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.signal(request)
            launcher.told(f"signal {int(request)} 0")
        launcher.tell("look")
        for rank in (0, 1):
            assert launcher.told(f"unharmed {rank}") == "True"
        launcher.signal(number)
        for rank in (0, 1):
            launcher.told(f"signal {int(number)} {rank}")
        if ends is None:
            assert launcher.process.is_alive()
            launcher.signal(number)
        assert launcher.end() == code
    assert "SIGUSR1: passed on to the ranks" in launcher.printed
    assert "is started again" not in launcher.printed


def beyond_the_terminal(command: Sequence[str]) -> int:
    """Run our launcher as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return ours(command)


def test_ranks_outlive_a_terminal_with_nohup_and_still_hear_of_other_signals(
    tmp_path: Path,
) -> None:
    script = SIGNALLED.replace("CODE", "0")
    with Launched(tmp_path, script, *TWO, launcher=beyond_the_terminal) as launcher:
        for rank in (0, 1):
            launcher.told(f"ready {rank}")
        launcher.signal(signal.SIGHUP)
        # Later than the first one.
        launcher.signal(signal.SIGUSR1)
        launcher.told(f"signal {int(signal.SIGUSR1)} 0")
        launcher.tell("look")
        for rank in (0, 1):
            assert launcher.told(f"unharmed {rank}") == "True"
        launcher.signal(signal.SIGTERM)
        assert launcher.end() == 0
    assert "SIGHUP" not in launcher.printed


@contextmanager
def node(
    folder: Path, number: int, port: int, launcher: Launcher = hurried, backoff: str = "0.1"
) -> Iterator[Launched]:
    """The launcher of one of two nodes, with two ranks, which have started."""
    options = (*TWO, "--nnodes", "2", "--node-rank", str(number), "--backoff", backoff)
    endpoint = ("--endpoint", f"127.0.0.1:{port}")
    with Launched(folder, OBEDIENT, *options, *endpoint, launcher=launcher) as launched:
        for rank in (2 * number, 2 * number + 1):
            assert launched.told(f"life {rank} 0") == f"{number} {port}"
        yield launched


def test_a_node_goes_on_without_another_that_is_killed(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with node(tmp_path, 0, port) as first, node(tmp_path, 1, port) as second:
        second.kill()
        end(first, "sys.exit(1)", 1)
        first.told("life 1 1")
        end(first, WELL, 0)
        end(first, WELL, 1, life=1)
        assert first.end() == 0


@pytest.mark.parametrize(("seconds", "comes_back"), [(1.0, False), (90.0, True)])
def test_ranks_are_started_again_once_the_node_with_the_store_has_come_back(
    seconds: float, comes_back: bool, tmp_path: Path
) -> None:
    port, waiting = free_ports(1)[0], partial(hurried, seconds=seconds)
    with node(tmp_path, 0, port) as first, node(tmp_path, 1, port, waiting) as second:
        # The launcher of node 1 has found the store.
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        PrefixStore("decent_optim_wrapper/launcher", store).wait(["node/1"], timedelta(seconds=60))
        started = children(first.pid)
        assert len(started) == 2
        first.kill()
        # Its store keeps the port for a moment.
        first.wait_until_ended(*started)
        end(second, "sys.exit(5)", 2)
        if not comes_back:
            second.wait_until_printed("the store of node 0 has not answered for 1 s")
            end(second, WELL, 3)
            assert second.end() == 5
            # In vain it would wait for the store.
            assert not (tmp_path / "life 2 1").exists()
            return
        second.wait_until_printed("rank 2 ended")
        with node(tmp_path, 0, port) as again:
            second.told("life 2 1")
            end(second, WELL, 0, 1, 3)
            end(second, WELL, 2, life=1)
            assert [each.end() for each in (second, again)] == [0, 0]


def test_a_node_with_the_store_ends_last_and_no_rank_starts_after_another_has_ended(
    tmp_path: Path,
) -> None:
    port = free_ports(1)[0]
    # The other node hears of it within a second, or so.
    with node(tmp_path, 0, port) as first, node(tmp_path, 1, port, backoff="2") as second:
        end(first, WELL, 0, 1)
        for life in range(4):
            end(first, "sys.exit(5)", 2, life=life)
        first.process.join(1.5)
        assert first.process.is_alive()
        second.wait_until_printed("others have ended without an error")
        end(first, WELL, 3)
        assert second.end() == 5
        assert first.end() == 0


def store_of(launcher: Launched, rank: int, life: int = 0) -> Any:
    """The store that one of two ranks finds."""
    found = find_launched_store(json.loads(launcher.told(f"environ {rank} {life}")), None)
    assert found is not None
    assert (found.rank, found.world_size) == (rank, 2)
    return found.store


@pytest.mark.parametrize(
    ("options", "is_open"),
    [((), False), (("--endpoint", "127.0.0.1:PORT"), False), (("--endpoint", "HOST:PORT"), True)],
)
def test_only_this_machine_reaches_the_store_and_gloo_of_one_node(
    options: tuple[str, ...], is_open: bool, tmp_path: Path
) -> None:
    port, host = free_ports(1)[0], socket.gethostname()
    options = tuple(each.replace("PORT", str(port)).replace("HOST", host) for each in options)
    with Launched(tmp_path, OBEDIENT, *TWO, *options) as launcher:
        environ = json.loads(launcher.told("environ 0 0"))
        assert environ["GLOO_SOCKET_IFNAME"] == "lo"
        store_of(launcher, 0).set("key", "value")
        assert store_of(launcher, 1).get("key") == b"value"
        # An address of this machine on which a server listens that listens on all of them.
        with socket.socket() as probe:
            failure = probe.connect_ex(("127.0.0.2", int(environ["MASTER_PORT"])))
        assert (failure == 0) == is_open
        end(launcher, WELL, 0, 1)
        assert launcher.end() == 0


def in_another_run(command: Sequence[str]) -> int:
    """Run our launcher where the store of another run is in the environment."""
    os.environ["DECENT_STORE"] = "etcd://127.0.0.1:1/another-run"
    return ours(command)


def test_standalone_ranks_meet_in_no_store_of_the_environment(tmp_path: Path) -> None:
    with Launched(tmp_path, OBEDIENT, "--standalone", *TWO, launcher=in_another_run) as launcher:
        store_of(launcher, 0).set("key", "value")
        assert store_of(launcher, 1).get("key") == b"value"
        end(launcher, WELL, 0, 1)
        assert launcher.end() == 0


def torchruns(command: Sequence[str]) -> int:
    torch_run.main(command)
    return 0


def test_the_store_of_torchrun_is_found(tmp_path: Path) -> None:
    with Launched(tmp_path, OBEDIENT, "--standalone", *TWO, launcher=torchruns) as launcher:
        stores = [store_of(launcher, rank) for rank in (0, 1)]
        for rank, store in enumerate(stores):
            store.set(f"from {rank}", str(rank))
        assert [stores[1 - rank].get(f"from {rank}") for rank in (0, 1)] == [b"0", b"1"]
        end(launcher, WELL, 0, 1)
        assert launcher.end() == 0


@pytest.mark.timeout(240)
def test_a_launch_goes_on_without_a_server_a_rank_and_a_node(tmp_path: Path) -> None:
    """That training does, too, is in test_etcd.py: no rank here imports torch."""
    with etcd_servers(3) as cluster, ExitStack() as stack:
        url = f"etcd://{cluster.endpoints}/run"
        # An earlier run has used the prefix.
        earlier = PrefixStore("decent_optim_wrapper/launcher", EtcdStore(cluster.endpoints, "run"))
        for number in range(2):
            earlier.set(f"node/{number}", "ended")
        options = ("--nnodes", "2", "--backoff", "0.1", "--store", url, "--node-rank")
        nodes = [stack.enter_context(Launched(tmp_path, OBEDIENT, *options, node)) for node in "01"]
        store_of(nodes[1], 1).set("from 1", "before")
        cluster.kill(cluster.leader())
        os.kill(int(nodes[0].told("pid 0 0")), signal.SIGKILL)
        # Comes back, and finds the other one.
        assert store_of(nodes[0], 0, life=1).get("from 1") == b"before"
        nodes[1].kill()
        end(nodes[0], WELL, 0, life=1)
        assert nodes[0].end() == 0
    assert "rank 0 is started again (restart 1 of 3)" in nodes[0].printed
    assert not cluster.processes
