"""Seconds until the ranks that are left have a group: a new one, and gloo's own reconfiguration.

    python examples/benchmark/regroup.py --ranks 4 8

The ranks are processes on this machine. By turns the last rank stays away and comes back. Each time
the members exchange what they need through a store, connect, and sum a number. With
`elastic` the library makes a new group; torch 2.15 can also reconfigure an old one
(`enable_reconfigure`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import netlab
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions
from torch.distributed import PrefixStore, TCPStore

from decent_optim_wrapper.comm.process_groups import connect_gloo

TIMEOUT = timedelta(seconds=20)
# Makes a group of the first ranks, for the regrouping of this number.
Regroup = Callable[[int, int], Any]


def new_groups(store: Any, rank: int) -> Regroup:
    """As the library does."""
    return lambda number, size: connect_gloo(PrefixStore(f"{number}", store), rank, size, TIMEOUT)


def reconfigured(store: Any, rank: int) -> Regroup:
    """One group of gloo's, reconfigured each time."""
    options = dist.ProcessGroupGloo._Options()
    host = os.environ["MASTER_ADDR"]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout, options.enable_reconfigure = TIMEOUT, True
    group = dist.ProcessGroupGloo(store, rank, int(os.environ["WORLD_SIZE"]), options)

    def regroup(number: int, size: int) -> Any:
        part = PrefixStore(f"{number}", store)
        part.set(f"{rank}", group.get_reconfigure_handle())
        agreed = ReconfigureOptions()
        agreed.uuid, agreed.timeout = number + 1, TIMEOUT
        agreed.handles = [part.get(f"{each}").decode() for each in range(size)]
        group.reconfigure(agreed).wait()
        return group

    return regroup


WAYS = {"new": new_groups, "reconfigured": reconfigured}


def regroup(way: str, times: int) -> list[float]:
    """Run in each rank: the seconds of each regrouping, without the first one."""
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = TCPStore(*address, is_master=rank == 0, timeout=2 * TIMEOUT)
    make, seconds = WAYS[way](PrefixStore(way, store), rank), []
    for number in range(times + 1):
        # The last rank stays away each second time.
        members = size - number % 2
        store.add(f"ready {number}", 1)
        while store.add(f"ready {number}", 0) < size:
            time.sleep(0.001)
        start = time.monotonic()
        if rank < members:
            total = torch.ones(1)
            make(number, members).allreduce([total]).wait()
            if total.item() != members:
                raise RuntimeError(f"expected a sum over {members} members, got {total.item()}")
            seconds.append(time.monotonic() - start)
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < size:
        time.sleep(0.01)
    return seconds[1:]


def main() -> None:
    """Print a row for each number of ranks and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    print("| ranks | group | median, ms | shortest | longest |\n|---|---|---|---|---|")
    with netlab.lab(1, "") as where:
        for ranks in args.ranks:
            for way in WAYS:
                first, *_ = netlab.run(where, ranks, regroup, way, args.times, timeout=120)
                cells = [f"{1000 * f(first):.1f}" for f in (statistics.median, min, max)]
                print(f"| {ranks} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
