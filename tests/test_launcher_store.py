"""A launch whose store is in etcd: what may die, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import EtcdServers, require_etcd
from launched import Launched
from torch._C._distributed_c10d import PrefixStore

from decent_optim_wrapper import EtcdStore
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
