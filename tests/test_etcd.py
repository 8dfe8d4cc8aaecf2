"""`EtcdStore`: what a store promises, while servers die; and which faults each store survives."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist
from etcd_servers import EtcdServers, etcd_servers, free_ports
from forked import start_process
from ranks import begin_process, end_interpreter
from restartable_processes import Failure, RestartableProcesses, StoreProcess, train_or_tell
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from decent_optim_wrapper import EtcdStore
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.launcher import nodes
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GUIDE = Path(__file__).parents[1] / "examples" / "guides" / "elastic.md"
# What a busy machine may take longer than a bound.
SLACK = 10.0


@pytest.fixture(scope="module")
def servers() -> Iterator[EtcdServers]:
    with etcd_servers(3) as cluster:
        yield cluster


def use(store: Any, part: str) -> list[Any]:
    """The answers of a store to calls of every kind."""
    store.set(f"{part}a", "1")
    store.set(f"{part}a", "2")
    answers: list[Any] = [store.get(f"{part}a"), store.check([f"{part}a"])]
    answers += [store.check([f"{part}a", f"{part}b"])]
    answers += [store.add(f"{part}n", amount) for amount in (2, -5, 0)]
    for expected, desired in (("", "x"), ("", "y"), ("x", "y"), ("x", "z"), ("y", "")):
        answers.append(store.compare_set(f"{part}c", expected, desired))
    answers += [store.compare_set(f"{part}d", "x", "y"), store.check([f"{part}d"])]
    store.multi_set([f"{part}e", f"{part}f"], ["3", "4"])
    store.append(f"{part}e", "5")
    store.append(f"{part}g", "6")
    store.wait([f"{part}e"], timedelta(seconds=5))
    answers += store.multi_get([f"{part}e", f"{part}f", f"{part}g"])
    answers += [store.delete_key(f"{part}a"), store.delete_key(f"{part}a")]
    answers += [store.check([f"{part}a"]), store.has_extended_api()]
    return answers


def test_it_answers_as_a_tcp_store_does(servers: EtcdServers) -> None:
    theirs = use(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "")
    store = EtcdStore(servers.endpoints, "answers")
    assert use(store, "plain ") == theirs
    # As the library and gloo use it: from C++, which does not keep the Python object.
    behind = PrefixStore("behind", PrefixStore("two", EtcdStore(servers.endpoints, "answers")))
    gc.collect()
    assert use(behind.clone(), "") == theirs
    assert not store.check(["behind/n"])
    assert store.check(["two/behind/n"])
    assert not EtcdStore(servers.endpoints, "other").check(["two/behind/n"])


def test_numbers_and_claims_are_exact_while_many_use_them(servers: EtcdServers) -> None:
    stores = [EtcdStore(servers.endpoints, "many") for _ in range(6)]

    def count_and_claim(store: EtcdStore) -> list[Any]:
        sums = [store.add("sum", 1) for _ in range(10)]
        return [sums, store.compare_set("claim", "", repr(sums))]

    with ThreadPoolExecutor(len(stores)) as pool:
        results = list(pool.map(count_and_claim, stores))
    assert sorted(each for sums, _ in results for each in sums) == list(range(1, 61))
    assert len({claimed for _, claimed in results}) == 1


@contextmanager
def clients_that_lose_answers() -> Iterator[list[mock.Mock]]:
    """The clients of stores made meanwhile, which lose the answers of every other write."""
    pyetcd: Any = importlib.import_module("pyetcd")
    make, clients = pyetcd.MultiEndpointEtcd3Client, []

    def make_watched(*args: Any, **options: Any) -> mock.Mock:
        client = make(*args, **options)
        clients.append(watched := mock.Mock(wraps=client))

        def write_and_lose(*args: Any, **options: Any) -> Any:
            done = client.transaction(*args, **options)
            if watched.transaction.call_count % 2:
                raise pyetcd.exceptions.ConnectionTimeoutError
            return done

        watched.transaction.side_effect = write_and_lose
        return watched

    with mock.patch.object(pyetcd, "MultiEndpointEtcd3Client", make_watched):
        yield clients


def test_a_call_whose_answer_is_lost_takes_effect_once(servers: EtcdServers) -> None:
    with clients_that_lose_answers() as clients:
        store = EtcdStore(servers.endpoints, "lost answers")
        assert [store.add("n", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
        for part in "abc":
            store.append("text", part)
        assert store.get("text") == b"abc"
        assert store.compare_set("claim", "", "mine") == b"mine"
        assert store.compare_set("claim", "", "theirs") == b"mine"
        store.set("key", "value")
        assert store.get("key") == b"value"
    assert clients[0].transaction.call_count > 15


def test_every_call_has_a_deadline_and_password_and_tls_are_passed_on() -> None:
    with etcd_servers(1, tls=True) as cluster:
        for command in ("user add root:secret", "user grant-role root root", "auth enable"):
            cluster.control(*command.split())
        options: dict[str, Any] = {"timeout": timedelta(seconds=20), "ca_cert": cluster.certificate}
        make = partial(EtcdStore, cluster.endpoints, "secret", **options)
        store = make(user="root", password="secret")
        store.set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(DistError, match="invalid user ID or password"):
            make(user="root", password="wrong").get("key")
        with pytest.raises(DistError, match="user name is empty"):
            make().get("key")

        began = time.monotonic()
        store.set_timeout(timedelta(seconds=1))
        with pytest.raises(DistError, match=r"no values of all of .*missing"):
            store.get("missing")
        cluster.kill(0)
        for call in (partial(store.get, "key"), partial(store.add, "n", 1)):
            with pytest.raises(DistError, match=rf"{cluster.endpoints}: no majority .*refused"):
                call()
        assert time.monotonic() - began < 3 + SLACK
        # The tokens end with the server that gave them.
        cluster.start(0)
        store.set_timeout(timedelta(seconds=30))
        assert store.get("key") == b"value"


@mock.patch.multiple(nodes, PAUSE=0.1, SILENT_SECONDS=1.0)
def test_ranks_and_launchers_go_on_once_the_servers_are_back_with_their_data() -> None:
    said = list[str]()
    with etcd_servers(1) as cluster:
        store = EtcdStore(cluster.endpoints, "away", timedelta(seconds=1))
        heartbeat = Heartbeat(BoundedStore(store, timedelta(seconds=60)), 0, stale_after=1.0)
        heartbeat.start(life=1)
        launcher = nodes.Nodes(lambda: store, 0, 1, None, said.append)
        part = PrefixStore("decent_optim_wrapper/launcher", store)
        part.wait(["node/0"], timedelta(seconds=30))
        cluster.kill(0)
        # Longer than the store's timeout, after which each call has failed.
        time.sleep(4)
        store.set_timeout(timedelta(seconds=30))
        cluster.start(0)
        for where, key in ((store, "heartbeat/0"), (part, "node/0")):
            before, deadline = where.get(key), time.monotonic() + 30
            while where.get(key) == before:
                assert time.monotonic() < deadline, f"{key} has ended"
                time.sleep(0.05)
        heartbeat.close()
        launcher.close(lambda: True)
    assert len(said) == 1
    assert "the store has not answered for 1 s: etcd at " in said[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"endpoints": "host"}, "expected host:port, .*, got 'host'"),
        ({"prefix": ""}, "expected a prefix"),
        ({"user": "me"}, "both user and password"),
        ({"ca_cert": "a", "client_key": "b"}, "both client_cert and client_key"),
        ({"client_cert": "a", "client_key": "b"}, "need ca_cert"),
        ({"user": "me", "password": "secret"}, "need ca_cert"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EtcdStore(**{"endpoints": "host:2379", "prefix": "run", **arguments})


def train_and_fork(endpoints: str, rank: int) -> NoReturn:
    """What a rank does with it: a process group, a child that reads, and a thread that beats."""
    begin_process()
    store, timeout = EtcdStore(endpoints, "group"), timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    dist.barrier()
    beats, stop = f"beats {rank}", threading.Event()
    beating = in_background(partial(beat_until, store, beats, stop))
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        store.set(f"child {rank}", str(store.add(beats, 0)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    before = store.add(beats, 0)
    while store.add(beats, 0) <= before:
        time.sleep(0.01)
    assert store.check([f"child {rank}"])
    stop.set()
    beating.result()
    dist.barrier()
    dist.destroy_process_group()
    end_interpreter()


def beat_until(store: Store, key: str, stop: threading.Event) -> None:
    while not stop.wait(0.01):
        store.add(key, 1)


def test_ranks_start_a_group_over_it_and_fork_and_end(servers: EtcdServers) -> None:
    ranks = [start_process(train_and_fork, servers.endpoints, rank) for rank in range(2)]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]


# What the table of the guide says of a fault.
GOES_ON, RAISES, NOTHING = "goes on", "`PeerError`", "none"
FAULTS = (
    "a rank other than 0 dies",
    "rank 0 dies",
    "a process that serves the store dies, then a rank",
    "most of the processes that serve the store die, then a rank",
)
TIMEOUT = 8.0


def store_in_rank_0(port: int, rank: int) -> Store:
    timeout = timedelta(seconds=60)
    return TCPStore("127.0.0.1", port, None, rank == 0, timeout, wait_for_workers=False)


def in_a_file(path: str, rank: int) -> Store:
    return FileStore(path, -1)


def in_etcd(endpoints: str, rank: int) -> Store:
    return EtcdStore(endpoints, "table", timedelta(seconds=TIMEOUT))


Stores = tuple[Callable[[int], Store], tuple[Callable[[], object], ...]]


@contextmanager
def stores_of(kind: str, folder: Path) -> Iterator[Stores]:
    """Makes a rank's store; and calls that each end a process that serves it, apart from ranks."""
    match kind:
        case "`TCPStore` in rank 0":
            yield partial(store_in_rank_0, free_ports(1)[0]), ()
        case "`FileStore` on a shared file system":
            yield partial(in_a_file, str(folder / "store")), ()
        case "`TCPStore` in a launcher":
            with StoreProcess() as server:
                yield server.connect, (server.kill,)
        case _:
            with etcd_servers(3) as cluster:
                # The second one hangs: it keeps its connections, and answers nobody.
                ends = (
                    lambda: cluster.kill(cluster.leader()),
                    lambda: min(cluster.processes.items())[1].send_signal(signal.SIGSTOP),
                )
                yield partial(in_etcd, cluster.endpoints), ends


KINDS = (
    *("`TCPStore` in rank 0", "`TCPStore` in a launcher", "`FileStore` on a shared file system"),
    "`EtcdStore` on three servers",
)


def cells(name: str) -> tuple[str, ...]:
    """The column of the guide's table for a store."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GUIDE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    head = next(row for row in rows if name in row)
    return tuple(next(row[head.index(name)] for row in rows if row[0] == each) for each in FAULTS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_store_survives_what_the_table_of_the_guide_says(kind: str, tmp_path: Path) -> None:
    """One fault after the other, up to the one that ends the run: then nobody goes on."""
    outcomes = [outcome for outcome in cells(kind) if outcome != NOTHING]
    assert set(outcomes) <= {GOES_ON, RAISES}
    assert len(outcomes) > 1
    alive = everyone = tuple(range(4))
    options: dict[str, Any] = {"topology": "ring", "timeout": TIMEOUT, "within": SLACK}
    with (
        stores_of(kind, tmp_path) as (make, ends),
        RestartableProcesses(len(everyone), train_or_tell, make_store=make, **options) as processes,
    ):
        processes.all_reach("round 3")
        faults = zip((None, None, *ends), outcomes, strict=True)
        for victim, (act, outcome) in zip((3, 0, 1, 2), faults, strict=False):
            if act:
                act()
            processes.kill(victim)
            alive = tuple(rank for rank in alive if rank != victim)
            if outcome == GOES_ON:
                for rank in alive:
                    processes.wait_for_members(rank, alive)
                if victim == 3:
                    # It may come back.
                    processes.start(victim)
                    alive = everyone
                    processes.wait_for_members(victim, alive)
                continue
            for rank in alive:
                failure: Failure = processes.wait_for(rank, "result")
                assert isinstance(failure, Failure), f"rank {rank} went on: {failure}"
                assert failure.kind == "PeerError"
                assert "the store in which the ranks agree does not answer" in failure.text
                assert failure.seconds < TIMEOUT + SLACK
                # Otherwise they would go on trying to reach the store.
                assert failure.threads_ended
                processes.workers[rank].join(30)
                assert processes.workers[rank].exitcode == 0
            return
        processes.end(*alive)
