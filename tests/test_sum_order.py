"""Groups of more than two ranks sum first what the next forward pass needs first."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Training
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip import round as round_module
from decent_optim_wrapper.gossip import rounds as rounds_module
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.wire.sum_order import SumOrder

RANKS, STEPS = 3, 5


class WiderHeader(RoundHeader):
    """A header to which a field was added at the end."""

    def encode(self) -> Tensor:
        return torch.cat([super().encode(), torch.full([1], 100.0, dtype=torch.float64)])

    @classmethod
    def decode(cls, message: Tensor) -> RoundHeader:
        return super().decode(message[:-1])


@pytest.mark.parametrize("summed", [0, 1])
def test_the_order_of_the_sums_changes_no_bit(summed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the speed of this machine: each backward pass gives time for so many sums."""
    note, all_reduce = SumOrder.note, Transport.all_reduce
    # Of the sums, by rank.
    sizes = defaultdict[int, list[int]](list)

    def spy(self: Transport, tensor: Tensor, ranks: Any) -> Any:
        sizes[self.rank].append(tensor.numel())
        return all_reduce(self, tensor, ranks)

    monkeypatch.setattr(Transport, "all_reduce", spy)

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        training = Training(rank, group, "backward", topology="complete")
        training.train(range(STEPS))
        return training.end()

    def trained(count: int) -> tuple[list[Tensor], list[list[int]]]:
        monkeypatch.setattr(SumOrder, "note", lambda self, _: note(self, count))
        sizes.clear()
        rows = run_threads(RANKS, main)
        assert all(sizes[rank] == sizes[0] for rank in range(RANKS))
        per_round = len(sizes[0]) // STEPS
        return rows, [sizes[0][i * per_round : (i + 1) * per_round] for i in range(STEPS)]

    expected, given = trained(count=100)
    rows, orders = trained(summed)
    assert len(given[0]) > 2
    assert given == [given[0]] * STEPS
    expected_order = [*given[0][: summed + 1], *reversed(given[0][summed + 1 :])]
    # A rank tells the number in the round after, and the group goes by it from the next one on.
    assert orders == [given[0]] * 2 + [expected_order] * (STEPS - 2)
    assert orders != given
    assert all(map(torch.equal, rows, expected))
    for module in (round_module, rounds_module):
        monkeypatch.setattr(module, "RoundHeader", WiderHeader)
    assert trained(summed)[1] == orders, (
        "a header with one more field is read by position, not name"
    )
