"""The ranks that the benchmark of losses simulates equal real ranks of the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import stacked_gpt
import time_to_loss
import torch
import torch.distributed as dist
from ranks import run_threads
from simulated_ranks import Method, train
from stacked_gpt import batch, initial_weights, split, stacked_loss
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper, Late, OuterOptimizer, Schedule
from decent_optim_wrapper.codecs import Int8Codec
from decent_optim_wrapper.optim import lr_scheduler_fn_cosine_with_warmup

RANKS, STEPS, LR, SEED = 4, 6, 0.01, 3
INT8, CODED = Int8Codec(), {"comm_dtype": torch.int8}
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In float32 a rounding error changes a code now and then, and Adam makes it as long as lr."""
    # Two sequences for each rank.
    monkeypatch.setattr(stacked_gpt, "BATCH", 2 * RANKS)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Replica(nn.Module):
    """The model of one rank, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        parts = split(initial_weights(SEED).unsqueeze(0))
        self.parts = nn.ParameterList([nn.Parameter(part[0].clone()) for part in parts])

    def forward(self, pieces: Tensor) -> Tensor:
        return stacked_loss([part.unsqueeze(0) for part in self.parts], pieces.unsqueeze(0))


def real(
    method: Method, options: dict[str, Any] | None, rank: int, group: dist.ProcessGroup
) -> Tensor:
    """The parameters of a rank after training with the library; None sums gradients, as DDP."""
    model = Replica()
    base = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    scheduler = lr_scheduler_fn_cosine_with_warmup(base, STEPS - STEPS // 10, STEPS // 10)
    optimizer: torch.optim.Optimizer = base
    if options is not None:
        optimizer = DecentOptimWrapper(
            base,
            process_group=group,
            model=model,
            extensions=[OuterOptimizer(method.outer)] if method.outer else [],
            **{"bucket_cap_mb": 0.06, **options},
        )
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch(generator, RANKS)[rank]).backward()
        if options is None:
            for part in model.parts:
                dist.all_reduce(part.grad.div_(RANKS), group=group)
        optimizer.step()
        scheduler.step()
    if isinstance(optimizer, DecentOptimWrapper):
        assert optimizer.stats().rounds
        optimizer.synchronize()
    return torch.cat([part.detach().flatten() for part in model.parts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Method(topology=None, reduce_dtype=torch.float32), None),
        (Method(late=1, codec=INT8), {"overlap": True, **CODED}),
        # The parts that ranks own depend on the bucket.
        (Method("complete", codec=INT8), {"topology": "complete", "bucket_cap_mb": 25, **CODED}),
        (
            Method(every=3, late=2, codec=INT8),
            {"schedule": Schedule(gossip_every=3), "overlap": Late(2), **CODED},
        ),
        (
            Method(topology="complete", every=3, outer=OUTER),
            {"topology": "complete", "schedule": Schedule(gossip_every=3)},
        ),
    ],
    ids=str,
)
def test_a_simulated_rank_has_the_parameters_of_a_real_one(
    method: Method, options: dict[str, Any] | None
) -> None:
    expected = torch.stack(run_threads(RANKS, partial(real, method, options)))
    # Beside another rate, or another seed.
    rates, seeds = ([LR], [SEED + 1, SEED]) if options is None else ([LR / 2, LR], [SEED])
    found = train(method, "AdamW", RANKS, rates, seeds, STEPS)[-1, -1]
    torch.testing.assert_close(found.expand_as(expected), expected, rtol=0, atol=1e-9)
    mean = expected.mean(0)
    assert (mean - initial_weights(SEED)).abs().max() > LR
    # Rounds of all ranks in the last step leave no difference, nor does DDP.
    assert ((expected - mean).abs().max() < 1e-9) == (method.codec is None)


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    readme = time_to_loss.RESULTS.with_name("README.md").read_text()
    results = time_to_loss.Results(time_to_loss.RESULTS, stacked_gpt.STEPS)
    assert time_to_loss.table(results, time_to_loss.SEEDS) in readme
    for optimizer in ("AdamW", "Muon"):
        times = time_to_loss.times_to_loss(results, time_to_loss.SEEDS, optimizer)
        assert time_to_loss.times_table(*times) in readme
