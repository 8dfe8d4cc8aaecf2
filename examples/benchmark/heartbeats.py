"""What heartbeats cost, and how long it takes until all ranks know of a dead one.

    python examples/benchmark/heartbeats.py
    python examples/benchmark/heartbeats.py --store etcd --ranks 64 256
    python examples/benchmark/heartbeats.py --ranks 4096 --simulate

Each rank is a thread that only sends and watches heartbeats, over a connection of its own to a
`TCPStore` in another process. With `--store etcd` there are three servers of etcd on this machine
instead, which needs the program and the extra `etcd`. Ranks are then killed one after the other.
With `--simulate`, ranks act at random times of a simulated clock instead, and the store answers at
once. 16, 64 and 256 ranks mostly wait: they take 11 s of CPU time in 2.6 minutes. 4096 simulated
ranks also take 11 s of CPU time.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store, TCPStore

from decent_optim_wrapper import EtcdStore
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.heartbeat import Heartbeat, pace
from decent_optim_wrapper.elastic.liveness import EpochWatch

TIMEOUT = timedelta(seconds=60)


class Counted:
    """A connection to a store that counts the calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name not in {"has_extended_api", "clone"}
        return getattr(self._store, name)


class CountingStore(BoundedStore):
    """A store that counts the calls over the heartbeat's connection.

    Args:
        shared: for all calls before.
        own: for the heartbeats.
    """

    def __init__(self, shared: Store, own: Store) -> None:
        super().__init__(shared, TIMEOUT, ours=True)
        self.counted = Counted(own)

    def clone(self) -> Any:
        return self.counted


class Server(NamedTuple):
    """The process that holds the store."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def cpu_seconds(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Cluster(NamedTuple):
    """A store for many ranks.

    Args:
        shared: for calls that are not counted.
        connect: makes one more connection.
        pids: the processes that hold the store.
    """

    shared: Store
    connect: Callable[[], Store]
    pids: list[int]

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self.pids))


class Result(NamedTuple):
    """What was measured: calls per rank and second, the server's share of a core, and seconds."""

    calls: float
    busy: float
    seconds: list[float]


def serve(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


@contextmanager
def server() -> Iterator[Server]:
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield Server(ours.recv(), process.pid)
    finally:
        process.kill()
        process.join()


@contextmanager
def tcp_store() -> Iterator[Cluster]:
    with server() as store:
        shared = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)
        yield Cluster(shared, shared.clone, [store.pid])


@contextmanager
def etcd() -> Iterator[Cluster]:
    """Three servers, which keep their data in memory if they can: a busy disk delays answers.

    Raises:
        TimeoutError: they did not start.
    """
    memory = Path("/dev/shm")
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        urls = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    clients, peers = urls[:3], urls[3:]
    # Options in the environment contradict those of the command line.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("ETCD_")}
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder, ExitStack() as ends:
        processes = []
        for node in range(len(clients)):
            started = subprocess.Popen(
                etcd_command(clients, peers, node, Path(folder) / str(node)),
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ends.callback(started.wait)
            ends.callback(started.kill)
            processes.append(started)

        def connect() -> EtcdStore:
            return EtcdStore(",".join(clients), prefix="heartbeats", timeout=TIMEOUT)

        shared = connect()
        # It waits for a majority of the servers.
        shared.set("started", "1")
        yield Cluster(shared, connect, [each.pid for each in processes])


def etcd_command(
    clients: Sequence[str], peers: Sequence[str], node: int, folder: Path
) -> list[str]:
    """The command that starts a server."""
    cluster = ",".join(f"{number}=http://{peer}" for number, peer in enumerate(peers))
    return [
        *("etcd", "--name", str(node), "--data-dir", str(folder), "--logger", "zap"),
        *("--listen-client-urls", f"http://{clients[node]}"),
        *("--advertise-client-urls", f"http://{clients[node]}"),
        *("--listen-peer-urls", f"http://{peers[node]}"),
        *("--initial-advertise-peer-urls", f"http://{peers[node]}"),
        *("--initial-cluster", cluster, "--auto-compaction-retention", "5m"),
    ]


STORES = {"tcp": tcp_store, "etcd": etcd}


def require(store: str) -> None:
    """Exit with a line if the store is not installed."""
    if store != "etcd":
        return
    if shutil.which("etcd") is None:
        sys.exit("--store etcd needs the program etcd on the PATH: apt-get install etcd-server")
    try:
        EtcdStore("127.0.0.1:1", prefix="any")
    except ModuleNotFoundError as error:
        sys.exit(f"--store etcd: {error}")


def measure(ranks: int, kills: int, stale_after: float, seconds: float, store: str) -> Result:
    """Let threads beat, count their calls, and kill some of them."""
    chance = random.Random(0)
    with STORES[store]() as cluster:
        with ThreadPoolExecutor(32) as pool:
            made = pool.map(
                lambda _: CountingStore(cluster.shared, cluster.connect()), range(ranks)
            )
            connections = list(made)
        beats = [Heartbeat(each, rank, stale_after) for rank, each in enumerate(connections)]
        for beat in beats:
            beat.start(life=1)
            # Ranks do not start all at the same moment.
            time.sleep(pace(stale_after).pause / ranks)
        for beat in beats:
            beat.watch(range(ranks), epoch=1)
        time.sleep(2 * pace(stale_after).pause)
        calls, start = sum(each.counted.calls for each in connections), time.monotonic()
        busy = cluster.cpu_seconds()
        time.sleep(seconds)
        passed = time.monotonic() - start
        calls = sum(each.counted.calls for each in connections) - calls
        busy = cluster.cpu_seconds() - busy
        if any(beat.is_over for beat in beats):
            raise RuntimeError("a rank was called dead before any was killed: too few cores")
        found, living = [], set(range(ranks))
        for victim in chance.sample(range(ranks), min(kills, ranks - 1)):
            living.remove(victim)
            time.sleep(chance.uniform(0, pace(stale_after).pause))
            found.append(kill(victim, [beats[rank] for rank in living], beats[victim]))
        for beat in beats:
            beat.stop()
    return Result(calls=calls / passed / ranks, busy=busy / passed, seconds=found)


def kill(victim: int, others: list[Heartbeat], killed: Heartbeat) -> float:
    """End the heartbeats of a rank; seconds until all others know that it is dead."""
    start = time.monotonic()
    killed.stop()
    while any(beat.alive(victim) for beat in others):
        if time.monotonic() > start + TIMEOUT.total_seconds():
            raise RuntimeError(f"not all ranks have noticed that rank {victim} is dead")
        time.sleep(0.01)
    return time.monotonic() - start


def simulate(ranks: int, kills: int, stale_after: float, seed: int = 0) -> Result:
    """As `measure`, with a simulated clock; each kill is in a world of its own."""
    chance, found, calls = random.Random(seed), [], 0.0
    for _ in range(kills):
        seconds, calls = simulate_kill(ranks, stale_after, chance)
        found.append(seconds)
    return Result(calls=calls, busy=float("nan"), seconds=found)


def simulate_kill(ranks: int, stale_after: float, chance: random.Random) -> tuple[float, float]:
    """Seconds until all know of one dead rank, and calls per rank and second until then."""
    pause, looks = pace(stale_after)
    watches = [EpochWatch(rank, range(ranks), looks) for rank in range(ranks)]
    beats = dict.fromkeys(range(ranks), 0)
    told: frozenset[int] = frozenset()
    victim, killed = chance.randrange(ranks), 2 + chance.uniform(0, pause)
    turns = [(chance.uniform(0, pause), rank) for rank in range(ranks)]
    heapq.heapify(turns)
    ignorant, calls = set(range(ranks)) - {victim}, 0
    while ignorant:
        now, rank = heapq.heappop(turns)
        if rank == victim and now > killed:
            continue
        beats[rank] += 1
        watch, calls = watches[rank], calls + 2
        if watch.look({each: b"%d" % beats[each] for each in watch.watched}, told):
            told, calls = told | watch.dead, calls + 1
        if victim in watch.dead:
            ignorant.discard(rank)
        heapq.heappush(turns, (now + pause * chance.uniform(1, 1.05), rank))
    return now - killed, calls / now / ranks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stale-after", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=10, help="in which calls are counted")
    parser.add_argument("--store", choices=STORES, default="tcp")
    parser.add_argument("--simulate", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    require(args.store)
    print("| ranks | calls per rank and second | server, of a core | s until all know | longest |")
    print("|---" * 5 + "|")
    for ranks in args.ranks:
        if args.simulate:
            result = simulate(ranks, args.kills, args.stale_after)
        else:
            result = measure(ranks, args.kills, args.stale_after, args.seconds, args.store)
        mean, longest = statistics.mean(result.seconds), max(result.seconds)
        busy = "-" if args.simulate else f"{result.busy:.1%}"
        print(f"| {ranks} | {result.calls:.2f} | {busy} | {mean:.2f} | {longest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
