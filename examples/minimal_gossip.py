"""The idea in one class: each rank steps alone, and then averages its parameters with one other.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/minimal_gossip.py

With x the parameters of a rank, u its local update, and y and v the same of its partner, a step is

    x <- ((x - u) + (y - v)) / 2.

The partner in round t is the rank whose number differs in bit t mod log2 n, so that log2 n rounds
without updates give the exact average. The library does the same, bit for bit, with
`DecentOptimWrapper(optimizer, topology="one-peer-exp", overlap=False)`. What it adds is everything
else: it sends while the training computes, in buckets, in fewer bits, on any topology and device,
and notices ranks that fail or are out of step. It takes some seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class MinimalGossip:
    """Steps an optimizer of float32 parameters, and gossips after each step.

    Args:
        optimizer: the local optimizer; the number of ranks is a power of two.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if self._size & (self._size - 1):
            raise ValueError(f"pairs need 2, 4, 8, ... ranks, got {self._size}")
        self._round = 0
        # All ranks start from the same model.
        for param in self._params:
            dist.broadcast(param.data, 0)

    @torch.no_grad()
    def step(self) -> None:
        """Make the local update, and average with one other rank; collective."""
        self._optimizer.step()
        hops = self._size.bit_length() - 1
        if hops:
            theirs = self._exchange(self._rank ^ (1 << self._round % hops))
            for param, value in zip(self._params, theirs, strict=True):
                param.lerp_(value, 0.5)
        self._round += 1

    def _exchange(self, peer: int) -> list[Tensor]:
        """Swap parameters with another rank, as one message."""
        sent = torch.cat([param.flatten() for param in self._params])
        received = torch.empty_like(sent)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()
        parts = received.split([param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params, strict=True)]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average of all ranks in place, for an evaluation; collective."""
        own = [param.detach().clone() for param in self._params]
        for param in self._params:
            dist.all_reduce(param.data, dist.ReduceOp.SUM)
            param.data.div_(self._size)
        yield
        for param, value in zip(self._params, own, strict=True):
            param.data.copy_(value)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = MinimalGossip(optimizer)
    for _ in range(100):
        batch = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        (model(batch).squeeze() - batch.sum(dim=1)).square().mean().backward()
        gossip.step()
    with gossip.averaged():
        error = (model.weight - 1).abs().max().item()
    if rank == 0:
        print(f"largest error of a weight of the averaged model: {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
