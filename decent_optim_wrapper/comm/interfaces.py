"""The network interface that the ranks use, and the addresses on which this machine listens."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

# The environment variables with the name of the interface, and with those of gloo.
VARIABLE, _GLOO = "DECENT_INTERFACE", "GLOO_SOCKET_IFNAME"
# A pair has this many connections divided by the number of ranks, and at least one.
_CONNECTIONS = 16
# SIOCGIFCONF fills a buffer with records of 40 bytes: the name from 0, the address from 20 on.
_LIST_ADDRESSES, _RECORD, _MOST_BYTES = 0x8912, "16s4x4s16x", 40 << 10


def _local_addresses() -> Iterator[tuple[str, IPv4Address | IPv6Address]]:
    """Each address of this machine with the name of its interface; those of IPv4 first."""
    found = array("B", bytes(_MOST_BYTES))
    request = struct.pack("iL", _MOST_BYTES, found.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        size, _ = struct.unpack("iL", fcntl.ioctl(asked, _LIST_ADDRESSES, request))
    for name, packed in struct.iter_unpack(_RECORD, found[:size]):
        # A further address may have a label, such as eth0:1.
        yield name.rstrip(b"\0").decode().partition(":")[0], IPv4Address(packed)
    # There is no such file if the kernel has no IPv6.
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, IPv6Address(bytes.fromhex(digits))


def address_of(interface: str) -> str:
    """The address of an interface on which the ranks listen.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    # A link-local address means nothing without its interface. Of several, the first.
    found = [(name, str(each)) for name, each in _local_addresses() if not each.is_link_local]
    if interface not in (known := dict(reversed(found))):
        raise ValueError(
            f"expected a network interface with an address ({', '.join(sorted(known))}), got "
            f"{interface!r}; set it up, or correct the name"
        )
    return known[interface]


def socket_variables(interface: str | None, ranks: int, is_one_node: bool) -> dict[str, str]:
    """The variables by which gloo and NCCL use an interface.

    Without one, only this machine reaches gloo if all ranks are on it and the user names none.

    Args:
        interface: its name; None for none.
        ranks: number of ranks.
        is_one_node: whether all of them are on this machine.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    told = os.environ.get(_GLOO, "")
    if not interface:
        return {} if told or not is_one_node else {_GLOO: "lo"}
    address_of(interface)
    # Named several times, gloo makes as many connections for each pair: a single one cannot fill a
    # long link that loses packets. With many ranks they would take long to connect, and use many
    # open files. All ranks must have the same number.
    count = 1 if is_one_node else max(1, _CONNECTIONS // ranks)
    gloo = told if {*told.split(",")} == {interface} else ",".join([interface] * count)
    # Without "=", NCCL uses each interface whose name begins so.
    names = {_GLOO: gloo, "NCCL_SOCKET_IFNAME": f"={interface}", VARIABLE: interface}
    # Gloo reads all addresses in one call of the store, in place of three for each rank.
    return {**names, "GLOO_ENABLE_STORE_V2_API": "1"}


def serve(host: str, port: int, interface: str | None = None) -> TCPStore:
    """Serve a store: on the host if that is this machine's own, or the address of an interface.

    Others listen on all addresses: the name of the host may stand for one that is not known here.

    Args:
        host: by which the ranks find it.
        port: the port; 0 takes a free one.
        interface: the interface; None for none.

    Raises:
        OSError: the port cannot be opened.
        ValueError: there is no such interface, or it has no address.
    """
    is_local = host == "localhost" or host.startswith("127.")
    address = host if is_local else address_of(interface) if interface else ""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, dualstack_ipv6=dual)
    # The store's own threads serve, and close the socket.
    port, descriptor = listening.getsockname()[1], listening.detach()
    here = address or "localhost"
    return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def public_addresses(serves: bool) -> list[str]:
    """The addresses on which gloo, or a store, listens here, and which the internet may reach.

    Args:
        serves: whether a store listens on all addresses.
    """
    names = os.environ.get(_GLOO, "").split(",")
    listening = [address for name, address in _local_addresses() if serves or name in names]
    # Without an interface, gloo takes the address of the host's name.
    if not names[0]:
        with suppress(OSError):
            listening.append(ip_address(socket.getaddrinfo(socket.gethostname(), 0)[0][4][0]))
    # Not loopback, private, carrier-grade, link-local or unique-local ones.
    return sorted({str(each) for each in listening if each.is_global})
