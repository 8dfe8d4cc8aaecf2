"""Rounds over a link that loses packets, with 1, 4 and 8 connections for each pair of ranks.

    python examples/benchmark/lossy_link.py

The ranks are in network namespaces (root, iproute2 and TUN devices needed). In each of them a
second process loses and delays what the host sends to others, until it ends:

    ip netns exec HOST python lossy_link.py --loss 0.1 --delay 0.05 --own ADDRESS --to ADDRESS...

Packets to the given addresses go through a TUN device into this process, which sends those that it
does not lose. So it works with every kernel that has TUN, also without `netem`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import time
from collections import deque

import netlab

_LINK = "eth0"
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_LONGEST_PACKET = 65_536


def open_device() -> int:
    """Make the device, and return its file."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(
        device, _SET_INTERFACE, struct.pack("16sH", netlab.LOSSY_DEVICE.encode(), _TUN | _NO_HEADER)
    )
    return device


def lead_through(addresses: list[str], own: str) -> None:
    """Send packets to these addresses through the device."""
    commands = [f"link set {netlab.LOSSY_DEVICE} up"]
    commands += [f"route add {each}/32 dev {netlab.LOSSY_DEVICE} src {own}" for each in addresses]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def relay(device: int, loss: float, delay: float, seed: int) -> None:
    """Send what comes from the device, late or never."""
    draw, waiting = random.Random(seed), deque[tuple[float, bytes]]()
    link = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    # By the link's routes, not the device's.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LINK.encode())
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([device], [], [], patience)[0]:
            packet = os.read(device, _LONGEST_PACKET)
            # The host looks for IPv6 routers, too.
            if packet[0] >> 4 == 4 and draw.random() >= loss:
                waiting.append((time.monotonic() + delay, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, packet = waiting.popleft()
            link.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))


def seconds_of_rounds(mib: float, buckets: int, rounds: int) -> tuple[list[float], int]:
    """The seconds of each round of this rank, and how many segments its host has sent again."""
    # Not by the process that loses packets.
    import torch
    import torch.distributed as dist

    from decent_optim_wrapper import DecentOptimWrapper

    dist.init_process_group("gloo")
    params = [torch.nn.Parameter(torch.ones(int(mib * 2**18) // buckets)) for _ in range(buckets)]
    base = torch.optim.SGD(params)
    optimizer = DecentOptimWrapper(base, overlap=False, bucket_cap_mb=mib / buckets)
    seconds = []
    for _ in range(rounds):
        start = time.monotonic()
        optimizer.step()
        seconds.append(time.monotonic() - start)
    return seconds, netlab.retransmitted()


def compare(args: argparse.Namespace) -> None:
    """Print a row for each number of connections."""
    cells = ("connections", "seconds of a round", "Mbit/s", "segments sent again")
    print(f"| {' | '.join(cells)} |\n" + "|---" * len(cells) + "|")
    sizes, sent_before = (args.mib, args.buckets, args.rounds), 0
    with (
        netlab.lab(2, args.rate) as where,
        netlab.lossy(where, args.loss, args.delay, args.seed),
    ):
        for count in args.connections:
            striped = where.with_connections(count)
            ranks = netlab.run(striped, 2, seconds_of_rounds, *sizes, timeout=args.timeout)
            seconds, sent_again = ranks[0]
            median = statistics.median(seconds)
            rate = args.mib * 8 * 2**20 / 1e6 / median
            resent, sent_before = sent_again - sent_before, sent_again
            print(f"| {count} | {median:.2f} | {rate:.1f} | {resent} |", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loss", type=float, default=0.01, help="share of the packets")
    parser.add_argument("--delay", type=float, default=0.025, help="seconds, in each direction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own", help="this host's address")
    parser.add_argument("--to", nargs="+", help="addresses of other hosts: lose what is sent there")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--rate", type=netlab.possible, default="100mbit", help="of the links")
    parser.add_argument("--mib", type=float, default=1.0, help="of the parameters")
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=300)
    args = parser.parse_args()
    if not args.to:
        compare(args)
        return
    device = open_device()
    lead_through(args.to, args.own)
    print("ready", flush=True)
    relay(device, args.loss, args.delay, args.seed)


if __name__ == "__main__":
    main()
