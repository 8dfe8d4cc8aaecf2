"""A launch whose store is in etcd: what may die, and that nothing is left."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from etcd_servers import EtcdServers, free_ports, require_etcd
from launched import TRAINING, Launched, children, is_alive

from decent_optim_wrapper.comm.store_url import StoreUrl
from decent_optim_wrapper.start.launched_store import find_launched_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc"),
]


def test_training_goes_on_without_a_rank_a_node_and_a_server(tmp_path: Path) -> None:
    require_etcd()
    with EtcdServers(3) as cluster, ExitStack() as stack:
        sizes = ("--nnodes", "2", "--nproc-per-node", "2", "--backoff", "0.1")
        options = (*sizes, "--store", f"etcd://{cluster.endpoints}/run", "--node-rank")
        first, second = (
            stack.enter_context(Launched(tmp_path, TRAINING, *options, node)) for node in "01"
        )
        for rank in range(4):
            first.wait_until(partial(first.has_members, rank, (0, 1, 2, 3)))
        os.kill(int(first.told("pid 1 0")), signal.SIGKILL)
        # Comes back, and the others train with it.
        first.told("pid 1 1")
        first.wait_until(lambda: first.has_members(1, (0, 1, 2, 3)))
        second.signal(signal.SIGKILL)
        second.process.join()
        for rank in (0, 1):
            first.wait_until(partial(first.has_members, rank, (0, 1)))
        cluster.kill(cluster.leader())
        os.kill(int(first.told("pid 0 0")), signal.SIGKILL)
        first.told("pid 0 1")
        first.finish_training(rank=1)
        assert first.end() == 0
    assert first.told("end 0") == first.told("end 1")
    assert "is started again in 0.1 s" in first.printed
    assert not cluster.alive()


# Tells where the store is, and waits.
HOLDING = """
tell(f"store {rank}", os.environ["DECENT_STORE"])
wait_for(f"end {rank}")
"""


def servers(launcher: Launched) -> list[tuple[int, Path]]:
    """The etcd servers of a launcher, with the folders of their data."""
    assert launcher.process.pid is not None
    found = []
    for pid in children(launcher.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if command[0] == "etcd":
            found.append((pid, Path(command[command.index("--data-dir") + 1])))
    return found


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_is_started_again_with_its_data_and_ends_with_the_launcher(
    is_killed: bool, tmp_path: Path
) -> None:
    require_etcd()
    with Launched(tmp_path, HOLDING, "--with-etcd", "--backoff", "0.1") as launcher:
        store = StoreUrl.parse(launcher.told("store 0")).open(timedelta(seconds=60))
        store.set("key", "value")
        ((before, _),) = servers(launcher)
        os.kill(before, signal.SIGKILL)
        launcher.wait_until(lambda: not is_alive(before))
        assert store.get("key") == b"value"
        ((server, folder),) = servers(launcher)
        assert folder.is_dir()
        if is_killed:
            launcher.signal(signal.SIGKILL)
            launcher.process.join()
        else:
            (tmp_path / "end 0").touch()
            assert launcher.end() == 0
        launcher.wait_until(lambda: not is_alive(server) and not folder.parent.exists())
    assert "the etcd server of this node ended (killed by SIGKILL)" in launcher.printed
    assert "does not outlive the loss of a node" in launcher.printed


def test_a_server_that_does_not_start_is_given_up_with_its_error(tmp_path: Path) -> None:
    require_etcd()
    with EtcdServers(1) as other:
        store = f"etcd://{other.endpoints}/run"
        options = ("--with-etcd", "--store", store, "--max-restarts", "1", "--backoff", "0.1")
        with Launched(tmp_path, HOLDING, *options) as launcher:
            launcher.wait_until(lambda: "--max-restarts is 1" in launcher.printed)
            (tmp_path / "end 0").touch()
            assert launcher.end() == 0
    assert launcher.printed.count("address already in use") == 2


def test_the_servers_of_three_nodes_outlive_one_of_them(tmp_path: Path) -> None:
    require_etcd()
    ports = free_ports(3)
    url = f"etcd://{','.join(f'127.0.0.1:{port}' for port in ports)}/run"
    options = ("--with-etcd", "--nnodes", "3", "--store", url, "--node-rank")
    with ExitStack() as stack:
        nodes = [stack.enter_context(Launched(tmp_path, HOLDING, *options, n)) for n in "012"]
        for rank, node in enumerate(nodes):
            assert node.told(f"store {rank}") == url
        store = StoreUrl.parse(url).open(timedelta(seconds=60))
        store.set("key", "value")
        nodes[2].signal(signal.SIGKILL)
        nodes[2].process.join()
        assert store.get("key") == b"value"
        # The ranks of the other node still need the server of this one.
        (tmp_path / "end 0").touch()
        nodes[0].process.join(3)
        assert nodes[0].process.is_alive()
        store.set("key", "other")
        (tmp_path / "end 1").touch()
        assert [nodes[node].end() for node in (0, 1)] == [0, 0]
    assert not any("does not outlive" in node.printed for node in nodes)


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
