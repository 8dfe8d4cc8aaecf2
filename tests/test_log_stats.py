"""What gossip costs is written to experiment trackers of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import run_threads

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.integrations import log_stats

Written = list[tuple[int, dict[str, float]]]


class Writer:
    """Keeps what it is given, by the step."""

    def __init__(self) -> None:
        self.written: Written = []


class SummaryWriter(Writer):
    def add_scalar(self, name: str, value: float, step: int) -> None:
        if not self.written or self.written[-1][0] != step:
            self.written.append((step, {}))
        self.written[-1][1][name] = value


class MLflow(Writer):
    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.written.append((step, values))


class WandB(Writer):
    def log(self, values: dict[str, float], step: int) -> None:
        self.written.append((step, values))


@pytest.mark.parametrize("make", [SummaryWriter, MLflow, WandB])
def test_costs_and_distance_are_written_under_the_step(make: type[Writer]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Written, torch.Tensor, int]:
        params = make_params()
        optimizer = DecentOptimWrapper(
            sgd(params), process_group=group, topology="ring", bucket_cap_mb=TINY_CAP_MB
        )
        assert len(optimizer.buckets) >= 2
        writer = make() if rank == 0 else None
        for step in range(2):
            backward(params, rank, step)
            optimizer.step()
            log_stats(optimizer, writer)
        before = flatten(params)
        log_stats(optimizer, writer, step=70, distance=False)
        return ([] if writer is None else writer.written), before, optimizer.stats().bytes_sent

    ranks = run_threads(4, main)
    written, _, sent = ranks[0]
    assert [step for step, _ in written] == [1, 2, 70]
    values = written[1][1]
    assert values["gossip/bytes"] == sent > 0
    assert values["gossip/update_seconds"] > 0
    assert {f"gossip/{name}" for name in ("wait_seconds", "mix_seconds", "skipped")} <= set(values)
    rows = torch.stack([row for _, row, _ in ranks])
    distance = (rows - rows.mean(dim=0)).norm(dim=1).square().mean().sqrt()
    assert values["gossip/consensus_distance"] == pytest.approx(distance.item())
    assert distance > 0.01
    assert "gossip/consensus_distance" not in written[2][1]


def test_a_writer_that_cannot_write_is_refused() -> None:
    optimizer = DecentOptimWrapper(sgd(make_params()))
    writer: Any = print
    with pytest.raises(TypeError, match="add_scalar, log_metrics, log, or None on ranks"):
        log_stats(optimizer, writer)
