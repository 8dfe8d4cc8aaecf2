"""The ranks that the benchmark of losses simulates equal real ranks of the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import regret
import time_to_loss
import torch
import torch.distributed as dist
from ranks import run_processes, run_threads
from simulated_ranks import Method, StreamingRounds, train
from stacked_gpt import SMALL
from stacked_hooks import PowerSGD, eight_bits, eight_bits_of_channels
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    Late,
    OuterOptimizer,
    Schedule,
    TopologyFactory,
)
from decent_optim_wrapper.codecs import Int8Codec, TopKCodec
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim import lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.planning import plan
from decent_optim_wrapper.topo import Hierarchical
from decent_optim_wrapper.wire.references import keeps_references

RANKS, STEPS, LR, SEED = 4, 6, 0.01, 3
DEFAULTS = {"topology": "one-peer-exp", "comm_dtype": torch.float32, "bucket_cap_mb": 0.06}
INT8, CODED = Int8Codec(), {"comm_dtype": torch.int8}
# Two sequences for each rank.
GPT = SMALL._replace(sequences=2 * RANKS)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """In float32 a rounding error changes a code now and then, and Adam makes it as long as lr."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Replica(nn.Module):
    """The model of one rank, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        parts = GPT.split(GPT.initial_weights(SEED).unsqueeze(0))
        self.parts = nn.ParameterList([nn.Parameter(part[0].clone()) for part in parts])

    def forward(self, pieces: Tensor) -> Tensor:
        return GPT.stacked_loss([part.unsqueeze(0) for part in self.parts], pieces.unsqueeze(0))


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
            **{**DEFAULTS, **options},
        )
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(GPT.batch(generator, RANKS)[rank]).backward()
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
        (Method(topology=None), None),
        (Method(late=1, codec=INT8), {"overlap": True, **CODED}),
        # The parts that ranks own depend on the bucket.
        (Method("complete", codec=INT8), {"topology": "complete", "bucket_cap_mb": 25, **CODED}),
        # Its means have a codec of their own.
        (
            Method("complete", codec=TopKCodec()),
            {"topology": "complete", "bucket_cap_mb": 25, "comm_dtype": TopKCodec()},
        ),
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
    found = train(method, "AdamW", RANKS, rates, seeds, STEPS, GPT)[-1, -1]
    torch.testing.assert_close(found.expand_as(expected), expected, rtol=0, atol=1e-9)
    mean = expected.mean(0)
    assert (mean - GPT.initial_weights(SEED)).abs().max() > LR
    # Rounds of all ranks in the last step leave no difference, nor does DDP.
    assert ((expected - mean).abs().max() < 1e-9) == (method.codec is None)


class OneBucket:
    """The gradients of a rank as hooks of DDP read them."""

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads

    def buffer(self) -> Tensor:
        return self._grads

    def gradients(self) -> list[Tensor]:
        return [part[0] for part in GPT.split(self._grads.unsqueeze(0))]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def some_gradients() -> list[Tensor]:
    """The gradients of three steps, each of shape (1, ranks, parameters)."""
    generator = torch.Generator().manual_seed(SEED)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    common, own = (draw(3, 1, ranks, GPT.parameters) for ranks in (1, RANKS))
    return list(common + 0.3 * own)


def first_qs(rank_of_matrices: int) -> Tensor:
    """The first approximations, one after another as torch's hook has matrices of one shape."""
    hook = PowerSGD(rank_of_matrices, GPT)
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in GPT.split(torch.zeros(1, GPT.parameters, dtype=torch.float32)):
        by_shape.setdefault(matrix.shape, []).append(matrix.unsqueeze(1))
    same_shapes = (matrix for same in by_shape.values() for matrix in same)
    return torch.cat([hook.first_q(matrix).flatten() for matrix in same_shapes])


def averages_by_hooks(rank: int) -> dict[str, list[Any]]:
    """What torch's hooks make of the gradients of each step."""
    dist.init_process_group("gloo")
    results = {}
    for rank_of_matrices in (1, 4):
        state = PowerSGDState(None, rank_of_matrices, start_powerSGD_iter=2)
        state.iter = 2
        state.q_memory_dict[0] = first_qs(rank_of_matrices)
        rows = sum(rows for rows, _ in GPT.shapes)
        state.p_memory_dict[0] = torch.zeros(rows * rank_of_matrices, dtype=torch.float32)
        results[f"PowerSGD {rank_of_matrices}"] = averages(partial(powerSGD_hook, state), rank)
    group: Any = None
    results["8 bits"] = averages(partial(quantization_pertensor_hook, group), rank)
    results["8 bits a channel"] = averages(partial(quantization_perchannel_hook, group), rank)
    return results


def averages(hook: Any, rank: int) -> list[Any]:
    return [hook(OneBucket(grads[0, rank].clone())).wait().numpy() for grads in some_gradients()]


@pytest.mark.slow
def test_simulated_hooks_average_as_hooks_of_torch_do() -> None:
    expected = run_processes(RANKS, averages_by_hooks)
    for name, simulated in (
        ("PowerSGD 1", PowerSGD(1, GPT, start=0)),
        ("PowerSGD 4", PowerSGD(4, GPT, start=0)),
        ("8 bits", eight_bits),
        ("8 bits a channel", eight_bits_of_channels),
    ):
        for step, grads in enumerate(some_gradients()):
            mean = simulated(grads)[0]
            for each in expected:
                torch.testing.assert_close(
                    mean, torch.from_numpy(each[name][step]), rtol=0, atol=1e-4
                )
            assert (mean - grads.mean(1)).abs().max() > 1e-3


def test_one_fragment_that_arrives_at_once_is_diloco(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingRounds, "FRAGMENTS", 1)
    monkeypatch.setattr(StreamingRounds, "OWN", 0.0)
    plain, streaming = (
        train(
            Method("complete", every=3, outer=OUTER, codec=INT8, streams=streams),
            *("AdamW", RANKS, [LR], [SEED], STEPS, GPT),
        )
        for streams in (None, 0)
    )
    torch.testing.assert_close(plain, streaming, rtol=0, atol=1e-12)
    assert (plain - GPT.initial_weights(SEED)).abs().max() > LR


def test_the_tables_of_the_page_show_the_results() -> None:
    readme = time_to_loss.RESULTS.with_name("README.md").read_text()
    results = time_to_loss.Results(time_to_loss.RESULTS)
    of_losses = time_to_loss.table(results, time_to_loss.SEEDS), time_to_loss.size_table(results)
    for table in (*of_losses, *regret.tables().values()):
        assert table in readme
    examples = time_to_loss.RESULTS.parent.parent
    guide = (examples / "guides" / "slow_network.md").read_text()
    point = regret.Point(4, 0.0, "AdamW")
    for table in (regret.speed_table(point, regret.DRAWN), regret.best_table("AdamW")):
        assert table in guide
    first = " ".join((examples.parent / "README.md").read_text().split())

    def above(ranks: int, optimizer: str, size: str = "0.1M", code: str = "int3") -> str:
        row = time_to_loss.Row(f"ours, complete, {code}", ranks, optimizer, size=size)
        return f"{time_to_loss.above_ddp(results, row):.1f}"

    own = [above(ranks, f"AdamW .999, noise of {ranks}") for ranks in (4, 8, 16)]
    assert f"ends {own[0]}, {own[1]} and {own[2]} % above it on 4, 8 and 16 ranks" in first
    assert above(4, "AdamW .999, noise of 4", "1.5M", "int4") == "0.0"
    middle, large = (above(4, "AdamW, noise of 4", size) for size in ("0.4M", "1.5M"))
    assert f"GPT of 0.4 M ends {middle} % above DDP, and one of 1.5 M" in first
    assert (
        f"[{large} %](examples/benchmark/README.md#loss-after-equally-many-steps), but in" in first
    )
    ddp = [time_to_loss.Row("DDP", 4, f"AdamW{each}", size="1.5M") for each in ("", " .999")]
    (with_95,), (with_999,) = (results.known(row, "DDP", -1, (0,)) or [0.0] for row in ddp)
    assert f"betas, which make DDP {100 * (with_999 / with_95 - 1):.1f} % worse." in first
    names = "the wrapper", "the wrapper, pairs, int3"
    speeds = regret.speeds(regret.Point(4, 0.0, "AdamW"), names)
    usual, short = (f"{speeds[name][8.0]:.1f}" for name in names)

    rows = [line.strip("| ").split(" | ") for line in of_losses[0].splitlines()[2:]]
    gaps = {(name, ranks, base): gap for name, ranks, base, _, _, gap, _ in rows}

    def at_best_rates(name: str, ranks: int, optimizer: str) -> str:
        gap = gaps.get((name, str(ranks), optimizer), "-")
        return gap if gap == "-" else f"{gap.partition(' ')[0]} %"

    assert f'it is {usual} times, and {short} with `topology="one-peer-exp"`' in first
    assert "which ends [at DDP's loss]" in first
    assert at_best_rates("ours, int3", 4, "AdamW, noise of 4") in ("0.0 %", "-0.0 %")
    best_others = []
    for ranks in (4, 16):
        others = [each for each in regret.SETTINGS if not each.startswith("the ")]
        found_speeds = regret.speeds(regret.Point(ranks, 0.0, "AdamW"), others)
        best_others.append(max((row[4.0], name) for name, row in found_speeds.items()))
    (few, of_few), (many, of_many) = best_others
    assert of_many == "DDP, PowerSGD 4"
    best_other = of_few.replace(",", " with")
    assert f"{best_other} on 4 ranks, {few:.1f} times, and PowerSGD on 16, {many:.1f}" in first
    for name, method in {
        "DDP": "DDP",
        "`DecentOptimWrapper(base, model=model)`": "the wrapper",
        "`DecentralizedDataParallel(model, make_optimizer)`": "the module",
        "no communication": "no communication",
        "DDP with its bfloat16 hook": "DDP, bf16 hook",
        "DDP with PowerSGD, rank 4": "DDP, PowerSGD 4",
        "PostLocalSGD, an average every 8 steps (time computed)": "PostLocalSGD 8",
        "DiLoCo, every 30 steps (time computed)": "DiLoCo 30",
    }.items():
        measured = regret.step_times().get((4, 0.0, method))
        row = measured or regret.row_of(regret.Point(4, 0.0, "AdamW"), method)
        cells = [f"{row[ratio]:.0f}" for ratio in (0.25, 1.0, 4.0, 8.0)]
        if method not in ("DDP", "no communication"):
            trained, noise = regret.SETTINGS[method][1], method.startswith("the ")
            cells += [
                at_best_rates(trained, ranks, f"AdamW, noise of {ranks}" if noise else "AdamW")
                for ranks in (4, 16)
            ]
        assert f"| {name} | {' | '.join(cells)} |" in first


def test_the_gap_over_the_size_is_drawn(tmp_path: Path) -> None:
    time_to_loss.main(["--table", "--picture", str(tmp_path / "sizes.png")])
    assert (tmp_path / "sizes.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plan_reads_what_was_measured(tmp_path: Path) -> None:
    regret.write(tmp_path / "measured.csv")
    assert (tmp_path / "measured.csv").read_text() == plan.MEASURED.read_text()


def test_the_pick_of_a_plan_takes_little_longer_than_the_best_of_all_rows() -> None:
    picks = set()
    for point in regret.points():
        for ratio in regret.ALL_RATIOS:
            job = plan.Job(1.0, point.ranks, 1.0, 1.0, point.optimizer, point.varying > 0)
            picked = plan.chosen(job._replace(bandwidth=job.ratio / ratio)).settings
            # On the slowest links other methods may be faster, which a plan lists and cannot pick.
            rows = regret.regrets(point, regret.SETTINGS if ratio <= 8 else regret.OFFERED)
            (method,) = (
                method
                for method, (settings, _) in regret.SETTINGS.items()
                if plan.written(settings, point.ranks) == picked
            )
            assert rows[method].get(ratio, 1.0) <= 1.05, (point, ratio, picked)
            picks.add(picked)
    assert len(picks) > 1


@pytest.mark.parametrize("ranks", [4, 16, 32])
def test_a_plan_writes_arguments_that_train_as_its_rows_did(ranks: int) -> None:
    """Above 16 ranks the defaults are others, and pairs have too many partners for references."""
    rows = {plan.written(text, ranks): name for text, name in regret.SETTINGS.values()}
    optimizers = "AdamW", "Muon", "SGD"
    jobs = [plan.Job(1e6, ranks, 1e6 / r, 1.0, o) for r in (2.0, 100.0) for o in optimizers]
    # Above a ratio of 32 the fastest on 16 ranks is a hook of DDP.
    picks = {pick for job in jobs if (pick := plan.chosen(job).settings).startswith("Dec")}
    assert picks
    kinds = (
        *(AsItArrives, DecentOptimWrapper, DecentralizedDataParallel, Hierarchical, Late),
        *(Schedule, TopKCodec),
    )
    names = {"torch": torch, **{kind.__name__: kind for kind in kinds}}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        for text in picks:
            model = nn.Linear(4, 4)
            base, given = torch.optim.SGD(model.parameters(), lr=0.1), "model, torch.optim.SGD"
            code = f"{text.replace('...', given)[:-1]}, process_group=group)"
            built = eval(code, names | {"model": model, "base": base, "group": group})
            optimizer = built if isinstance(built, DecentOptimWrapper) else built.optimizer
            (method,), (bucket,) = time_to_loss.METHODS[rows[text]].values(), optimizer.buckets
            kind: Any = method.topology
            make = partial(TopologyFactory.create, kind) if isinstance(kind, str) else kind
            assert optimizer.topology.digest == make(ranks).digest, text
            assert repr(bucket.codec(2)) == repr(method.codec), text
            assert optimizer.schedule.gossip_every == method.every, text
            assert ("Late" in text) == (method.late > 1), text
            assert method.codec is None or keeps_references(optimizer.topology), text

    run_threads(ranks, main)


def test_the_defaults_take_little_longer_than_the_best_of_all_rows() -> None:
    for point in regret.points():
        rows = regret.regrets(point)
        for method, most in regret.MOST_REGRET.items():
            assert max(rows[method].get(r, 1.0) for r in regret.RATIOS) <= most, (point, method)
