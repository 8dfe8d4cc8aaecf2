"""The interface that ranks use: what listens where, and a warning of public addresses."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import lossy_link
import netlab
import pytest
import step_time
import torch
import torch.distributed as dist
from launched import Launched, ours
from ranks import run_processes

from decent_optim_wrapper.cli import main
from decent_optim_wrapper.comm.interfaces import (
    address_of,
    public_addresses,
    serve,
    socket_variables,
)
from decent_optim_wrapper.elastic.stores.launched_store import find_launched_store
from decent_optim_wrapper.start.launch import find_launch, init_distributed, use_interface

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2"),
]
TABLES = ("tcp", "tcp6")
TUNNEL, PUBLIC = "10.66.0.1", "11.0.0.1"
# Private, carrier-grade, unique-local, as a second one of an interface, or with a label.
OTHERS = ("192.168.1.1/32", "100.64.0.1/32", "fd00::1/128", "172.16.0.1/32 label wide:1")


def enter_a_site() -> None:
    """Move this process to a network with a tunnel and an interface with a public address."""
    assert ctypes.CDLL(None).unshare(0x40000000) == 0
    commands = ["link set lo up"]
    for name, addresses in (("wg0", [f"{TUNNEL}/24"]), ("wide", [*OTHERS, f"{PUBLIC}/24"])):
        commands += [f"link add {name} type veth peer name {name}p", f"link set {name} up"]
        commands += [f"addr add {address} dev {name}" for address in addresses]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


# Ready at once, though nobody has looked for another host that has the address.
SIXTH = "fd00:6::1/64"


def listening(tables: str | None = None) -> set[tuple[str, int]]:
    """The addresses and ports on which processes of this network, or of such tables, listen."""
    if tables is None:
        tables = "".join(Path(f"/proc/thread-self/net/{name}").read_text() for name in TABLES)
    found = set()
    for line in tables.splitlines():
        _, local, _, state, *_ = line.split()
        digits, _, port = local.partition(":")
        if state == "0A":
            # Words in the byte order of the machine.
            words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
            packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
            found.add((str(ip_address(packed)), int(port, 16)))
    return found


# As many connections as two ranks on different nodes have, and four.
EIGHT, FOUR = ",".join(["wg0"] * 8), ",".join(["wg0"] * 4)


def launch_on_a_site(command: Sequence[str]) -> int:
    enter_a_site()
    return ours(command)


# The ranks do without torch.
SCRIPT = """
tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
tell("seen", json.dumps([tables, dict(os.environ)]))
"""


@pytest.mark.parametrize("interface", ["wg0", None])
def test_the_launchers_store_listens_on_the_interface_only(
    interface: str | None, tmp_path: Path
) -> None:
    options = ["--nnodes", "2", "--node-rank", "0", "--endpoint", f"{TUNNEL}:29500"]
    options += ["--interface", interface] if interface else []
    with Launched(tmp_path, SCRIPT, *options, launcher=launch_on_a_site) as launcher:
        tables, environ = json.loads(launcher.told("seen"))
    assert listening(tables) == {(TUNNEL if interface else "::", 29500)}
    assert environ.get("DECENT_INTERFACE") == interface
    assert environ.get("GLOO_SOCKET_IFNAME") == (EIGHT if interface else None)
    assert environ.get("NCCL_SOCKET_IFNAME") == (interface and f"={interface}")
    assert environ.get("GLOO_ENABLE_STORE_V2_API") == (interface and "1")


def average_on_an_interface(rank: int, host: str) -> tuple[set[str], float]:
    netlab.enter(host)
    # As under srun, rank 0 serves the store.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ.update(MASTER_ADDR=netlab.address(0), MASTER_PORT="29500")
    # As an argument, or as a variable.
    os.environ.update({"DECENT_INTERFACE": "eth0"} if rank else {})
    init_distributed("gloo", interface=None if rank else "eth0")
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    found = {address for address, _ in listening()}
    dist.barrier()
    dist.destroy_process_group()
    return found, total.item()


def test_the_store_of_rank_0_and_gloo_listen_on_the_interface_only() -> None:
    with netlab.lab(1, "400mbit") as where:
        for found, total in run_processes(2, average_on_an_interface, where.hosts[0]):
            assert found == {netlab.address(0)}
            assert total == 3.0


@pytest.mark.parametrize(
    ("ranks", "is_one_node", "count"),
    [(2, False, 8), (4, False, 4), (5, False, 3), (16, False, 1), (999, False, 1), (2, True, 1)],
)
def test_the_more_ranks_the_fewer_connections_between_two_of_them(
    ranks: int, is_one_node: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    names = ",".join(["lo"] * count)
    assert socket_variables("lo", ranks, is_one_node)["GLOO_SOCKET_IFNAME"] == names
    # A user who names it several times gets that many.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert socket_variables("lo", ranks, is_one_node)["GLOO_SOCKET_IFNAME"] == "lo,lo"


def reaches_itself(address: str) -> bool:
    """Whether this machine can connect to one of its own addresses."""
    with socket.create_server((address, 0), family=socket.AF_INET6) as listening:
        try:
            socket.create_connection(listening.getsockname()[:2], 1).close()
        except OSError:
            return False
        return True


def look_at_a_site(rank: int) -> list[str]:
    enter_a_site()
    assert address_of("wg0") == TUNNEL
    for gloo, serves, found in (("wg0", True, 1), ("lo,wide", False, 1), ("lo,wg0", False, 0)):
        os.environ["GLOO_SOCKET_IFNAME"] = gloo
        assert public_addresses(serves) == [PUBLIC] * found
    # Its peer has no address.
    with pytest.raises(ValueError, match="got 'wg0p'; set it up"):
        address_of("wg0p")
    # Without an address of IPv4, and with one of a link, which comes first.
    subprocess.run(["ip", "addr", "add", SIXTH, "dev", "wg0p", "nodad"], check=True)
    # Torch tries IPv6 only once, and the kernel may not have the route yet.
    while not reaches_itself("fd00:6::1"):
        time.sleep(0.01)
    six, served = serve("ignored", 0, "wg0p"), serve("ignored", 0, "wg0")
    # Where all ranks are here, they look for it on the loopback interface.
    local = serve("127.0.0.1", 0, "wg0")
    assert (six.host, served.host, local.host) == ("fd00:6::1", TUNNEL, "127.0.0.1")
    assert listening() == {(each.host, each.port) for each in (six, served, local)}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for place, interface in (("0401", ""), ("0402", "wg0"), ("0404", ""), ("1412", "")):
            launch = find_launch(dict(zip(names, place, strict=True)))
            os.environ.update(GLOO_SOCKET_IFNAME="wide", DECENT_INTERFACE="")
            assert (use_interface(launch, interface, serves=True) or "") == interface
            assert os.environ["GLOO_SOCKET_IFNAME"] == (FOUR if interface else "wide")
    # As under torchrun, without `init_distributed`.
    os.environ.update(GLOO_SOCKET_IFNAME="", DECENT_INTERFACE="wg0")
    variables = dict(zip(names, "0402", strict=True))
    variables |= {"MASTER_ADDR": TUNNEL, "MASTER_PORT": str(served.port)}
    assert find_launched_store({**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}, None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == FOUR
    return [str(each.message) for each in shown]


def test_one_rank_of_several_nodes_warns_of_a_public_address() -> None:
    ((text,),) = run_processes(1, look_at_a_site)
    assert text.startswith(f"rank 0: gloo or the store listens on {PUBLIC}, which the internet")
    assert TUNNEL not in text


def test_an_interface_that_is_not_there_is_an_error_that_names_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(5)")
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--interface", "wg7", str(tmp_path / "train.py")])
    assert "with an address (" in (printed := capsys.readouterr().err)
    assert "got 'wg7'" in printed
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    monkeypatch.setattr(os, "environ", {**os.environ, **place})
    with pytest.raises(ValueError, match="got 'wg7'"):
        init_distributed("gloo", interface="wg7")


@pytest.mark.timeout(180)
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs TUN devices")
def test_steps_are_timed_over_links_with_latency() -> None:
    options = "--sizes 0.25 --ranks 2 --methods DDP --steps 2 --warmup 1 --connections 2"
    command = [sys.executable, step_time.__file__, *options.split(), "--delay", "0.2"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    (milliseconds,) = re.findall(r"DDP, M = 0.25: (\d+) ms", printed)
    # 0.3 s of computing, and one way of the last bucket at least.
    assert int(milliseconds) > 500


@pytest.mark.timeout(180)
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs TUN devices")
def test_eight_connections_are_faster_than_one_over_a_long_link_that_loses_packets() -> None:
    options = "--loss 0.02 --delay 0.02 --mib 0.25 --rounds 2 --connections 1 8 --seed 580402"
    command = [sys.executable, lossy_link.__file__, *options.split()]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split("|")[1:3] for line in printed.splitlines()[2:]]
    seconds = {int(connections): float(each) for connections, each in rows}
    assert seconds[8] < 0.6 * seconds[1]
