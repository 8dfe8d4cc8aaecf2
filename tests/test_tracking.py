"""Gradient tracking in float64 against dense matrices."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, VIEWS, pairwise
from dense import put, rows_of
from problem import (
    CODED,
    MODES,
    TINY_CAP_MB,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    sgd,
)
from ranks import run_processes, run_threads
from restartable_processes import RestartableProcesses, wrap_elastic
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, Optimizer, RMSprop

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    PeerError,
    Schedule,
    Topology,
    TopologyFactory,
)
from decent_optim_wrapper.ddp import DecentralizedDataParallel

STEPS = 8
DAMPING = 0.3
BASES: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "adamw": adamw,
    "adamw in one call": lambda params: in_one_call(adamw(params)),
    "sgd": sgd,
    "nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "rmsprop": lambda params: RMSprop(params, lr=0.01),
}
TOPOLOGIES = {name: TopologyFactory.create(name, 4, 1) for name in ("ring", "complete")}
SCHEDULES = {
    "every step": Schedule(),
    "slow": Schedule(mixing_rate=0.4),
    "every third": Schedule(gossip_every=3),
    "late": Schedule(gossip_every=3, staleness=2),
    "averages": Schedule(global_avg_every=3),
}


def gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def parts_of(row: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(row, [param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def simulate(topology: Topology, schedule: Schedule, name: str, overlap: bool = True) -> Tensor:
    """All ranks in one place: y = m + c, c <- c + 0.3 (W y - y), x <- W x - u(g + c)."""
    n = topology.world_size
    worlds = [make_params() for _ in range(n)]
    bases = [BASES[name](params) for params in worlds]
    replaces = name.startswith("adam")
    for base in bases if replaces else ():
        base.param_groups[0]["betas"] = (0.0, 0.999)
    means = corrections = torch.zeros_like(rows_of(worlds))
    launched: dict[int, tuple[Tensor, ...]] = {}
    collected = 0

    def land(step: int) -> None:
        nonlocal corrections
        if step in launched:
            matrix, start, y = launched.pop(step)
            put(worlds, rows_of(worlds) + matrix @ start - start)
            corrections = corrections + DAMPING * (matrix @ y - y)

    for step in range(STEPS):
        for rank in range(n):
            backward(worlds[rank], rank, step)
        if overlap:
            land(step)
        grads = torch.stack([flatten([gradient(p) for p in params]) for params in worlds])
        if not launched:
            collected += 1
            means = means + max(0.1, replaces / collected) * (grads - means)
        read = corrections + (means if replaces else grads)
        for params, base, row in zip(worlds, bases, read, strict=True):
            for param, part in zip(params, parts_of(row, params), strict=True):
                gradient(param).copy_(part)
            base.step()
        if (matrix := due(topology, schedule, step)) is not None:
            launched[step + int(schedule.staleness) if overlap else step] = (
                matrix,
                rows_of(worlds),
                corrections + means,
            )
        if not overlap:
            land(step)
    for step in sorted(launched):
        land(step)
    return rows_of(worlds)


def due(topology: Topology, schedule: Schedule, step: int) -> Tensor | None:
    n, done = topology.world_size, step + 1
    if schedule.global_avg_every and done % schedule.global_avg_every == 0:
        return torch.full((n, n), 1 / n, dtype=torch.float64)
    if done % int(schedule.gossip_every):
        return None
    rate = schedule.mixing_rate
    matrix = topology.mixing_matrix(done // int(schedule.gossip_every) - 1)
    return (1 - rate) * torch.eye(n, dtype=torch.float64) + rate * matrix


def wrap(
    base: Optimizer, group: dist.ProcessGroup | None, topology: Topology | str, **options: Any
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        base,
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        process_group=group,
        **{"gradient_tracking": True, **options},
    )


def train(
    rank: int, group: dist.ProcessGroup, topology: Topology, name: str, **options: Any
) -> Tensor:
    params = make_params()
    optimizer = wrap(BASES[name](params), group, topology, **options)
    for step in range(STEPS):
        backward(params, rank, step)
        optimizer.step()
    optimizer.synchronize()
    return flatten(params)


def check(topology: Topology, schedule: Schedule, name: str, overlap: bool, views: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        options = {"overlap": overlap, "param_as_bucket_view": views}
        return train(rank, group, topology, name, schedule=schedule, **options)

    rows = torch.stack(run_threads(4, main))
    expected = simulate(topology, schedule, name, overlap)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-11)
    untracked = torch.stack(
        run_threads(
            4,
            lambda rank, group: train(
                rank,
                group,
                topology,
                name,
                schedule=schedule,
                overlap=overlap,
                gradient_tracking=False,
            ),
        )
    )
    assert (rows - untracked).abs().max() > 1e-3, "tracking made no difference"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(("name", "topology"), pairwise({n: n for n in BASES}, TOPOLOGIES))
def test_follows_the_oracle(name: str, topology: Topology) -> None:
    check(topology, Schedule(), name, overlap=True, views=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(
    ("schedule", "name", "overlap", "views"),
    pairwise(SCHEDULES, {n: n for n in ("adamw", "sgd")}, OVERLAP, VIEWS),
)
def test_schedules_follow_the_oracle(
    schedule: Schedule, name: str, overlap: bool, views: bool
) -> None:
    check(TOPOLOGIES["ring"], schedule, name, overlap or schedule.staleness > 1, views)


def tracked_of(optimizer: DecentOptimWrapper) -> list[dict[str, Any]]:
    """What a checkpoint holds of each parameter."""
    saved = optimizer.state_dict()["gossip"]["extensions"]["gradient_tracking"]
    rows: list[dict[str, Any]] = saved["params"]
    return rows


def sums(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """What a rank adds to the sums of y and of the means."""
    return flatten([row["y"] for row in rows]), flatten([row["mean"] for row in rows])


def test_the_sum_of_the_estimates_is_that_of_the_gradients_in_every_step() -> None:
    """Also where a rank skips its update, or has no gradient."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        history = []
        for step in range(STEPS):
            backward(params, rank, step)
            if (rank, step) == (1, 2):
                params[0].grad = None
            overflow = torch.tensor(float((rank, step) == (2, 4)))
            vars(optimizer).update(found_inf=overflow, grad_scale=None)
            optimizer.step()
            assert (params[0].grad is None) == ((rank, step) == (1, 2))
            history.append(sums(tracked_of(optimizer)))
        optimizer.synchronize()
        return history

    histories = run_threads(4, main)
    for step in range(STEPS):
        y, g = (sum(history[step][k] for history in histories) for k in range(2))
        torch.testing.assert_close(y, g, rtol=0, atol=1e-12)
        assert all((history[step][0] - y / 4).abs().max() > 1e-4 for history in histories)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mode"), pairwise(TOPOLOGIES, {"bf16-views": MODES["bf16-views"], **CODED})
)
def test_rounding_on_the_wire_moves_neither_the_mean_nor_the_sum_of_the_corrections(
    topology: Topology, mode: dict[str, Any]
) -> None:
    """The gradients do not depend on the parameters: the mean is that of ranks that never meet."""

    def main(rank: int, group: dist.ProcessGroup, meets: bool) -> tuple[Tensor, ...]:
        params = make_params()
        base = SGD(params, lr=0.1, momentum=0.9)
        optimizer = wrap(base, group, topology, **mode) if meets else None
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            for param in params:
                noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
                param.grad = noise + rank
            (optimizer or base).step()
        if optimizer is None:
            return (flatten(params),)
        optimizer.synchronize()
        return flatten(params), *sums(tracked_of(optimizer))

    x, y, means = map(torch.stack, zip(*run_threads(4, partial(main, meets=True)), strict=True))
    (alone,) = map(torch.stack, zip(*run_threads(4, partial(main, meets=False)), strict=True))
    torch.testing.assert_close(y.sum(0), means.sum(0), rtol=0, atol=1e-11)
    torch.testing.assert_close(x.mean(0), alone.mean(0), rtol=0, atol=1e-11)
    assert (x - alone).abs().max() > 1e-2
    assert (y - means).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_class_that_steps_in_the_backward_pass_does_the_same(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)))
            # Not from the generator that all threads share.
            for number, param in enumerate(self.parameters()):
                values = torch.sin(torch.arange(1.0, param.numel() + 1) * (number + 1))
                param.data.copy_(values.view(param.shape) / 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers(x)).square().sum()

    def batches(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(STEPS)]

    def inside(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = DecentralizedDataParallel(
            Net(),
            lambda named: BASES[name]([p for _, p in named]),
            topology="ring",
            bucket_size_in_mb=400 / 2**20,
            process_group=group,
            gradient_tracking=True,
        )
        assert len(model.optimizer.buckets) > 1
        for batch in batches(rank):
            model(batch).backward()
        model.optimizer.synchronize()
        return flatten([*model.module.parameters()])

    def outside(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = Net()
        optimizer = wrap(BASES[name]([*model.parameters()]), group, "ring")
        for batch in batches(rank):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        optimizer.synchronize()
        return flatten([*model.parameters()])

    one, other = run_threads(4, inside), run_threads(4, outside)
    torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=0, atol=1e-13)
    assert (one[0] - flatten([*Net().parameters()])).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(
    ("at", "schedule", "name", "views"),
    pairwise(
        {"3": 3, "4": 4, "5": 5},
        {k: SCHEDULES[k] for k in ("every step", "every third", "late")},
        {n: n for n in ("adamw", "sgd")},
        VIEWS,
    ),
)
def test_a_resumed_run_continues_bit_for_bit(
    at: int, schedule: Schedule, name: str, views: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        def make() -> tuple[list[Tensor], DecentOptimWrapper]:
            params = make_params()
            options = {"schedule": schedule, "param_as_bucket_view": views}
            return params, wrap(BASES[name](params), group, "ring", **options)

        params, optimizer = make()
        for step in range(at):
            backward(params, rank, step)
            optimizer.step()
        saved = copy.deepcopy((optimizer.state_dict(), [p.detach().clone() for p in params]))
        resumed, again = make()
        again.load_state_dict(saved[0])
        with torch.no_grad():
            for param, value in zip(resumed, saved[1], strict=True):
                param.copy_(value)
        for step in range(at, STEPS):
            backward(params, rank, step)
            optimizer.step()
            backward(resumed, rank, step)
            again.step()
        optimizer.synchronize()
        again.synchronize()
        return flatten(params), flatten(resumed)

    for straight, resumed in run_threads(4, main):
        assert torch.equal(straight, resumed)
        assert (straight - flatten(make_params())).abs().max() > 1e-2


def test_a_checkpoint_without_estimates_starts_them_again() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        state = optimizer.state_dict()
        before = flatten(
            [row["y"] for row in state["gossip"]["extensions"].pop("gradient_tracking")["params"]]
        )
        optimizer.load_state_dict(state)
        after = [row["y"] for row in tracked_of(optimizer)]
        return before, flatten(after)

    for before, after in run_threads(4, main):
        assert before.abs().max() > 1e-2
        assert not after.any()


@pytest.mark.parametrize("takes", [1, 3])
def test_the_state_of_another_rank_starts_the_estimates_again_on_all_ranks(takes: int) -> None:
    """The corrections would sum to something else than zero, and bias all gradients for good."""
    states: dict[int, Any] = {}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        states[rank] = copy.deepcopy(optimizer.state_dict())
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(states[0 if rank < takes else rank])
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return sums(tracked_of(optimizer))

    results = run_threads(4, main)
    y, means = (sum(result[k] for result in results) for k in range(2))
    # With the first one, every rank has loaded its own: the sums have gone on.
    torch.testing.assert_close(y, means, rtol=0, atol=1e-12)
    assert (results[1][0] - results[1][1]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(
    ("loading", "topology", "schedule", "at"),
    pairwise(
        {"only rank 0": (0,), "only rank 1": (1,), "two ranks": (0, 3), "all but one": (0, 2, 3)},
        {"ring": "ring", "one-peer-exp": "one-peer-exp", "complete": "complete"},
        {
            **{name: SCHEDULES[name] for name in ("every step", "every third", "late")},
            "auto": Schedule(gossip_every="auto", max_staleness=3),
        },
        {"this round": 5, "an earlier round": 3},
    ),
)
def test_ranks_of_which_only_some_have_loaded_raise_at_once(
    loading: tuple[int, ...], topology: str, schedule: Schedule, at: int
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        params = make_params()
        optimizer = wrap(sgd(params), group, topology, schedule=schedule)
        assert len(optimizer.buckets) > 1
        for step in range(5 + (rank if (schedule.gossip_every == "auto") else 0)):
            if step == at:
                saved = copy.deepcopy(optimizer.state_dict())
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        if rank in loading:
            optimizer.load_state_dict(optimizer.state_dict() if at == 5 else saved)

        def go_on() -> None:
            for step in range(50):
                backward(params, rank, step)
                optimizer.step()

        start = time.monotonic()
        with pytest.raises(CallOrderError) as caught:
            go_on()
        return str(caught.value), time.monotonic() - start

    texts, seconds = zip(*run_threads(4, main), strict=True)
    assert all("after load_state_dict()" in text for text in texts), texts
    assert all("on all ranks, or on none" in text for text in texts), texts
    assert max(seconds) < 5


def give_up(optimizer: DecentOptimWrapper) -> None:
    optimizer.gradient_tracking = False


def go_on(optimizer: DecentOptimWrapper) -> None:
    optimizer.step()
    optimizer.synchronize()


def test_ranks_that_give_tracking_up_at_different_steps_hear_of_it() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(adamw(params), group, "complete", timeout=20)
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        backward(params, rank, 3)
        with pytest.raises((CallOrderError, PeerError)) as caught:
            (give_up if rank == 0 else go_on)(optimizer)
        assert optimizer.gradient_tracking
        return str(caught.value)

    assert any("gradient_tracking = False" in text for text in run_threads(4, main))


def test_a_checkpoint_of_other_parameters_is_refused() -> None:
    params = make_params()
    optimizer = DecentOptimWrapper(adamw(params), 0, 1, gradient_tracking=True)
    state = optimizer.state_dict()
    rows = tracked_of(optimizer)
    others: list[Any] = [[], [{**rows[0], "y": torch.zeros(3)}, *rows[1:]], [{}] * len(rows)]
    for bad in others:
        tracked = {"gradient_tracking": {"params": bad}}
        broken = {**state, "gossip": {**state["gossip"], "extensions": tracked}}
        with pytest.raises(ValueError, match="nothing was loaded"):
            optimizer.load_state_dict(broken)


def test_added_and_unfrozen_parameters_are_tracked_from_then_on() -> None:
    """What is known of the others is kept: the oracle is a run without the new ones."""

    def main(rank: int, group: dist.ProcessGroup, grows: bool, views: bool) -> Tensor:
        params = make_params()
        late = [torch.zeros(5, dtype=torch.float64, requires_grad=True)]
        optimizer = wrap(adamw(params), group, "ring", param_as_bucket_view=views)
        for step in range(STEPS):
            if step == 4 and grows:
                optimizer.add_param_group({"params": late, "lr": 0.1})
            backward(params, rank, step)
            if grows:
                late[0].grad = torch.full_like(late[0], float(rank) - 1.0)
            optimizer.step()
        optimizer.synchronize()
        if grows:
            # The mean gradient is 0.5 on every rank, whatever its own is.
            assert late[0].detach().max() < 0
        return flatten(params)

    for views in (False, True):
        grown = run_threads(4, partial(main, grows=True, views=views))
        plain = run_threads(4, partial(main, grows=False, views=views))
        torch.testing.assert_close(torch.stack(grown), torch.stack(plain), rtol=0, atol=1e-12)


def test_tracking_that_is_given_up_frees_its_memory_and_trains_on() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        sent = []
        for step in range(STEPS):
            if step == 4:
                optimizer.gradient_tracking = False
            backward(params, rank, step)
            optimizer.step()
            sent.append(optimizer.stats().bytes_sent)
        optimizer.synchronize()
        assert "extensions" not in optimizer.state_dict()["gossip"]
        with pytest.raises(ValueError, match="expects False during the training"):
            optimizer.gradient_tracking = True
        return sent[3], sent[4], flatten(params)

    rows = run_threads(4, main)
    for before, after, row in rows:
        assert before == 2 * after > 0
        assert (row - flatten(make_params())).abs().max() > 1e-2


def test_half_precision_parameters_have_estimates_in_single_precision() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[torch.dtype]:
        params = make_params(dtype=torch.bfloat16)
        optimizer = wrap(adamw(params), group, "ring")
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        assert all(p.dtype == torch.bfloat16 for p in params)
        return [row["y"].dtype for row in tracked_of(optimizer)]

    for dtypes in run_threads(4, main):
        assert set(dtypes) == {torch.float32}


def test_automatic_rounds_keep_the_sum() -> None:
    """Every rank makes as many steps as it likes; the sums hold once all are at one round."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring", schedule=Schedule(gossip_every="auto"))
        for step in range(6 + 3 * rank):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        assert optimizer.round > 2
        rows = tracked_of(optimizer)
        closed = [row["y"] + row["mean"] * row["is_open"] for row in rows]
        return flatten(closed), flatten([row["mean"] for row in rows])

    with pytest.warns(UserWarning, match="gradient_tracking"):
        results = run_threads(4, main)
    y, g = (sum(result[k] for result in results) for k in range(2))
    torch.testing.assert_close(y, g, rtol=0, atol=1e-12)
    assert all((one - own).abs().max() > 1e-3 for one, own in results)


def join(rank: int) -> list[list[float]]:
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = wrap(adamw(params), None, "ring")
    with Join([optimizer]):
        for step in range(4 + rank):
            backward(params, rank, step)
            optimizer.step()
    optimizer.synchronize()
    return [row.tolist() for row in sums(tracked_of(optimizer))]


@pytest.mark.slow
def test_join_leaves_the_estimates_of_a_rank_that_has_ended_in_the_rounds() -> None:
    results = torch.tensor(run_processes(4, join), dtype=torch.float64)
    y, g = results.sum(0)
    torch.testing.assert_close(y, g, rtol=0, atol=1e-12)
    assert (results[0, 0] - results[0, 1]).abs().max() > 1e-3


def train_elastic(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> list[list[float]]:
    params = make_params(seed=rank)
    optimizer = wrap_elastic(
        params, rank, world_size, store, [], topology="ring", timeout=5, gradient_tracking=True
    )
    report("joined", optimizer.round)
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        optimizer.step()
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(0.005)
    rows = tracked_of(optimizer)
    optimizer.global_avg(may_revert=False)
    return [row.tolist() for row in (*sums(rows), flatten(params))]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_new_membership_starts_the_estimates_again() -> None:
    """What the lost rank had of the sum would otherwise be missing for good."""
    with RestartableProcesses(4, train_elastic) as processes:
        for rank in range(4):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(1, "round 20")
        processes.kill(1)
        processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") > 0
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    rows = torch.tensor(results, dtype=torch.float64)
    y, g, _ = rows.sum(0)
    torch.testing.assert_close(y, g, rtol=0, atol=1e-11)
    torch.testing.assert_close(rows[:, 2], rows[:1, 2].expand(4, -1), rtol=0, atol=1e-12)
    assert (rows[0, 0] - rows[0, 1]).abs().max() > 1e-3


def test_a_closure_is_evaluated_before_the_correction() -> None:
    def main(rank: int, group: dist.ProcessGroup, closes: bool) -> Tensor:
        params = make_params()
        optimizer = wrap(BASES["adamw in one call"](params), group, "ring", overlap=False)
        steps = count()
        for step in range(STEPS):
            if closes:
                optimizer.step(lambda: float(backward(params, rank, next(steps))))
            else:
                backward(params, rank, step)
                optimizer.step()
        return flatten(params)

    one, other = (run_threads(4, partial(main, closes=closes)) for closes in (True, False))
    assert torch.equal(torch.stack(one), torch.stack(other))
    assert (one[0] - flatten(make_params())).abs().max() > 1e-2


def test_a_base_that_evaluates_closures_itself_is_refused() -> None:
    base = torch.optim.LBFGS(make_params())
    with pytest.raises(ValueError, match="gradient_tracking=True"):
        DecentOptimWrapper(base, 0, 1, overlap=False, gradient_tracking=True)


def test_ranks_that_are_left_out_do_not_go_with_tracking() -> None:
    with pytest.raises(ValueError, match="on_nonfinite"):
        DecentOptimWrapper(adamw(make_params()), 0, 1, gradient_tracking=True, on_nonfinite="skip")


@pytest.mark.parametrize("schedule", [Schedule(gossip_every=2), Schedule(gossip_every="auto")])
def test_rare_rounds_are_warned_of(schedule: Schedule) -> None:
    with pytest.warns(UserWarning, match="gradient_tracking"):
        DecentOptimWrapper(adamw(make_params()), 0, 1, gradient_tracking=True, schedule=schedule)
