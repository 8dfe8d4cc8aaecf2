"""Train the digit classifier of train_digits.py while ranks are killed, and go on without them.

    python examples/survive_digits.py --victims 0 2

The script starts the ranks itself. It keeps the store in which they agree on who is left, so the
store outlives all ranks, including rank 0. It kills the first victim (SIGKILL) after 30 % of the
steps and the second one after 60 %. With `--rejoin` it starts the first one again at once. The
remaining ranks share the scans of the dead ones. At the end the script prints the accuracy of the
averaged model. It took 53 s on 2 busy cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from train_digits import Data, accuracy, batches, build_model, load_data

from decent_optim_wrapper import DecentOptimWrapper, Elastic, TopologyFactory

HOST = "127.0.0.1"
KILL_AT = (0.3, 0.6)
CPU = torch.device("cpu")
# All ranks share one import of torch, so that a restarted rank is back soon.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "sklearn.datasets", "decent_optim_wrapper"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--victims", type=int, nargs="*", default=[0, 2], help="at most two ranks")
    parser.add_argument("--rejoin", action="store_true", help="start the first victim again")
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="complete")
    parser.add_argument("--epochs", type=int, default=20, help="their length is that of all ranks")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="at the first step; falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Shard:
    """This rank's share of the training scans, which changes whenever the members change.

    Args:
        rank: number of the rank at the start.
        args: arguments of the command line.
    """

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self._rank = rank
        self._batch_size = args.batch_size
        self._generator = torch.Generator().manual_seed(1000 * args.seed + rank)

    def deal(self, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        """Take the share of this rank among the members `new`."""
        self._data, self.test = load_data(new.index(self._rank), len(new), CPU, by_digit=False)
        self.batches = self._endless_batches()

    def _endless_batches(self) -> Iterator[Data]:
        while True:
            yield from batches(self._data, self._batch_size, self._generator)


def train(rank: int, port: int, args: argparse.Namespace) -> None:
    """What every rank runs, including a restarted one."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    store = dist.TCPStore(HOST, port, is_master=False)
    model = build_model()
    shard = Shard(rank, args)
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        rank,
        args.ranks,
        topology=args.topology,
        timeout=timedelta(seconds=30),
        elastic=Elastic(store=store, on_membership_change=shard.deal),
    )
    shard.deal((), optimizer.members)
    print(f"rank {rank} starts at step {optimizer.round}", flush=True)
    steps = count_steps(args)
    while optimizer.round < steps:
        # By the round, which a restarted rank shares with the others.
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - optimizer.round / steps)
        batch = next(shard.batches)
        optimizer.zero_grad()
        cross_entropy(model(batch.images), batch.labels).backward()
        optimizer.step()
        store.set("step", str(optimizer.round))
        if rank == optimizer.members[0] and optimizer.round % max(1, steps // 20) == 0:
            print(f"step {optimizer.round} of {steps}: ranks {optimizer.members}", flush=True)
    with optimizer.averaged():
        final = accuracy(model, shard.test)
    if rank == optimizer.members[0]:
        print(f"ranks {optimizer.members} are left: averaged model {final:.2%}", flush=True)


def count_steps(args: argparse.Namespace) -> int:
    """The number of steps of the given epochs if all ranks are alive."""
    shard, _ = load_data(0, args.ranks, CPU, by_digit=False)
    return int(args.epochs * -(-len(shard.labels) // args.batch_size))


def start(rank: int, port: int, args: argparse.Namespace) -> BaseProcess:
    process = PROCESSES.Process(target=train, args=(rank, port, args), daemon=True)
    process.start()
    return process


def wait_for_step(store: dist.TCPStore, step: int, workers: dict[int, BaseProcess]) -> None:
    """Wait until a rank has done that many steps."""
    while int(store.get("step")) < step:
        if not any(worker.is_alive() for worker in workers.values()):
            raise SystemExit(f"all ranks ended before step {step}; the first error is above")
        time.sleep(0.01)


def main() -> None:
    args = parse_arguments()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store.set("step", "0")
    workers = {rank: start(rank, store.port, args) for rank in range(args.ranks)}
    for victim, share in zip(args.victims, KILL_AT, strict=False):
        wait_for_step(store, int(share * count_steps(args)), workers)
        workers[victim].kill()
        workers[victim].join()
        print(f"rank {victim} was killed at step {int(store.get('step'))}", flush=True)
        if args.rejoin and victim == args.victims[0]:
            workers[victim] = start(victim, store.port, args)
    for worker in workers.values():
        worker.join()


if __name__ == "__main__":
    main()
