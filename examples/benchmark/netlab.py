"""A network lab on one machine: ranks in network namespaces behind rate-limited links.

Needs root and iproute2 (`ip`, `tc`). Without them, ranks run over the plain loopback device.
Torch is imported once, by the parent; ranks are forked from it, unless they use a GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.77.0"
# Through it go the packets that a lossy link may lose.
LOSSY_DEVICE = "lossy"


class Lab(NamedTuple):
    """The network of the ranks.

    Args:
        hosts: the namespaces, one for each host; empty for the loopback device.
        master: the address of rank 0.
        interface: the network device that gloo uses.
    """

    hosts: tuple[str, ...]
    master: str
    interface: str

    def with_connections(self, number: int) -> Lab:
        """The same with as many connections for each pair of ranks."""
        return self._replace(interface=",".join([self.interface] * number))


def available() -> bool:
    """Return whether this process can create network namespaces."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


def possible(rate: str) -> str:
    """The rate, or none where links cannot be limited."""
    if rate and not available():
        print("no root or no iproute2: running over plain loopback, without a rate limit")
        return ""
    return rate


@contextmanager
def lab(hosts: int, rate: str) -> Iterator[Lab]:
    """Set up `hosts` namespaces on one bridge, each behind a link of `rate` in both directions.

    Args:
        hosts: number of namespaces.
        rate: in the notation of `tc`, such as 400mbit; empty for the loopback device and no limit.
    """
    if not rate:
        yield Lab((), "127.0.0.1", "lo")
        return
    tag = f"lab{os.getpid() % 10000}"
    try:
        _up(tag, hosts, rate)
        yield Lab(tuple(f"{tag}n{i}" for i in range(hosts)), f"{_SUBNET}.1", "eth0")
    finally:
        _down(tag, hosts)


def run(
    where: Lab,
    world_size: int,
    main: Callable[..., Any],
    *args: Any,
    timeout: float,
    method: Literal["fork", "spawn"] = "fork",
) -> list[Any]:
    """Start the ranks, run `main` in each and return the results by rank.

    Args:
        where: the lab; rank r runs on host r.
        world_size: number of ranks.
        main: function to run; RANK, WORLD_SIZE, MASTER_ADDR and so on are in its environment.
        *args: arguments of `main`.
        timeout: seconds after which all ranks are killed.
        method: how the ranks start; those that use a GPU cannot be forked.

    Raises:
        RuntimeError: a rank failed or did not finish in time.
    """
    start: Any = get_context(method)
    port = _free_port()
    pipes, workers = [], []
    for rank in range(world_size):
        receiver, sender = start.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": where.master,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": where.interface,
            "OMP_NUM_THREADS": "1",
        }
        host = where.hosts[rank] if where.hosts else None
        worker = start.Process(target=_rank, args=(host, environment, sender, main, args))
        worker.start()
        pipes.append(receiver)
        workers.append(worker)
    try:
        deadline = time.monotonic() + timeout
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} did not finish within {timeout} s")
            value, error = pipe.recv()
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            results.append(value)
        return results
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _rank(
    host: str | None, environment: dict[str, str], out: Connection, main: Any, args: Any
) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if host is not None:
            enter(host)
        out.send((main(*args), None))
    except BaseException:
        out.send((None, traceback.format_exc()))
    # No interpreter shutdown: the measurement is over and other ranks may still run.
    sys.stdout.flush()
    time.sleep(0.5)
    os._exit(0)


def enter(host: str) -> None:
    """Move the calling thread, and the threads that it starts later, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{host}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    os.close(descriptor)


def address(host: int) -> str:
    """The address of the host with this number."""
    return f"{_SUBNET}.{host + 1}"


def retransmitted() -> int:
    """How many TCP segments the calling thread's host has sent again so far."""
    names, numbers = (
        line.split()
        for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(numbers[names.index("RetransSegs")])


def cut(where: Lab, host: int, other: int | None = None) -> None:
    """Lose all that a host sends to another host, or to all hosts.

    No error is reported: the packets go to a hardware address that does not exist.
    """
    space = where.hosts[host]
    for i in range(len(where.hosts)) if other is None else (other,):
        _sh(f"ip -n {space} neigh replace {address(i)} lladdr 02:00:00:00:ff:ff dev eth0")


def mend(where: Lab, host: int) -> None:
    """Undo `cut` of what a host sends: it asks for the hardware addresses of the others again."""
    _sh(f"ip -n {where.hosts[host]} neigh flush dev eth0 nud permanent")


def slow_down(where: Lab, host: int, rate: str) -> None:
    """Limit the rate at which a host sends, in the notation of `tc`."""
    bucket = f"root tbf rate {rate} burst 2kb latency 2s"
    _sh(f"tc -n {where.hosts[host]} qdisc replace dev eth0 {bucket}")


def lose(where: Lab, host: int, loss: float, delay: float = 0.0, seed: int = 0) -> Any:
    """Lose and delay what a host sends, until the returned process is killed.

    Args:
        where: the lab.
        host: the host.
        loss: share of the packets that are lost, from 0 to 1.
        delay: seconds by which the others come later.
        seed: of the losses.

    Raises:
        RuntimeError: this machine cannot make TUN devices.
    """
    script = Path(__file__).with_name("lossy_link.py")
    command = f"ip netns exec {where.hosts[host]} {sys.executable} {script} --loss {loss}"
    command += f" --delay {delay} --seed {seed} --own {address(host)} --to"
    others = [address(other) for other in range(len(where.hosts)) if other != host]
    process = subprocess.Popen([*command.split(), *others], stdout=subprocess.PIPE, text=True)
    if process.stdout is None or process.stdout.readline() != "ready\n":
        raise RuntimeError("expected a TUN device for a lossy link, got none: see /dev/net/tun")
    return process


@contextmanager
def lossy(where: Lab, loss: float, delay: float, seed: int = 0) -> Iterator[None]:
    """Lose and delay what all hosts send during the body, as `lose` does; TCP is cubic.

    Without losses and delays nothing changes: a relay would be slower than a fast link.
    """
    with ExitStack() as relays:
        for i, host in enumerate(where.hosts if loss or delay else ()):
            relays.callback(lose(where, i, loss, delay, seed + i).kill)
            # Linux's usual congestion control, whatever this machine uses.
            for other in {*range(len(where.hosts))} - {i}:
                route = f"{address(other)}/32 dev {LOSSY_DEVICE} src {address(i)}"
                _sh(f"ip -n {host} route change {route} congctl cubic")
        yield


def _up(tag: str, hosts: int, rate: str) -> None:
    bucket = f"root tbf rate {rate} burst 256kb latency 200ms"
    _sh(f"ip link add {tag}br type bridge")
    _sh(f"ip link set {tag}br up")
    for i in range(hosts):
        space = f"{tag}n{i}"
        port = _port(space)
        _sh(f"ip netns add {space}")
        _sh(f"ip link add {port} type veth peer name eth0 netns {space}")
        _sh(f"ip link set {port} master {tag}br up")
        _sh(f"ip -n {space} addr add {address(i)}/24 dev eth0")
        _sh(f"ip -n {space} link set eth0 up")
        _sh(f"ip -n {space} link set lo up")
        _sh(f"tc qdisc add dev {port} {bucket}")
        _sh(f"tc -n {space} qdisc add dev eth0 {bucket}")


def _down(tag: str, hosts: int) -> None:
    for i in range(hosts):
        space = f"{tag}n{i}"
        _sh(f"ip netns del {space}", check=False)
        _sh(f"ip link del {_port(space)}", check=False)
    _sh(f"ip link del {tag}br", check=False)


def _port(space: str) -> str:
    """The bridge's end of a host's link."""
    return space.replace("n", "h")


def _sh(command: str, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def _free_port() -> int:
    """A port below those that the system gives to outgoing connections, which might take it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
