"""Entries of the base's state that are mixed together with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, pairwise
from dense import due_matrix, mix, rows_of, train_regression
from problem import (
    MODES,
    TINY_CAP_MB,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    sgd,
    take_steps,
)
from ranks import run_threads
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, Schedule, Topology, TopologyFactory

STEPS = 7
NAMES = ("exp_avg", "exp_avg_sq")
TOPOLOGIES = {name: TopologyFactory.create(name, 4, 1) for name in ("ring", "complete")}
SCHEDULES: dict[str, dict[str, Any]] = {
    "every step": {},
    "every other": {"gossip_every": 2},
}


def wrap(
    base: Optimizer, group: dist.ProcessGroup, topology: Topology | str, **options: Any
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        base, topology=topology, bucket_cap_mb=TINY_CAP_MB, process_group=group, **options
    )


def state_of(base: Optimizer, params: Sequence[Tensor], name: str) -> list[Tensor]:
    return [base.state[param][name] for param in params]


def simulate(
    topology: Topology, every: int, overlap: bool, names: Sequence[str] = NAMES
) -> tuple[Tensor, Tensor]:
    worlds = [make_params() for _ in range(4)]
    bases = [adamw(params) for params in worlds]

    def entries(name: str) -> list[list[Tensor]]:
        return [state_of(*pair, name) for pair in zip(bases, worlds, strict=True)]

    def land(step: int) -> None:
        for space in (worlds, *map(entries, names)):
            mix(space, due_matrix(topology, every, None, 1.0, step))

    rows = train_regression(worlds, bases, STEPS, overlap, land)
    return rows, rows_of(entries("exp_avg_sq"))


@pytest.mark.parametrize(
    ("topology", "schedule", "overlap"), pairwise(TOPOLOGIES, SCHEDULES, OVERLAP)
)
def test_momenta_follow_the_oracle(
    topology: Topology, schedule: dict[str, Any], overlap: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        base = in_one_call(adamw(params)) if rank % 2 else adamw(params)
        optimizer = wrap(
            base,
            group,
            topology,
            overlap=overlap,
            schedule=Schedule(average_state=NAMES, **schedule),
        )
        take_steps(optimizer, params, rank, range(STEPS))
        optimizer.synchronize()
        return flatten(params), flatten(state_of(base, params, "exp_avg_sq"))

    results = run_threads(4, main)
    every = schedule.get("gossip_every", 1)
    expected = simulate(topology, every, overlap)
    for ours, theirs in zip(zip(*results, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), theirs, rtol=1e-11, atol=1e-11)
    kept = simulate(topology, every, overlap, names=())
    for mixed, other in zip(expected, kept, strict=True):
        assert (mixed - other).abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_an_entry_leaves_those_of_the_others_as_they_are(mode: str) -> None:
    """One skips its first updates, as GradScaler makes it do, and one has no gradient for long."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        base = torch.optim.AdamW(params, lr=0.0)
        optimizer = wrap(base, group, "ring", schedule=Schedule(average_state=NAMES), **MODES[mode])
        for step in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            if rank == 1:
                params[1].grad = None
            vars(optimizer).update(
                found_inf=torch.tensor(float(rank == 2 and step < 2)), grad_scale=None
            )
            optimizer.step()
        optimizer.synchronize()
        assert ("exp_avg_sq" in base.state[params[1]]) == (rank != 1)
        return [] if rank == 1 else state_of(base, params, "exp_avg_sq")

    def after(updates: int) -> float:
        """The entries of a rank alone."""
        return 1 - 0.999**updates

    results = run_threads(4, main)
    for rank in (0, 2, 3):
        # Nothing was mixed with zeros, but with what rank 2 has after its two updates.
        assert all((entry > 0.99 * after(2)).all() for entry in results[rank])
        assert all((entry < 0.99 * after(4)).all() for entry in results[rank])


def test_entries_that_the_base_does_not_have_are_refused() -> None:
    params = make_params()
    optimizer = DecentOptimWrapper(sgd(params), 0, 1, schedule=Schedule(average_state=("nothing",)))
    backward(params, 0, 0)
    with pytest.raises(RuntimeError, match=r"\['momentum_buffer'\], got 'nothing'"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"average_state": NAMES, "gossip_every": 2, "staleness": 2}, ValueError, "second moments"),
        ({"average_state": NAMES, "gossip_every": "auto"}, ValueError, "second moments"),
        ({"average_state": ()}, TypeError, "average_state"),
        ({"average_state": (1,)}, TypeError, "average_state"),
    ],
)
def test_late_rounds_and_what_are_no_names_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Schedule(**options)


def test_a_rank_that_is_left_out_takes_only_entries_that_the_others_have() -> None:
    """And still tells them which entries it has itself."""

    def main(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
        params = make_params()
        base = adamw(params)
        schedule = Schedule(average_state=("exp_avg",))
        optimizer = wrap(base, group, "complete", schedule=schedule, on_nonfinite="skip")
        for step in range(5):
            backward(params, rank, step)
            if rank == 1 and step < 3:
                params[1].grad = None
            optimizer.step()
            if (rank, step) == (0, 1):
                base.state[params[1]]["exp_avg"].fill_(float("nan"))
        optimizer.synchronize()
        return [base.state[param]["exp_avg"].flatten().tolist() for param in params]

    rows = run_threads(2, main)
    assert torch.tensor(rows[0][1]).isfinite().all()
    # Mixed again once both have it.
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-12)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024: z <- z - lr g, x is the mean of all z, y between both."""

    BETA = 0.9

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            weight = 1 / group["k"]
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state["z"] = y.clone()
                y.lerp_(state["z"], weight)
                y.add_(y.grad, alpha=group["lr"] * (self.BETA * (1 - weight) - 1))
                state["z"].sub_(y.grad, alpha=group["lr"])

    def averages(self) -> list[Tensor]:
        """What is evaluated."""
        params = self.param_groups[0]["params"]
        return [p.detach().lerp(self.state[p]["z"], 1 - 1 / self.BETA) for p in params]


def distance_to_the_optimum(**schedule: Any) -> float:
    """Of the rank's own averages, after training on quadratics whose optima differ by rank."""

    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params()
        base = ScheduleFree(params, lr=0.1)
        optimizer = wrap(base, group, "ring", schedule=Schedule(**schedule))
        for _ in range(200):
            for param in params:
                param.grad = param.detach() - (rank - 1.5) * 4.0
            optimizer.step()
        optimizer.synchronize()
        return float(flatten(base.averages()).abs().max())

    return max(run_threads(4, main))


@pytest.mark.slow
def test_schedule_free_converges_if_its_own_iterate_is_mixed_too() -> None:
    with pytest.warns(UserWarning, match=r'average_state=\("z",\)'):
        apart = distance_to_the_optimum()
    together = distance_to_the_optimum(average_state=("z",))
    assert together < 1.0
    assert apart > 10 * together
