"""A launch whose store is in etcd: what may die, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
from etcd_servers import EtcdServers, require_etcd
from launched import Launched
from torch._C._distributed_c10d import HashStore, PrefixStore

from decent_optim_wrapper import EtcdStore
from decent_optim_wrapper.launcher.nodes import Nodes
from decent_optim_wrapper.start.launched_store import find_launched_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc"),
]


# Tells where it is and how to find the others, and waits.
WAITING = """
import json
tell(f"environ {rank} {life}", json.dumps(dict(os.environ)))
tell(f"pid {rank} {life}", os.getpid())
wait_for(f"end {rank}")
"""


def test_a_launch_goes_on_without_a_server_a_rank_and_a_node(tmp_path: Path) -> None:
    """That training does, too, is in test_etcd.py: no rank here imports torch."""
    require_etcd()

    def store_of(rank: int, life: int) -> Any:
        found = find_launched_store(json.loads(nodes[rank].told(f"environ {rank} {life}")), None)
        assert found is not None
        assert (found.rank, found.world_size) == (rank, 2)
        return found.store

    with EtcdServers(3) as cluster, ExitStack() as stack:
        url = f"etcd://{cluster.endpoints}/run"
        # An earlier run has used the prefix.
        earlier = PrefixStore("decent_optim_wrapper/launcher", EtcdStore(cluster.endpoints, "run"))
        for number in range(2):
            earlier.set(f"node/{number}", "[1, true, true, 0.0]")
        options = ("--nnodes", "2", "--backoff", "0.1", "--store", url, "--node-rank")
        nodes = [stack.enter_context(Launched(tmp_path, WAITING, *options, node)) for node in "01"]
        store_of(1, 0).set("from 1", "before")
        cluster.kill(cluster.leader())
        os.kill(int(nodes[0].told("pid 0 0")), signal.SIGKILL)
        # Comes back, and finds the other one.
        assert store_of(0, 1).get("from 1") == b"before"
        nodes[1].kill()
        nodes[0].tell("end 0")
        assert nodes[0].end() == 0
    assert "rank 0 is started again (restart 1 of 3)" in nodes[0].printed
    assert not cluster.alive()


@pytest.mark.parametrize(
    ("url", "rank", "words"),
    [
        ("redis://host:1/run", "0", "expected a store as 'etcd://"),
        ("etcd://host:2379/run", "7", "contradict each other"),
    ],
)
def test_variables_of_a_store_that_are_wrong_are_named(url: str, rank: str, words: str) -> None:
    environ = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match=words):
        find_launched_store({**environ, "DECENT_STORE": url}, None)


BEAT = 0.02


@contextmanager
def nodes_on(store: HashStore, *numbers: int) -> Iterator[list[Nodes]]:
    """Some of two nodes on a store that outlives them, once each has read what the others wrote."""
    part = PrefixStore("decent_optim_wrapper/launcher", store)
    with mock.patch("decent_optim_wrapper.launcher.nodes.PAUSE", BEAT):
        nodes = [Nodes(lambda: store, each, 2, None, says.append) for each in numbers]
        beats: dict[int, set[bytes]] = {number: set() for number in numbers}

        def have_read() -> bool:
            # A node writes after it has read.
            for number, found in beats.items():
                found.add(part.get(f"node/{number}"))
            return all(len(found) > 3 for found in beats.values())

        wait_until(have_read)
        yield nodes


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(BEAT)


says: list[str] = []


@pytest.mark.parametrize("runs_before", [0, 1, 2])
@pytest.mark.parametrize("was_there", [False, True])
def test_a_node_that_comes_after_another_has_left_knows_that_it_has_finished(
    runs_before: int, was_there: bool
) -> None:
    """Whether it was there before the other one finished, and failed, or comes late.

    What earlier runs have written ends no later one: a store in etcd keeps it.
    """
    store = HashStore()
    for _ in range(runs_before):
        with nodes_on(store, 0, 1) as (first, second):
            assert [first.finished, second.finished] == [False, False]
            first.note_finished()
            first.leave(lambda: False)
            wait_until(lambda: second.finished)
            second.leave(lambda: False)
    if was_there:
        with nodes_on(store, 0, 1) as both:
            for node in both:
                assert not node.finished
                node.leave(lambda: False)
    with nodes_on(store, 0) as (first,):
        assert not first.finished
        first.note_finished()
        first.leave(lambda: False)
    with nodes_on(store, 1) as (second,):
        assert second.finished
        second.leave(lambda: False)
    assert not says


def test_a_store_that_has_never_answered_is_given_up_too() -> None:
    said, late = list[str](), Event()

    def connect() -> HashStore:
        late.wait(60)
        raise RuntimeError("refused")

    module = "decent_optim_wrapper.launcher.nodes"
    with mock.patch(f"{module}.PAUSE", BEAT), mock.patch(f"{module}.SILENT_SECONDS", 5 * BEAT):
        node = Nodes(connect, 1, 2, 0, said.append)
        assert node.can_meet(time.monotonic()), "it may still have to start"
        late.set()
        wait_until(lambda: bool(said))
        assert not node.can_meet(time.monotonic()), said
        wait_until(lambda: "the store of node 0 has not answered" in node.why_no_restart())
        node.leave(lambda: False)
