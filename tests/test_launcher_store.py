"""A launch whose store is in etcd: what may die, and that nothing is left."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from etcd_servers import EtcdServers, free_ports, require_etcd
from launched import Launched, children, hurried, is_alive, ours
from torch._C._distributed_c10d import HashStore, PrefixStore

from decent_optim_wrapper.comm.store_url import StoreUrl
from decent_optim_wrapper.launcher.nodes import Nodes
from decent_optim_wrapper.start.launched_store import find_launched_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks in /proc"),
]


# Trains until a file says up to which round, and tells where it is and with whom, and after exact
# averages what it has.
TRAINING = """
import torch
from decent_optim_wrapper import DecentOptimWrapper, Elastic, Schedule

params = [torch.nn.Parameter(torch.full((50,), float(each))) for each in range(3)]
optimizer = DecentOptimWrapper(
    torch.optim.SGD(params, lr=0.1),
    topology="ring",
    schedule=Schedule(global_avg_every=10),
    timeout=20,
    bucket_cap_mb=1e-4,
    elastic=Elastic(stale_after=1.0),
)
tell(f"pid {rank} {life}", os.getpid())
last = Path("last round")
while not last.exists() or optimizer.round < int(last.read_text()):
    for param in params:
        param.grad = torch.full_like(param, (rank + 1.0) / (optimizer.round + 1))
    optimizer.step()
    tell(f"at {rank}", f"{optimizer.round} {optimizer.members}")
    if optimizer.round % 10 == 0:
        optimizer.synchronize()
        tell(f"values {rank}", f"{optimizer.round} {[param.sum().item() for param in params]}")
    time.sleep(0.02)
optimizer.global_avg(may_revert=False)
"""


def test_training_goes_on_without_a_server_a_rank_and_a_node(tmp_path: Path) -> None:
    require_etcd()

    def wait_for_new(name: str, ranks: Sequence[int], done: Callable[[list[str]], bool]) -> None:
        """Wait for what ranks tell from now on: a process that has ended has told something."""
        places = [tmp_path / f"{name} {rank}" for rank in ranks]
        for place in places:
            place.unlink(missing_ok=True)
        nodes[0].wait_until(
            lambda: (
                all(place.exists() for place in places)
                and done([place.read_text() for place in places])
            )
        )

    def wait_for_members(*ranks: int) -> None:
        wait_for_new("at", ranks, lambda told: all(text.endswith(f" {ranks}") for text in told))

    # Two ranks: each of their processes spends four seconds of CPU time on imports.
    with EtcdServers(3) as cluster, ExitStack() as stack:
        store = f"etcd://{cluster.endpoints}/run"
        options = ("--nnodes", "2", "--backoff", "0.1", "--store", store, "--node-rank")
        nodes = [stack.enter_context(Launched(tmp_path, TRAINING, *options, node)) for node in "01"]
        wait_for_members(0, 1)
        cluster.kill(cluster.leader())
        os.kill(int(nodes[0].told("pid 0 0")), signal.SIGKILL)
        # Comes back, and the other one trains with it.
        nodes[0].told("pid 0 1")
        wait_for_members(0, 1)
        wait_for_new("values", (0, 1), lambda told: told[0] == told[1])
        nodes[1].kill()
        wait_for_members(0)
        round_of_rank_0 = int(nodes[0].told("at 0").split()[0])
        nodes[0].tell("last round", str(round_of_rank_0 + 10))
        assert nodes[0].end() == 0
    assert "is started again in 0.1 s" in nodes[0].printed
    assert not cluster.alive()


# Tells where the store is, and waits.
HOLDING = """
tell(f"store {rank}", os.environ["DECENT_STORE"])
wait_for(f"end {rank}")
"""


def in_memory(command: Sequence[str]) -> int:
    """Run our launcher with the data of its server in memory: a busy disk delays every answer."""
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"
    return ours(command)


def servers(launcher: Launched) -> list[tuple[int, Path]]:
    """The etcd servers of a launcher, with the folders of their data."""
    found = []
    for pid in children(launcher.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if command[0] == "etcd":
            found.append((pid, Path(command[command.index("--data-dir") + 1])))
    return found


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_is_started_again_with_its_data_and_ends_with_the_launcher(
    is_killed: bool, tmp_path: Path
) -> None:
    require_etcd()
    options = ("--with-etcd", "--backoff", "0.1")
    with Launched(tmp_path, HOLDING, *options, launcher=in_memory) as launcher:
        store = StoreUrl.parse(launcher.told("store 0")).open(timedelta(seconds=60))
        store.set("key", "value")
        ((before, _),) = servers(launcher)
        os.kill(before, signal.SIGKILL)
        launcher.wait_until_ended(before)
        assert store.get("key") == b"value"
        ((server, folder),) = servers(launcher)
        assert folder.is_dir()
        if is_killed:
            launcher.kill()
        else:
            launcher.tell("end 0")
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
            launcher.wait_until_printed("--max-restarts is 1")
            launcher.tell("end 0")
            assert launcher.end() == 0
    assert launcher.printed.count("address already in use") == 2


def test_the_servers_of_three_nodes_outlive_one_of_them(tmp_path: Path) -> None:
    require_etcd()
    ports = free_ports(3)
    url = f"etcd://{','.join(f'127.0.0.1:{port}' for port in ports)}/run"
    options = ("--with-etcd", "--nnodes", "3", "--store", url, "--node-rank")
    launcher = partial(hurried, pause=0.5, seconds=10.0, launcher=in_memory)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Launched(tmp_path, HOLDING, *options, node, launcher=launcher))
            for node in "012"
        ]
        for rank, node in enumerate(nodes):
            assert node.told(f"store {rank}") == url
        store = StoreUrl.parse(url).open(timedelta(seconds=60))
        store.set("key", "value")
        nodes[2].kill()
        assert store.get("key") == b"value"
        # The ranks of the other node still need the server of this one.
        nodes[0].tell("end 0")
        nodes[0].process.join(2)
        assert nodes[0].process.is_alive()
        store.set("key", "other")
        nodes[1].tell("end 1")
        assert [node.end() for node in nodes[:2]] == [0, 0]
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


def test_a_holder_that_finds_a_node_dead_tells_the_other_holders() -> None:
    store = HashStore()
    with (
        mock.patch("decent_optim_wrapper.launcher.nodes.PAUSE", 0.02),
        ThreadPoolExecutor() as pool,
    ):
        holders = [Nodes(lambda: store, each, 3, holders=range(3)) for each in (0, 1)]
        for ending in [pool.submit(each.leave, lambda: False) for each in holders]:
            ending.result()
    beats = PrefixStore("decent_optim_wrapper/launcher", store)
    assert beats.check(["beat/2"])
    assert beats.get("beat/2") == b"ended"
