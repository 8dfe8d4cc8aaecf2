"""A secret of the run, and strangers in its store."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launched import Launched, ours
from loguru import logger
from problem import make_params
from ranks import launcher_store, run_processes
from restartable_processes import RestartableProcesses, StoreProcess, connect, train, wrap_elastic
from torch.distributed.distributed_c10d import PrefixStore, Store

from decent_optim_wrapper import DecentOptimWrapper, PeerError
from decent_optim_wrapper.comm.failure_reports import FailureReports, PeerLoss
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.secret import prove
from decent_optim_wrapper.comm.store import BoundedStore, part_of_run
from decent_optim_wrapper.elastic.launcher.program import Program
from decent_optim_wrapper.elastic.launcher.rank_process import RankProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# No text, and what a shell, a URL and a C string would not take.
SECRET, OTHER = b"odd \xff'$;\n&", b"another one"
LINE = "that no rank has written: passed over"
# What a run of four ranks writes, without their prefix.
KEYS = [
    f"{name}/{rank}" for rank in range(4) for name in ("heartbeat", "starts", "1/note", "2/note")
]
KEYS += [f"{epoch}/{name}" for epoch in (1, 2, 3) for name in ("members", "dead", "join_request")]
KEYS += ["epoch", "agreement", "1/error", "1/lost/0", "1/world/0/rank_0", "2/world/0/rank_1"]


def seal(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def with_secret(
    secret: bytes | None, folder: Path | None, make: Callable[[int], Any], rank: int
) -> Any:
    """Give this process a secret, and a log in a folder."""
    if secret is not None:
        os.environb[b"DECENT_SECRET"] = secret
    if folder is not None:
        logger.enable("decent_optim_wrapper")
        logger.add(folder / f"{rank}.{os.getpid()}.log", diagnose=True, backtrace=True)
    return make(rank)


def write_as_a_stranger(store: Any, prefixes: list[str], stop: Event) -> None:
    """Write garbage, lies and what was there before under every key, again and again."""
    seen: list[tuple[str, bytes]] = []
    while not stop.wait(0.02):
        for prefix in prefixes:
            for key in (f"decent_optim_wrapper/rendezvous 0{prefix}/{key}" for key in KEYS):
                for value in (
                    b"\xff\xfe",
                    b"[0]",
                    b"99 1 9 host:1 ",
                    json.dumps([9, False]).encode(),
                ):
                    store.set(key, value)
        # Where keys can be listed, also what is of this run: other keys with its values.
        if not seen and hasattr(store, "list_keys"):
            names = [each for each in store.list_keys() if each.endswith("/epoch")]
            seen = [(each, store.get(each)) for each in names if each.count(" ") == 2]
            for name, value in seen:
                store.set(f"{name.rpartition(' ')[0]}/epoch", value)


@pytest.fixture
def strange() -> Iterator[StoreProcess]:
    """A store to which a stranger writes, who also plays the nonces of other runs."""
    with StoreProcess() as served:
        store: Any = served.connect(0)
        stop = Event()
        name = "name decent_optim_wrapper/rendezvous 0 x"
        prefixes = ["", f" {secrets.token_hex(32)}", f" {seal(OTHER, name)}"]
        # A nonce of his own helps him as little.
        key = "decent_optim_wrapper/nonce"
        store.set(f"{key} {seal(SECRET, f'name {key} ')}", b"x\xff")
        thread = Thread(target=write_as_a_stranger, args=(store, prefixes, stop))
        thread.start()
        yield served
        stop.set()
        thread.join()


def lose_one_that_comes_back(
    make_store: Callable[[int], Any], meanwhile: Callable[[RestartableProcesses], object]
) -> None:
    """Train with four ranks, of which one is killed and started again, and nothing else happens."""
    options: Any = {"topology": "ring", "timeout": 20.0, "make_store": make_store}
    with RestartableProcesses(4, train, **options) as ranks:
        ranks.all_reach("joined")
        ranks.wait_for_round(0, 3)
        meanwhile(ranks)
        ranks.kill(1)
        ranks.wait_for_members(0, (0, 2, 3))
        ranks.start(1)
        ranks.wait_for_members(0, (0, 1, 2, 3))
        lives = ranks.end()
    assert [life.members for life in lives] == [(0, 1, 2, 3)] * 4
    assert lives[0].changes == [((0, 1, 2, 3), (0, 2, 3)), ((0, 2, 3), (0, 1, 2, 3))]
    assert lives[0].params != lives[0].start


def test_a_stranger_who_writes_all_the_time_changes_nothing(
    strange: StoreProcess, tmp_path: Path
) -> None:
    make = partial(with_secret, SECRET, tmp_path, strange.connect)
    lose_one_that_comes_back(make, lambda ranks: None)
    logs = [path.read_bytes() for path in tmp_path.glob("*.log")]
    assert len(logs) == 5
    assert not any(LINE.encode() in log for log in logs)
    assert not any(SECRET in log or repr(SECRET).encode()[2:-1] in log for log in logs)


# What ranks would believe, for a part of the store in which four ranks train.
LIES = {
    **{"1/dead": "[1, 2]", "2/join_request": "1", "heartbeat/2": "0 0 0 0 "},
    **{"2/members": "[0]", "3/members": "[0, 1, 2]", "2/note/1": "[0, true, 0, null]"},
    "1/failures/error": '{"ranks": [3], "error": "ValueError: a lie", "out_of_order": false}',
    **{"1/failures/lost/3": "[2]", "2/failures/lost/0": "[2]"},
}


def tell_lies(store: Any, how: str) -> None:
    """Write under the keys of a run that somebody has listed."""
    names = [each for each in store.list_keys() if "rendezvous 0 " in each]
    (place,) = {each.partition("/heartbeat/")[0] for each in names if "/heartbeat/" in each}
    copied = store.get(f"{place}/heartbeat/0")
    failures = f"failures {seal(SECRET, 'name failures ')}"
    for key, lie in LIES.items():
        group, _, name = key.rpartition("failures/")
        part = f"{place}/{group}{failures}" if group else place
        # As a process with another secret signs it.
        foreign = f"{seal(OTHER, str([part, name, lie]))} {lie}"
        lies = {"plain": lie, "garbage": b"\xff\xfe", "copied": copied, "signed": foreign}
        store.set(f"{part}/{name}", lies[how])


@pytest.mark.parametrize("how", ["plain", "garbage", "copied", "signed"])
def test_what_a_stranger_writes_under_listed_keys_is_passed_over(how: str, tmp_path: Path) -> None:
    with StoreProcess() as served:
        make = partial(with_secret, SECRET, tmp_path, served.connect)

        def lie(ranks: RestartableProcesses) -> None:
            tell_lies(served.connect(0), how)
            ranks.wait_for_round(0, 60)

        lose_one_that_comes_back(make, lie)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    # Once for each key that a process reads.
    assert any(f"'2/members' {LINE}" in log for log in logs)
    assert all(log.count(f"under {key!r} {LINE}") <= 1 for log in logs for key in LIES)


def start_with(rank: int, port: int, secrets: list[bytes | None], folder: Path) -> str:
    make = partial(connect, "127.0.0.1", port)
    store = with_secret(secrets[rank], folder, make, rank)
    with pytest.raises(PeerError) as caught:
        wrap_elastic(make_params(), rank, 2, store, [], timeout=3.0, topology="ring")
    return str(caught.value)


@pytest.mark.parametrize("other", [OTHER, None], ids=["another", "none"])
def test_ranks_with_different_secrets_say_so_at_the_timeout(
    other: bytes | None, tmp_path: Path
) -> None:
    store = launcher_store()
    texts = run_processes(2, start_with, store.port, [SECRET, other], tmp_path)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: waited 0:00:03 for the other ranks")
        assert "start every rank with the same store and DECENT_SECRET" in text


def test_runs_on_one_store_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store, bound = launcher_store(), timedelta(seconds=20)

    def part(store: Any, secret: bytes) -> BoundedStore:
        monkeypatch.setitem(os.environb, b"DECENT_SECRET", secret)
        return part_of_run(PrefixStore("all", store), "part", bound)

    part(store, SECRET).set("key", "mine")
    assert part(store, SECRET).get("key") == "mine"
    assert not part(store, OTHER).check(["key"])
    # A later run on the same port has another store, and so another nonce.
    later = launcher_store()
    part(later, SECRET).set("key", "later")
    (name,) = (key for key in later.list_keys() if key.endswith("/key"))
    assert name not in store.list_keys()
    monkeypatch.setitem(os.environb, b"DECENT_SECRET", b"")
    with pytest.raises(ValueError, match="got an empty one"):
        part_of_run(store, "part", bound)
    monkeypatch.delitem(os.environb, b"DECENT_SECRET")
    part_of_run(store, "part", bound).set("key", "open")
    assert store.get("part/key").endswith(b" open")


def test_a_value_of_a_stranger_is_missing_until_a_rank_writes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environb, b"DECENT_SECRET", SECRET)
    store: Any = launcher_store()
    part = part_of_run(store, "part", timedelta(seconds=20))
    part.set("mine", "a value")
    (place,) = (each.removesuffix("/mine") for each in store.list_keys() if "/mine" in each)
    for lie in (b"", b"\xff", b"a value", store.get(f"{place}/mine"), seal(OTHER, "x").encode()):
        store.set(f"{place}/key", lie)
        assert part.find("key") is None
        assert not part.check(["key", "mine"])
        assert part.look(["key", "mine"]) == ["", "a value"]
        # What a rank has seen a moment ago is not taken for nothing.
        for read in (part.get, lambda key: part.get_all(["mine", key])):
            with pytest.raises(dist.DistStoreError, match="a stranger has replaced a value"):
                read("key")
        # As if there were none: the first rank that writes one decides.
        assert part.compare_set("key", "", "first") == "first"
        assert part.compare_set("key", "", "second") == "first"
        assert part.compare_set("key", "first", "third") == "third"
        store.set(f"{place}/key", lie)
        assert part.compare_set("key", "third", "fourth") == "fourth"
        assert part.find("key") == "fourth"
    deleting = Forgetful(store)
    part = part_of_run(deleting, "part", timedelta(seconds=20))
    assert part.compare_set("key", "fourth", "fifth") == "fifth"


class Forgetful(Store):
    """Somebody replaces a value in a store before the first write, and then deletes it."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self._lies = store, [b"a lie"]

    def compare_set(self, key: str, expected: Any, desired: str) -> Any:
        if "nonce" in key or not self._lies:
            return self._store.compare_set(key, expected, desired)
        self._store.delete_key(key)
        return self._lies.pop()


def launch_with_a_secret(command: Any) -> int:
    os.environ["DECENT_SECRET"] = "open sesame"
    return ours(command)


# The ranks do without torch.
SCRIPT = """
lines = [p.read_bytes().decode(errors="replace") for p in Path("/proc").glob("[0-9]*/cmdline")]
tell("seen", json.dumps([lines, os.environ["DECENT_SECRET"]]))
sys.exit(3)
"""


def test_the_launcher_passes_the_secret_on_and_shows_it_to_nobody(tmp_path: Path) -> None:
    options = ["--max-restarts", "0"]
    with Launched(tmp_path, SCRIPT, *options, launcher=launch_with_a_secret) as launcher:
        lines, secret = json.loads(launcher.told("seen"))
        assert launcher.end() == 3
        printed = launcher.printed
    assert secret == "open sesame"
    assert "rank 0 ended" in printed
    assert any("script_0.py" in line for line in lines)
    assert not any(secret in each for each in (printed, *lines))


def test_no_stranger_says_that_a_rank_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without elastic, on the store of a process group."""
    store: Any = launcher_store()
    FailureReports(store.clone(), 1).note_error(ValueError("a lie"))
    FailureReports(store.clone(), 1).note([])
    assert FailureReports(store.clone(), 0).find([1], silent=False).error == "ValueError: a lie"
    monkeypatch.setitem(os.environb, b"DECENT_SECRET", SECRET)
    here, there = (FailureReports(store.clone(), rank) for rank in range(2))
    assert here.find([1], silent=False) == PeerLoss([1])
    there.note_error(ValueError("no data"))
    assert here.find([1], silent=False).error == "ValueError: no data"
    # Nor one in another group, by what a rank has written in this one.
    (name,) = (key for key in store.list_keys() if re.fullmatch("failures .*/error", key))
    store.set(f"1/{name}", store.get(name))
    other = FailureReports(PrefixStore("1", store.clone()), 0, "1")
    assert other.find([1], silent=False) == PeerLoss([1])
    monkeypatch.setitem(os.environb, b"DECENT_SECRET", OTHER)
    assert FailureReports(store.clone(), 0).find([1], silent=False) == PeerLoss([1])


def test_a_password_of_the_store_is_in_no_repr(tmp_path: Path) -> None:
    program = Program(("script.py",), {"DECENT_STORE": "etcd://host:1/run?password=hidden"})
    rank = RankProcess(0, 0, program, tmp_path, False, mock.Mock())
    assert "script.py" in repr(rank)
    assert "hidden" not in repr(rank)


def test_nothing_that_uses_the_secret_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"DECENT_SECRET", SECRET)
    part = part_of_run(launcher_store(), "part", timedelta(seconds=5))
    part.set("key", "value")
    assert part.find("key") == "value"
    assert SECRET not in repr(vars(part)).encode()


def enter_a_group(rank: int, port: int, secrets: list[bytes | None]) -> str:
    """Enter a group whose keys a stranger has listed."""
    store = with_secret(secrets[rank], None, partial(connect, "127.0.0.1", port), rank)
    try:
        connect_gloo(store, rank, len(secrets), timedelta(seconds=20))
    except RuntimeError as error:
        return str(error)
    return ""


def show_something_else_to_rank_0(rank: int, port: int) -> str:
    """Enter a group of four with three connections for each pair; rank 2 knows the secret in part.

    Ranks 0 and 2 are no neighbours in a ring.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo,lo"

    def mac(text: str) -> str:
        return "0" * 64 if text.startswith("2 0 1 ") else seal(SECRET, text)

    with mock.patch("decent_optim_wrapper.comm.secret._mac", mac) if rank == 2 else nullcontext():
        return enter_a_group(rank, port, [SECRET] * 4)


def test_each_connection_is_challenged() -> None:
    store = launcher_store()
    said = run_processes(4, show_something_else_to_rank_0, store.port)
    assert said == ["member 2 has another DECENT_SECRET, or has none", "", "", ""]


@pytest.mark.parametrize("theirs", [SECRET, OTHER, None], ids=["same", "another", "none"])
def test_the_members_of_a_group_show_each_other_that_they_have_the_secret(
    theirs: bytes | None,
) -> None:
    store = launcher_store()
    said = run_processes(3, enter_a_group, store.port, [SECRET, SECRET, theirs])
    names = ["", "", ""] if theirs == SECRET else ["member 2", "member 2", "member 0"]
    assert [each.partition(" has another DECENT_SECRET")[0] for each in said] == names


def leave_while_others_connect(rank: int, port: int) -> str:
    """Rank 1 leaves before rank 0 sends anything, and rank 2 has sent everything."""
    if rank == 1:
        store = connect("127.0.0.1", port, rank)
        group = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=20))
        time.sleep(1)
        del group
        return "left"

    def late(group: Any, timeout: timedelta) -> None:
        time.sleep(2)
        prove(group, timeout)

    with mock.patch("decent_optim_wrapper.comm.process_groups.prove", prove if rank else late):
        return enter_a_group(rank, port, [None] * 3)


def test_a_member_that_leaves_while_others_connect_ends_none_of_them() -> None:
    store = launcher_store()
    first, left, last = run_processes(3, leave_while_others_connect, store.port)
    assert left == "left"
    assert first
    assert last


def wrap_in_a_group(rank: int, port: int, secrets: list[bytes | None]) -> str:
    """Wrap an optimizer over a process group, without elastic."""
    store = with_secret(secrets[rank], None, partial(connect, "127.0.0.1", port), rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(secrets))
    params = make_params()
    try:
        DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), topology="greedy")
    except PeerError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_a_rank_without_the_secret_trains_with_nobody_over_a_process_group_either() -> None:
    for theirs in (SECRET, OTHER):
        store = launcher_store()
        for text in run_processes(3, wrap_in_a_group, store.port, [SECRET, SECRET, theirs]):
            assert ("has another DECENT_SECRET, or has none" in text) == (theirs == OTHER)
