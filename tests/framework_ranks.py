"""Ranks that train in a framework: forked from one process that has imported it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from ranks import PROCESSES, begin_process, environment, launcher_store

FORK = multiprocessing.get_context("fork")
# Runs a function of the rank on two ranks, and returns their results.
Run = Callable[..., list[Any]]
RANKS = 2
EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"
# Less than what pytest allows a test, and enough for a machine that is busy.
SECONDS = 110


@contextmanager
def ranks_with(*modules: str) -> Iterator[Run]:
    """Import modules in one process, and run functions on ranks that are forked from it.

    The preloads of `ranks.PROCESSES` would import them for every worker.
    """
    here, there = PROCESSES.Pipe()
    host = PROCESSES.Process(target=_host, args=(there, modules))
    host.start()
    there.close()

    def run(main: Callable[..., Any], *args: Any) -> list[Any]:
        store = launcher_store()
        here.send((main, args, environment(store, RANKS, RANKS)))
        if not here.poll(SECONDS):
            raise TimeoutError(f"{main.__name__} on {RANKS} ranks")
        results = here.recv()
        errors = [
            f"rank {rank} raised:\n{error}" for rank, (_, error) in enumerate(results) if error
        ]
        assert not errors, "\n".join(errors)
        return [value for value, _ in results]

    try:
        yield run
    finally:
        here.close()
        host.kill()
        host.join()


def _host(requests: Any, modules: tuple[str, ...]) -> None:
    begin_process()
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            main, args, env = requests.recv()
        except EOFError:
            return
        pipes = [FORK.Pipe(duplex=False) for _ in range(RANKS)]
        workers = [
            FORK.Process(target=_rank, args=(rank, env, pipe[1], main, args), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        for _, sender in pipes:
            sender.close()
        requests.send([_result(receiver) for receiver, _ in pipes])
        for worker in workers:
            worker.join()


def _result(receiver: Any) -> tuple[Any, str | None]:
    try:
        result: tuple[Any, str | None] = receiver.recv()
    except EOFError:
        return None, "it ended without a result"
    return result


def _rank(rank: int, env: dict[str, str], sender: Any, main: Any, args: Any) -> None:
    # Lightning takes the group's rank as the sign of torchrun.
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
    begin_process()
    try:
        sender.send((main(rank, *args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))


def learns_the_digits(run: Run, script: str, folder: Path) -> bool:
    """Whether an example ends with more than 90 % of the digits known."""
    printed, _ = run(_run_example, EXAMPLES / script, folder, "--epochs", "3")
    (accuracy,) = re.findall(r"^test accuracy (.*)%$", printed, re.MULTILINE)
    return float(accuracy) > 90


def _run_example(_: int, *arguments: Any) -> str:
    return run_example(*arguments)


def run_example(path: Path, folder: Path, *options: str) -> str:
    """Run an example as this rank; what it prints."""
    os.chdir(folder)
    sys.argv[:] = [str(path), *options]
    # A bar of progress goes to stderr.
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
