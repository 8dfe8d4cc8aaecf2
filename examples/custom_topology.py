"""A topology of your own: look at it, and train on it.

python examples/custom_topology.py
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/custom_topology.py

It takes some seconds.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from mixing import consensus_rate, steady_error

from decent_optim_wrapper import DecentOptimWrapper, Topology, TopologyFactory
from decent_optim_wrapper.utils import init_distributed


class Star(Topology):
    """Rank 0 mixes with one other rank in each round, in turn; all others are idle.

    `phases` returns the phases of one period. A phase is a list of groups. A group is a list of
    ranks, which mix as their mean, or a `Group(ranks, self_weight)`. Ranks in no group of a phase
    are idle in it.
    """

    def phases(self) -> list[list[list[int]]]:
        return [[[0, leaf]] for leaf in range(1, self.world_size)]


def main() -> None:
    TopologyFactory.add_topology("star", Star)
    if "RANK" not in os.environ:
        for name in ("star", "ring"):
            topology = TopologyFactory.create(name, 4)
            rate, error = consensus_rate(topology), steady_error(topology)
            print(f"{name}: consensus rate {rate:.3f}, steady error {error:.3f}")
        return
    rank, _, _, device, _ = init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(base, topology="star")
    data = torch.Generator().manual_seed(rank)
    for _ in range(100):
        batch = torch.randn(16, 8, generator=data).to(device)
        optimizer.zero_grad()
        (model(batch).squeeze() - batch.sum(dim=1)).square().mean().backward()
        optimizer.step()
    distance = optimizer.consensus_distance()
    if rank == 0:
        error = (model.weight - 1).abs().max().item()
        print(f"largest error of a weight {error:.4f}, consensus distance {distance:.4f}")
    optimizer.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
