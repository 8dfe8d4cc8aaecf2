"""Worlds of ranks for tests: threads where torch's global state is not needed, else processes."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NoReturn, Self, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from forked import PROCESSES, start_process
from torch._C._distributed_c10d import HashStore, Store, TCPStore

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=40)


def process_group(store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """A gloo group that torch.distributed does not register, so that threads can be ranks."""
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def run_threads(world_size: int, main: Callable[[int, dist.ProcessGroup], Result]) -> list[Result]:
    """Run `main(rank, process_group)` on threads and return the results by rank."""
    store = HashStore()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    # One that ends early would close the connections to a rank that still connects.
    connected = threading.Barrier(world_size, timeout=TIMEOUT.total_seconds())
    # Ranks of one interpreter take turns. On several cores, every turn would wake one. The threads
    # of two ranks keep all cores, so that some tests have threads that run at the same time.
    cores = {ctypes.CDLL(None).sched_getcpu()} if world_size > 2 else os.sched_getaffinity(0)

    def run(rank: int) -> None:
        try:
            os.sched_setaffinity(0, cores)
            group = process_group(store, rank, world_size)
            connected.wait()
            results[rank] = main(rank, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT.total_seconds() * 2)
    if errors:
        first = min(errors)
        raise RuntimeError(f"rank {first} of {sorted(errors)} raised") from errors[first]
    assert len(results) == world_size, f"only ranks {sorted(results)} finished"
    return [results[rank] for rank in range(world_size)]


class Processes:
    """Processes of ranks, which report by pipes, and which can be started again.

    Args:
        world_size: number of ranks.
        main: called in each process with the rank, its end of a pipe and `args`. It sends keys and
            values; what it returns is reported as "result".
        args: further arguments.
        local_world_size: as torchrun's environment says, which is set unless this is 0.
        store: in which they meet.
    """

    def __init__(
        self,
        world_size: int,
        main: Callable[..., Any],
        *args: Any,
        local_world_size: int = 0,
        store: TCPStore | None = None,
    ) -> None:
        self.world_size, self.store = world_size, store or launcher_store()
        self._main, self._args = main, args
        meeting = self.store, world_size, local_world_size
        self._env = environment(*meeting) if local_world_size else {}
        # The process of each rank that was started last.
        self.workers: dict[int, Any] = {}
        # Also those in whose place others have been started.
        self._started: list[Any] = []
        # A pipe for each life: a shared queue would stay locked by a rank that is killed.
        self._pipes: dict[Connection, int] = {}
        self.reports: dict[tuple[int, str], Any] = {}
        for rank in range(world_size):
            self.start(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all that are left."""
        for worker in self._started:
            worker.kill()
            worker.join()

    def start(self, rank: int) -> None:
        """Start the rank, for the first time or again."""
        ours, theirs = PROCESSES.Pipe()
        self._pipes[ours] = rank
        work = self._main, self._env, rank, theirs, self._args
        self.workers[rank] = start_process(_work, *work, daemon=False)
        self._started.append(self.workers[rank])
        theirs.close()

    def kill(self, rank: int) -> None:
        """End the rank without a word."""
        self.workers[rank].kill()
        self.workers[rank].join()

    def send(self, message: Any) -> None:
        """Send something to all ranks."""
        for pipe in self._pipes:
            pipe.send(message)

    def results(self, *ranks: int) -> list[Any]:
        """What these ranks return, or all."""
        return [self.wait_for(rank, "result") for rank in ranks or range(self.world_size)]

    def wait_for(self, rank: int, key: str, seconds: float = 90) -> Any:
        """What the rank reports under the key, from now on or before."""
        self.wait_until(lambda: (rank, key) in self.reports, f"{key} of rank {rank}", seconds)
        return self.reports.pop((rank, key))

    def wait_until(self, done: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Take reports until something is done."""
        deadline = time.monotonic() + seconds
        while not done():
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"waited in vain for {what}: {self.reports}"
            self._take(remaining)

    def take_all(self) -> None:
        """Take what has been reported up to now."""
        while any(pipe.poll() for pipe in self._pipes):
            self._take(0)

    def _take(self, seconds: float) -> None:
        """Take one report from each rank that has some."""
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
            self.reports[rank, key] = value


def _work(
    main: Callable[..., Any], env: dict[str, str], rank: int, pipe: Connection, args: Any
) -> None:
    if env:
        os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    begin_process()
    try:
        pipe.send(("result", main(rank, pipe, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


def run_processes(
    world_size: int,
    main: Callable[..., Result],
    *args: Any,
    local_world_size: int | None = None,
    lost: Collection[int] = (),
) -> list[Result]:
    """Run `main(rank, *args)` on processes with torchrun's environment; results by rank.

    `main` initialises the process group itself, as a user's script does. The ranks in `lost` are
    not expected to return, and are left out of the results.
    """
    kept = [rank for rank in range(world_size) if rank not in lost]
    local = local_world_size or world_size
    with Processes(world_size, _run, lost, main, args, local_world_size=local) as ranks:
        results = ranks.results(*kept)
        for rank in kept:
            ranks.workers[rank].join(30)
        assert [ranks.workers[rank].exitcode for rank in kept] == [0] * len(kept)
    return results


def _run(rank: int, _: Connection, lost: Collection[int], main: Any, args: Any) -> Any:
    ignored = (BaseException,) if rank in lost else ()
    with suppress(*ignored):
        return main(rank, *args)


class KeptRanks:
    """Processes with one default group, which run one function after another.

    What torch computes once in a process, such as how an operation on shards is split, serves all
    of them. After an error the ranks are no longer in step: others take their place.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: Processes | None = None

    def run(self, work: Callable[..., Result], *args: Any) -> list[Result]:
        """Run `work(*args)` on all ranks; results by rank."""
        if self._ranks is None:
            size = self._world_size
            self._ranks = Processes(size, _serve, local_world_size=size)
        try:
            self._ranks.send((work, args))
            return self._ranks.results()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _serve(_: int, pipe: Connection) -> None:
    dist.init_process_group("gloo")
    while True:
        work, args = pipe.recv()
        pipe.send(("result", work(*args)))


def launcher_store() -> TCPStore:
    """The store of a launcher, as of torchrun's agent: no port to guess, none to lose."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store: TCPStore, world_size: int, local_world_size: int) -> dict[str, str]:
    """What torchrun sets for all ranks."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def run_script(*command: str | Path, cwd: Path, seconds: float = 110) -> str:
    """Run a script as ``python`` does, without importing torch again; what it prints."""
    return _run_scripts(1, 0, command, cwd, seconds)


def run_script_on_ranks(
    world_size: int, *command: str | Path, cwd: Path, seconds: float = 110
) -> str:
    """Run a script as torchrun does, without importing torch again; what all ranks print."""
    return _run_scripts(world_size, world_size, command, cwd, seconds)


def _run_scripts(
    size: int, local: int, command: tuple[str | Path, ...], cwd: Path, seconds: float
) -> str:
    args = [*map(str, command)], cwd
    with (
        TemporaryDirectory() as folder,
        Processes(size, _script, Path(folder), *args, local_world_size=local) as ranks,
    ):
        deadline = time.monotonic() + seconds
        for worker in ranks.workers.values():
            worker.join(max(0.0, deadline - time.monotonic()))
        printed = "".join(output.read_text() for output in sorted(Path(folder).iterdir()))
        codes = [worker.exitcode for worker in ranks.workers.values()]
    assert codes == [0] * size, printed
    return printed


def _script(rank: int, _: Connection, out: Path, command: list[str], cwd: Path) -> None:
    """What a fresh interpreter does, with its output in a file."""
    print_to(out / str(rank))
    os.chdir(cwd)
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).parent))
    # Not by runpy: what the processes of the script send back has to be found in its module.
    main = ModuleType("__main__")
    main.__file__ = command[0]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(compile(Path(command[0]).read_text(), command[0], "exec"), vars(main))


def print_to(path: Path) -> None:
    """Append what this process prints to a file from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1) for stream in (1, 2))  # noqa: PTH123, SIM115


def keep_no_idle_threads() -> None:
    """End idle threads of the library at once, so that `threads_end` waits for busy ones."""
    mock.patch("decent_optim_wrapper.comm.background._IDLE_SECONDS", 0.2).start()


def threads_end(seconds: float) -> bool:
    """Return whether all threads of the library in this process end within that time."""
    deadline = time.monotonic() + seconds
    while any(each.name.startswith("decent-") for each in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def begin_process() -> None:
    """To be called first in a process that was forked."""
    torch.set_num_threads(1)
    # What many tests do on purpose. Only pytest's own process has its filters.
    warnings.filterwarnings("ignore", "the values of rank 0 have replaced others")
    # The collector would write to all that is imported, and so copy 100 MB of memory.
    gc.freeze()


def end_interpreter(code: int = 0) -> NoReturn:
    """End as a script does: a process of multiprocessing ends without finalising Python."""
    # Triton would list what cannot be freed.
    print_to(Path(os.devnull))
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("it does not return")
