"""Train the digit classifier of train_digits.py while ranks are killed, and go on without them.

    python -m decent_optim_wrapper run --nproc-per-node 4 examples/survive_digits.py

The first victim dies (SIGKILL) after 30 % of the steps and the second one after 60 %. The others
share the scans of the dead ones and train on. The launcher starts the dead ones again, and they
come back; with `--max-restarts 0` before the script they stay away. You can also kill a rank
yourself. At the end the first member prints the accuracy of the averaged model. It takes 32 s of
CPU time, of all ranks together, about a minute on 2 busy cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy
from train_digits import Data, accuracy, batches, build_model, load_data

from decent_optim_wrapper import DecentOptimWrapper, Elastic, TopologyFactory

KILL_AT = (0.3, 0.6)
CPU = torch.device("cpu")
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--victims", type=int, nargs="*", default=[0, 2], help="at most two ranks")
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="complete")
    parser.add_argument(
        "--epochs", type=int, default=20, help="each goes over the data of all ranks"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="at the first step; falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds per step in which a rank can come back"
    )
    return parser.parse_args()


class Shard:
    """This rank's share of the training scans, which changes whenever the members change.

    Args:
        args: arguments of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._batch_size = args.batch_size
        self._generator = torch.Generator().manual_seed(1000 * args.seed + RANK)

    def deal(self, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        """Take the share of this rank among the members `new`."""
        self._data, self.test = load_data(new.index(RANK), len(new), CPU, by_digit=False)
        self.batches = self._endless_batches()

    def _endless_batches(self) -> Iterator[Data]:
        while True:
            yield from batches(self._data, self._batch_size, self._generator)


def count_steps(args: argparse.Namespace) -> int:
    """The number of steps of the given epochs if all ranks are alive."""
    shard, _ = load_data(0, WORLD_SIZE, CPU, by_digit=False)
    return int(args.epochs * -(-len(shard.labels) // args.batch_size))


def die_if_victim(step: int, steps: int, args: argparse.Namespace) -> None:
    """Kill this process if its time has come, the first time that it has this rank."""
    fates = dict(zip(args.victims, KILL_AT, strict=False))
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first and RANK in fates and step == int(fates[RANK] * steps):
        print(f"rank {RANK} dies at step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = build_model()
    shard = Shard(args)
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        topology=args.topology,
        timeout=30,
        elastic=Elastic(on_membership_change=shard.deal),
    )
    shard.deal((), optimizer.members)
    print(f"rank {RANK} starts at step {optimizer.round}", flush=True)
    steps = count_steps(args)
    while optimizer.round < steps:
        # By the round, which a restarted rank shares with the others.
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - optimizer.round / steps)
        batch = next(shard.batches)
        optimizer.zero_grad()
        cross_entropy(model(batch.images), batch.labels).backward()
        optimizer.step()
        if optimizer.members[0] == RANK and optimizer.round % max(1, steps // 20) == 0:
            print(f"step {optimizer.round} of {steps}: ranks {optimizer.members}", flush=True)
        die_if_victim(optimizer.round, steps, args)
        time.sleep(args.pause)
    with optimizer.averaged():
        final = accuracy(model, shard.test)
    if optimizer.members[0] == RANK:
        print(f"ranks {optimizer.members} are left: averaged model {final:.2%}", flush=True)


if __name__ == "__main__":
    main()
