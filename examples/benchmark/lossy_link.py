"""Lose and delay what this host sends to others, until the process ends.

    ip netns exec HOST python lossy_link.py --loss 0.1 --delay 0.05 --own ADDRESS --to ADDRESS...

Packets to the given addresses go through a TUN device into this process, which sends those that it
does not lose. So it works with every kernel that has TUN, also without `netem`. Needs root.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import time
from collections import deque

_DEVICE, _LINK = "lossy", "eth0"
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_LONGEST_PACKET = 65_536


def open_device() -> int:
    """Make the device, and return its file."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", _DEVICE.encode(), _TUN | _NO_HEADER))
    return device


def lead_through(addresses: list[str], own: str) -> None:
    """Send packets to these addresses through the device."""
    commands = [f"link set {_DEVICE} up"]
    commands += [f"route add {each}/32 dev {_DEVICE} src {own}" for each in addresses]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def relay(device: int, loss: float, delay: float, seed: int) -> None:
    """Send what comes from the device, late or never."""
    draw, waiting = random.Random(seed), deque[tuple[float, bytes]]()
    link = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    # Of the routes it takes those of the link, not those of the device.
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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own", required=True, help="this host's address")
    parser.add_argument("--to", nargs="+", required=True, help="addresses of other hosts")
    args = parser.parse_args()
    device = open_device()
    lead_through(args.to, args.own)
    print("ready", flush=True)
    relay(device, args.loss, args.delay, args.seed)


if __name__ == "__main__":
    main()
