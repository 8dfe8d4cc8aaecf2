"""GradScaler drives the wrapper as it drives the base, and an overflow keeps no rank waiting."""

from __future__ import annotations

from functools import partial
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from dense import mix, train_densely
from modules import flat, loss_of
from problem import MODES
from ranks import run_threads
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory

STEPS = 5
BAD_STEP = 2


make_model = partial(modules.make_model, dtype=torch.float32)


def make_base(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)


def train(
    rank: int,
    group: dist.ProcessGroup | None,
    fused: bool,
    clip: float | None = None,
    scale: float | None = 1024.0,
    overflowing: int | None = None,
    **kw: Any,
) -> tuple[Tensor, int, float]:
    model = make_model()
    optimizer = DecentOptimWrapper(
        make_base(model, fused), process_group=group, bucket_cap_mb=1e-4, **kw
    )
    scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    assert len(optimizer.buckets) >= 2
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()  # type: ignore[no-untyped-call]
        if rank == overflowing and step == BAD_STEP:
            weight = next(model.parameters())
            assert weight.grad is not None
            weight.grad[0, 0] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        assert optimizer.stats().skipped is (rank == overflowing and step == BAD_STEP)
        scaler.update()
    optimizer.synchronize()
    assert not hasattr(optimizer.optimizer, "found_inf")
    return flat(model), optimizer.round, scaler.get_scale()


FUSED = {"fused": True, "unfused": False}


@pytest.mark.parametrize(
    ("fused", "clip", "overlap"), pairwise(FUSED, {"as it is": None, "clipped": 0.01}, OVERLAP)
)
def test_gradients_are_unscaled_exactly_once(
    fused: bool, clip: float | None, overlap: bool
) -> None:
    def run(scale: float | None) -> list[tuple[Tensor, int, float]]:
        return run_threads(
            2,
            lambda rank, group: train(
                rank, group, fused, clip, scale, overlap=overlap, topology="ring"
            ),
        )

    for (scaled, *_), (plain, *_) in zip(run(1024.0), run(None), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-7)
        assert (scaled - flat(make_model())).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fused", "clip", "mode"), pairwise(FUSED, {"as it is": None, "clipped": 1.0}, named(*MODES))
)
def test_an_overflow_skips_one_ranks_local_update_only(
    fused: bool, clip: float | None, mode: str
) -> None:
    options = {"topology": "ring", **MODES[mode]}
    results = run_threads(
        4, lambda rank, group: train(rank, group, fused, clip, overflowing=1, **options)
    )
    assert [rounds for _, rounds, _ in results] == [STEPS] * 4
    assert [scale for *_, scale in results] == [1024.0, 512.0, 1024.0, 1024.0]
    expected = oracle(fused, clip)
    # Rounding to bfloat16 errs by 2^-9 of a parameter, once per round.
    tolerance = 1e-6 if "bf16" not in mode else STEPS * 2**-9
    for rank, (params, *_) in enumerate(results):
        torch.testing.assert_close(params, expected[rank], rtol=1e-5, atol=tolerance)


def oracle(fused: bool, clip: float | None) -> Tensor:
    """The ring of four without scaler; rank 1 makes no update at BAD_STEP."""
    topology = TopologyFactory.create("ring", 4)
    models = [make_model() for _ in range(4)]
    worlds = [list(model.parameters()) for model in models]
    bases = [make_base(model, fused) for model in models]

    def compute(rank: int, step: int) -> None:
        bases[rank].zero_grad()
        loss_of(models[rank], rank, step).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(worlds[rank], clip)

    def update(rank: int, step: int) -> None:
        if (rank, step) != (1, BAD_STEP):
            bases[rank].step()

    rows = train_densely(
        worlds,
        STEPS,
        True,
        compute,
        update,
        land=lambda step: mix(worlds, topology.mixing_matrix(step)),
    )
    return rows.to(worlds[0][0].dtype)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_rank_without_any_gradient_takes_part(fused: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model, unwrapped = make_model(), nn.Linear(1, 1)
        optimizer = DecentOptimWrapper(
            make_base(model, fused), process_group=group, bucket_cap_mb=1e-4, topology="ring"
        )
        other = torch.optim.SGD(unwrapped.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            if rank == 0:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, rank, step)).backward()  # type: ignore[no-untyped-call]
            scaler.scale(unwrapped(torch.ones(1)).sum()).backward()
            scaler.step(optimizer)
            assert not optimizer.stats().skipped
            scaler.step(other)
            scaler.update()
        optimizer.synchronize()
        return flat(model)

    rows = run_threads(2, main)
    assert (rows[1] - flat(make_model())).abs().max() > 1e-2


def test_clipping_is_by_the_norm_of_the_whole_model() -> None:
    model = make_model()
    before = flat(model)
    optimizer = DecentOptimWrapper(torch.optim.SGD(model.parameters(), lr=1.0), bucket_cap_mb=1e-4)
    assert len(optimizer.buckets) >= 2
    (1000 * loss_of(model, 0, 0)).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert (flat(model) - before).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_float16_gradients_are_refused_as_torch_refuses_them() -> None:
    param = torch.ones(3, dtype=torch.float16, requires_grad=True)
    optimizer = DecentOptimWrapper(torch.optim.SGD([param], lr=0.1))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)
