"""Ranks as processes that meet in a store of the launcher, and can be killed and started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import (
    Processes,
    keep_no_idle_threads,
    launcher_store,
    threads_end,
)
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, PeerError

# Seconds that a rank sleeps after a step. The rounds that are made until the launcher acts leave
# the cores to other tests, and are no more than a launcher on a busy machine can be late for.
STEP = 0.02
# The same for `train`: fewer steps in the same time leave more of the cores.
PAUSE = 0.05
# Seconds without a sign of life after which a rank is dead: what a test of a lost rank waits for.
STALE_AFTER = 1.0
# Values of every rank that are not trained.
FROZEN = torch.linspace(0.1, 1, 99)

Members = tuple[int, ...]
Hook = Callable[[int, DecentOptimWrapper], object]
# What a process calls with a key and a value for the launcher.
Report = Callable[[str, Any], None]


def connect(host: str, port: int, rank: int = 0) -> TCPStore:
    """A connection of this process to a store; all ranks have the same."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))


def wrap_elastic(
    params: list[Tensor],
    rank: int,
    world_size: int,
    store: Any,
    changes: list[Any],
    refuses: bool = False,
    stale_after: float = STALE_AFTER,
    **options: Any,
) -> DecentOptimWrapper:
    """An optimizer that goes on without lost ranks, and notes old and new members at changes."""

    def note(old: Members, new: Members) -> None:
        changes.append((old, new))
        if refuses:
            raise LookupError(f"no data for {new}")

    options = {
        "bucket_cap_mb": TINY_CAP_MB,
        "elastic": Elastic(store=store, on_membership_change=note, stale_after=stale_after),
        **options,
    }
    return DecentOptimWrapper(sgd(params), rank, world_size, **options)


class Life(NamedTuple):
    """What a process that reached the end has seen; `params` after an average over all members."""

    params: list[float]
    start: list[float]
    members: Members
    # When it came, and old and new ones since.
    first: Members
    changes: list[tuple[Members, Members]]
    # What its callback has raised.
    caught: list[str]
    # What it saw in averages, by round.
    averages: dict[int, list[float]]
    topologies: list[str]
    # The seconds of its longest step.
    longest: float


def train(
    rank: int,
    world_size: int,
    store: Any,
    report: Report,
    make_store: Callable[[int], Any] | None = None,
    before: Hook | None = None,
    after: Hook | None = None,
    averages: bool = False,
    refuses: int | None = None,
    **options: Any,
) -> Life:
    """Train until the launcher says up to which round, then average over those who are left.

    It calls `before` and `after` around every step. With `averages` an average is in place in every
    other round, and kept in every sixth, and a rank that comes back has other frozen values. The
    callback of rank `refuses` raises. The ranks meet in the store that `make_store` makes for a
    rank, or in the launcher's.
    """
    params, longest = make_params(seed=rank), 0.0
    seen: dict[int, list[float]] = {}
    changes: list[tuple[Members, Members]] = []
    caught: list[str] = []
    meeting = make_store(rank) if make_store else store
    lives = store.add(f"lives of rank {rank}", 1) if averages else 1
    frozen = torch.nn.Parameter(FROZEN * lives, requires_grad=False)
    averaged = [*params, frozen]
    if averages:
        # The optimizer does not have it.
        options["model"] = torch.nn.ParameterDict({"frozen": frozen})
    optimizer = wrap_elastic(params, rank, world_size, meeting, changes, refuses == rank, **options)
    report("joined", optimizer.round)

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except LookupError as error:
            caught.append(str(error))

    start, first, topologies = flatten(params), optimizer.members, [repr(optimizer.topology)]
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        if store.check([f"delay {rank}"]):
            time.sleep(float(store.get(f"delay {rank}")))
            store.delete_key(f"delay {rank}")
        backward(params, rank, optimizer.round)
        if before:
            before(rank, optimizer)
        began = time.monotonic()
        attempt(optimizer.step)
        longest = max(longest, time.monotonic() - began)
        if after:
            after(rank, optimizer)
        if averages and optimizer.round % 2 == 0:
            attempt(lambda: look_at_average(optimizer, averaged, seen))
            seen.setdefault(optimizer.round, []).append(optimizer.consensus_distance())
        if averages and optimizer.round % 6 == 0:
            optimizer.global_avg(may_revert=False)
        if repr(optimizer.topology) != topologies[-1]:
            topologies.append(repr(optimizer.topology))
        if optimizer.round % 3 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(PAUSE)
    optimizer.global_avg(may_revert=False)
    return Life(
        params=flatten(params).tolist(),
        start=start.tolist(),
        members=optimizer.members,
        first=first,
        changes=changes,
        caught=caught,
        averages=seen,
        topologies=topologies,
        longest=longest,
    )


def look_at_average(
    optimizer: DecentOptimWrapper, params: list[Tensor], seen: dict[int, list[float]]
) -> None:
    """Note what an average looks like that is in place for a moment; nothing is left of it.

    The last values are frozen: every rank has the values of the others.
    """
    own = flatten(params)
    try:
        with optimizer.averaged():
            assert len(optimizer.members) == 1 or not torch.equal(flatten(params), own)
            assert torch.equal(params[-1], FROZEN)
            seen[optimizer.round] = [float(param.detach().sum()) for param in params]
    finally:
        assert torch.equal(flatten(params), own)
        assert not optimizer.is_averaged


def agree(lives: list[Life]) -> None:
    """Check that all have ended together, and have seen all changes of the members."""
    rows = torch.tensor([life.params for life in lives], dtype=torch.float64)
    assert rows.isfinite().all()
    torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=0, atol=1e-12)
    assert len({life.members for life in lives}) == 1
    assert len({life.topologies[-1] for life in lives}) == 1
    for life in lives:
        assert life.params != life.start
        seen = life.first
        for old, new in life.changes:
            assert old == seen != new
            seen = new
        assert seen == life.members


class Failure(NamedTuple):
    """How training ended before its time, `seconds` after the call began that has failed."""

    kind: str
    text: str
    seconds: float
    threads_ended: bool


def train_or_tell(
    rank: int, world_size: int, store: Any, report: Report, within: float = 0.0, **options: Any
) -> Life | Failure:
    """As `train`, but an error of the library is an end, too; its threads end in `within` s."""
    began = time.monotonic()
    keep_no_idle_threads()

    def note(rank: int, optimizer: DecentOptimWrapper) -> None:
        nonlocal began
        began = time.monotonic()

    try:
        return train(rank, world_size, store, report, before=note, **options)
    except (PeerError, ValueError) as error:
        kind, text, seconds = type(error).__name__, str(error), time.monotonic() - began
    return Failure(kind, text, seconds, threads_end(within))


class RestartableProcesses(Processes):
    """Runs `main(rank, world_size, store, report, *args)` in a process for each rank.

    Args:
        world_size: number of ranks.
        main: reports by calling `report(key, value)`; what it returns is reported as "result".
        args: further arguments.
        options: further arguments by name.
    """

    def __init__(
        self, world_size: int, main: Callable[..., Any], *args: Any, **options: Any
    ) -> None:
        store = launcher_store()
        meeting = world_size, store.port, partial(main, **options), args
        super().__init__(world_size, _meet, *meeting, store=store)

    def all_reach(self, key: str) -> None:
        """Return once every rank has reported the key."""
        for rank in range(self.world_size):
            self.wait_for(rank, key)

    def finish(self, margin: int = 30) -> None:
        """Tell the ranks to end some rounds after the last that one of them has reported."""
        self.take_all()
        last = max(max(self._rounds(rank), default=0) for rank in range(self.world_size))
        self.store.set("finish", str(last + margin))

    def end(self, *ranks: int, margin: int = 12) -> list[Life]:
        """End `train` on these ranks, or on all; return what they have seen and agree on."""
        self.finish(margin)
        lives: list[Life] = self.results(*ranks)
        agree(lives)
        return lives

    def signal(self, rank: int, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        _signal(self.workers[rank].pid, number)

    def delay(self, rank: int, seconds: float) -> None:
        """Ask the rank to sleep before its next step."""
        self.store.set(f"delay {rank}", str(seconds))

    def wait_for_round(self, rank: int, number: int, seconds: float = 60) -> None:
        """Return once the rank has reported this round or a later one: while left out, it skips."""

        def reached() -> bool:
            return max(self._rounds(rank), default=0) >= number

        self.wait_until(reached, f"round {number} of rank {rank}", seconds)

    def wait_for_members(self, rank: int, members: Members) -> None:
        """Return once the rank reports a round, from now on, with these members."""
        self.take_all()
        before = self._rounds(rank).keys()

        def trains() -> bool:
            rounds = self._rounds(rank)
            return members in {rounds[number] for number in rounds.keys() - before}

        self.wait_until(trains, f"rank {rank} with members {members}")

    def ended(self) -> set[int]:
        """The ranks that have reported a result."""
        self.take_all()
        return {rank for rank, key in self.reports if key == "result"}

    def _rounds(self, rank: int) -> dict[int, Members]:
        """The members in the rounds that the rank has reported."""
        said = {key: value for (teller, key), value in self.reports.items() if teller == rank}
        return {int(key[6:]): value for key, value in said.items() if key.startswith("round ")}


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
        self._processes = Processes(1, _serve, host, prepare, args)
        self.port: int = self._processes.wait_for(0, "port")

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def connect(self) -> Callable[[int], TCPStore]:
        """Makes a connection of the process that calls it, for a rank."""
        return partial(connect, self._host, self.port)

    def kill(self) -> None:
        """End the store without a word."""
        self._processes.kill(0)

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        _signal(self._processes.workers[0].pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    """Return once the process stands still: on a busy machine it goes on a little until then."""
    os.kill(pid, number)
    while number is signal.SIGSTOP and not all(
        map(_stands_still, Path(f"/proc/{pid}/task").iterdir())
    ):
        time.sleep(0.01)


def _stands_still(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"


def _serve(
    _: int, pipe: Connection, host: str, prepare: Callable[..., Any] | None, args: tuple[Any, ...]
) -> None:
    if prepare is not None:
        prepare(*args)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    pipe.send(("port", store.port))
    threading.Event().wait()


def _meet(
    rank: int, pipe: Connection, world_size: int, port: int, main: Callable[..., Any], args: Any
) -> Any:
    def report(key: str, value: Any) -> None:
        pipe.send((key, value))

    return main(rank, world_size, connect("127.0.0.1", port), report, *args)
