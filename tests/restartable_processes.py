"""Ranks as processes that meet in a store of the launcher, and can be killed and started again."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from problem import TINY_CAP_MB, sgd
from ranks import PROCESSES, begin_process, start_process
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic

# Seconds that a rank sleeps after a step. The rounds that are made until the launcher acts leave
# the cores to other tests, and are no more than a launcher that is held up can be late for.
STEP = 0.02


def wrap_elastic(
    params: list[Tensor],
    rank: int,
    world_size: int,
    store: Any,
    changes: list[Any],
    **options: Any,
) -> DecentOptimWrapper:
    """An optimizer that goes on without lost ranks, and notes old and new members at changes."""
    return DecentOptimWrapper(
        sgd(params),
        rank,
        world_size,
        bucket_cap_mb=TINY_CAP_MB,
        elastic=Elastic(
            store=store, on_membership_change=lambda old, new: changes.append((old, new))
        ),
        **options,
    )


class RestartableProcesses:
    """Runs `main(rank, world_size, store, report, *args)` in a process for each rank.

    Args:
        world_size: number of ranks.
        main: reports by calling `report(key, value)`; what it returns is reported as "result".
        args: further arguments.
    """

    def __init__(self, world_size: int, main: Callable[..., Any], *args: Any) -> None:
        self.world_size = world_size
        self._main, self._args = main, args
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, Any] = {}
        # A pipe for each life: a shared queue would stay locked by a rank that is killed.
        self._pipes: dict[Connection, int] = {}
        self.reports: dict[tuple[int, str], Any] = {}
        # The last round that a rank has reported.
        self._reached = 0

    def __enter__(self) -> RestartableProcesses:
        for rank in range(self.world_size):
            self.start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.join()

    def start(self, rank: int) -> None:
        """Start the rank, for the first time or again."""
        ours, theirs = PROCESSES.Pipe(duplex=False)
        self._pipes[ours] = rank
        self._workers[rank] = start_process(
            _work, rank, self.world_size, self._store.port, theirs, self._main, self._args
        )
        theirs.close()

    def pid(self, rank: int) -> int:
        """The process that was started last."""
        pid: int = self._workers[rank].pid
        return pid

    def kill(self, rank: int) -> None:
        """End the rank without a word."""
        self._workers[rank].kill()
        self._workers[rank].join()

    def join(self, rank: int, seconds: float) -> int | None:
        """The exit code of a rank that ends by itself; None if it has not by then."""
        self._workers[rank].join(seconds)
        code: int | None = self._workers[rank].exitcode
        return code

    def finish(self, margin: int = 30) -> None:
        """Let the ranks end some rounds after the last that one of them has reported."""
        while any(pipe.poll() for pipe in list(self._pipes)):
            self._take(0)
        self._store.set("finish", str(self._reached + margin))

    def put(self, key: str) -> None:
        """Let all ranks see the key in the store."""
        self._store.set(key, "1")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        _signal(self._workers[rank].pid, number)

    def delay(self, rank: int, seconds: float) -> None:
        """Ask the rank to sleep before its next step."""
        self._store.set(f"delay {rank}", str(seconds))

    def listen(self, seconds: float) -> set[int]:
        """The ranks that report a round within that time."""
        taken = self._take(seconds)
        return {rank for rank, key in taken if key.startswith("round ")}

    def wait_for(self, rank: int, key: str, seconds: float = 60) -> Any:
        """What the rank reports under the key, from now on or before."""
        deadline = time.monotonic() + seconds
        while (rank, key) not in self.reports:
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"rank {rank} did not report {key}: {self.reports}"
            self._take(remaining)
        return self.reports.pop((rank, key))

    def wait_for_members(self, rank: int, members: tuple[int, ...], seconds: float = 60) -> None:
        """Return once the rank reports a round, from now on, with these members."""
        deadline = time.monotonic() + seconds
        while any(pipe.poll() for pipe in list(self._pipes)):
            self._take(0)
        while not any(
            teller == rank and key.startswith("round ") and self.reports[teller, key] == members
            for teller, key in self._take(max(0.0, deadline - time.monotonic()))
        ):
            assert time.monotonic() < deadline, f"rank {rank} did not train with {members}"

    def _take(self, seconds: float) -> set[tuple[int, str]]:
        """Take one report from each rank that has some, and say which."""
        taken = set()
        for pipe in wait(list(self._pipes), timeout=seconds):
            assert isinstance(pipe, Connection)
            rank = self._pipes[pipe]
            try:
                key, value = pipe.recv()
            except EOFError:
                del self._pipes[pipe]
                pipe.close()
                continue
            assert key != "error", f"rank {rank} raised:\n{value}"
            if key.startswith("round "):
                self._reached = max(self._reached, int(key.split()[1]))
            self.reports[rank, key] = value
            taken.add((rank, key))
        return taken


class StoreProcess:
    """A store in a process of its own, which can be stopped and killed.

    Args:
        host: what it listens on.
        prepare: called in the process before it listens.
    """

    def __init__(
        self, host: str = "127.0.0.1", prepare: Callable[..., Any] | None = None, *args: Any
    ) -> None:
        self._host = host
        ours, theirs = PROCESSES.Pipe(duplex=False)
        self._process = start_process(_serve, host, theirs, prepare, args)
        theirs.close()
        self.port: int = ours.recv()

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def connect(self) -> TCPStore:
        """A connection of this process."""
        return TCPStore(self._host, self.port, is_master=False, timeout=timedelta(seconds=60))

    def kill(self) -> None:
        """End the store without a word."""
        self._process.kill()
        self._process.join()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        assert self._process.pid is not None
        _signal(self._process.pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    """Return once the process stands still: until then a busy machine lets it go on a little."""
    os.kill(pid, number)
    while number is signal.SIGSTOP and not all(
        map(_stands_still, Path(f"/proc/{pid}/task").iterdir())
    ):
        time.sleep(0.01)


def _stands_still(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"


def _serve(
    host: str, pipe: Connection, prepare: Callable[..., Any] | None, args: tuple[Any, ...]
) -> None:
    if prepare is not None:
        prepare(*args)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


def _work(
    rank: int, world_size: int, port: int, pipe: Connection, main: Callable[..., Any], args: Any
) -> None:
    begin_process()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))

    def report(key: str, value: Any) -> None:
        pipe.send((key, value))

    try:
        report("result", main(rank, world_size, store, report, *args))
    except BaseException:
        report("error", traceback.format_exc())
