"""What a GPU finds and chooses by itself, on the CPU in its place: values that are not finite."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import CODED, MODES, TINY_CAP_MB, backward, flatten, make_params
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, Schedule
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.wire.bucket import Bucket

pytestmark = pytest.mark.slow

FORMS: dict[str, dict[str, Any]] = {
    **MODES,
    **CODED,
    "late": {"schedule": Schedule(gossip_every=2, staleness=2)},
    "late-views": {
        "schedule": Schedule(gossip_every=2, staleness=2),
        "param_as_bucket_view": True,
    },
    "exact": {"schedule": Schedule(global_avg_every=2)},
    "tracking": {"gradient_tracking": True},
}
WORLDS = {"pair": ("ring", 4), "group": ("complete", 3)}


class Once:
    """A work of gloo, which must be waited for once, in the place of one of a GPU."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done = False

    def wait(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        if not self._done:
            self._work.wait(timeout)
        self._done = True

    def is_completed(self) -> bool:
        return self._done


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are exchanged and checked as on a GPU."""
    exchange, all_reduce = Transport.exchange, Transport.all_reduce

    def exchanged(self: Transport, outgoing: Tensor, *args: Any) -> list[Any]:
        return [Once(work) for work in exchange(self, outgoing, *args)]

    def reduced(self: Transport, *args: Any) -> list[Any]:
        return [Once(work) for work in all_reduce(self, *args)]

    monkeypatch.setattr(Bucket, "on_gpu", True)
    monkeypatch.setattr(Transport, "exchange", exchanged)
    monkeypatch.setattr(Transport, "all_reduce", reduced)
    monkeypatch.setattr(Transport, "sends_alone", lambda self, device: False)


def wrap(
    params: list[Tensor], group: dist.ProcessGroup, topology: str, **options: Any
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        torch.optim.SGD(params, lr=0.05),
        process_group=group,
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        **options,
    )


def train(
    rank: int,
    group: dist.ProcessGroup,
    topology: str,
    spoiled: tuple[int, int] | None = None,
    steps: int = 7,
    **options: Any,
) -> tuple[list[Tensor], str]:
    """The parameters after each step, and the error that ended the training.

    Args:
        rank: this rank.
        group: all ranks.
        topology: its name.
        spoiled: a rank, and the step after which one of its parameters is not finite.
        steps: how many.
        options: of the wrapper.
    """
    params = make_params(dtype=torch.float32)
    wrapper = wrap(params, group, topology, **options)
    rows: list[Tensor] = []
    for step in range(steps):
        backward(params, rank, step)
        for param in params:
            # The gradient at values that are not finite would be the same again.
            assert param.grad is not None
            param.grad.nan_to_num_(0.0)
        if (rank, step) == spoiled:
            grad = params[2].grad
            assert grad is not None
            grad[1, 1] = torch.nan
        try:
            wrapper.step()
        except (NonFiniteError, RuntimeError) as error:
            return rows, str(error)
        rows.append(flatten(params))
    # A wrapper that is dropped waits for slower peers for 5 seconds only.
    wrapper.synchronize()
    return rows, ""


# Each form with either rule or in either world, as far as they go together: NCCL sends whole values
# in larger groups, and tracking leaves out no rank.
MIXED = [
    *(("pair", form, "raise") for form in ("copies", "bf16-views", "int4-views", "exact")),
    *(("pair", form, "skip") for form in ("views", "bf16", "int8", "late")),
    *(("group", form, "raise") for form in ("views", "late-views", "tracking")),
    *(("group", form, "skip") for form in ("copies", "exact")),
    ("pair", "tracking", "raise"),
]


@pytest.mark.parametrize(("world", "form", "rule"), MIXED)
def test_finite_values_are_mixed_as_on_the_cpu(
    world: str, form: str, rule: str, request: pytest.FixtureRequest
) -> None:
    topology, size = WORLDS[world]
    options: dict[str, Any] = {**FORMS[form], "on_nonfinite": rule}

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        rows, error = train(rank, group, topology, **options)
        assert not error
        return torch.stack(rows)

    expected = run_threads(size, main)
    request.getfixturevalue("on_gpu")
    for one, other in zip(run_threads(size, main), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("world", "form"),
    [("pair", "copies"), ("pair", "bf16-views"), ("pair", "int8"), ("group", "views")],
)
def test_nothing_is_mixed_that_is_not_finite_and_the_next_step_says_so(
    world: str, form: str
) -> None:
    topology, size = WORLDS[world]
    bad, step = 1, 2

    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], str]:
        return train(rank, group, topology, (bad, step), timeout=5.0, **FORMS[form])

    for rank, (rows, error) in enumerate(run_threads(size, main)):
        for row in rows:
            assert rank == bad or row.isfinite().all()
        # The values are sent after the step, checked in the next one, and read in the one after it.
        if rank == bad or topology == "complete":
            assert len(rows) == step + 2
            assert f"those of ranks [{bad}] hold NaN" in error


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("world", "form"),
    [
        *(("pair", form) for form in ("copies", "bf16-views", "int8", "late")),
        *(("group", form) for form in ("views", "late")),
    ],
)
def test_a_rank_that_is_left_out_takes_the_values_of_the_others(world: str, form: str) -> None:
    topology, size = WORLDS[world]
    options: dict[str, Any] = {**FORMS[form], "on_nonfinite": "skip"}

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        rows, error = train(rank, group, topology, (1, 3), 10, **options)
        assert not error
        return rows

    ranks = run_threads(size, main)
    assert not ranks[1][3].isfinite().all()
    assert ranks[1][-1].isfinite().all() or form == "late"
    for rank in {*range(size)} - {1}:
        assert all(row.isfinite().all() for row in ranks[rank])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rule", ["raise", "skip"])
@pytest.mark.parametrize("size", [40_000.0, 70_000.0])
def test_what_half_precision_cannot_hold_makes_no_nan(rule: str, size: float) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[float], str]:
        # The difference of the two is more than float16 has; the larger values are, too.
        params = [torch.full((4,), size if rank else -size).requires_grad_() for _ in range(2)]
        wrapper = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.0),
            process_group=group,
            topology="ring",
            bucket_cap_mb=10 / 2**20,
            comm_dtype=torch.float16,
            on_nonfinite=rule,  # type: ignore[arg-type]
            sync_at_start=False,
        )
        for _ in range(3):
            for param in params:
                param.grad = torch.zeros(4)
            try:
                wrapper.step()
            except NonFiniteError as error:
                return params[0].tolist(), str(error)
        return params[0].tolist(), ""

    for rank, (values, error) in enumerate(run_threads(2, main)):
        fits = size < 65_504
        assert values == [0.0 if fits else (size if rank else -size)] * 4
        assert bool(error) == (rule == "raise" and not fits)


class Run:
    """A training of which one rank spoils a gradient where it is told to."""

    def __init__(self, rank: int, group: dist.ProcessGroup, topology: str, **options: Any) -> None:
        self.rank, self.params = rank, make_params(dtype=torch.float32)
        self.wrapper = wrap(self.params, group, topology, **options)

    def step(self, step: int, spoils: bool = False) -> None:
        backward(self.params, self.rank, step)
        if spoils and self.rank == 1:
            self.params[0].grad[0] = torch.nan  # type: ignore[index]
        self.wrapper.step()

    @property
    def is_finite(self) -> bool:
        return bool(flatten(self.params).isfinite().all())


@pytest.mark.usefixtures("on_gpu")
def test_synchronize_tells_of_the_last_round() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = Run(rank, group, "ring")
        for step in range(3):
            run.step(step, spoils=step == 2)
        with pytest.raises(NonFiniteError, match=r"those of ranks \[1\] hold NaN"):
            run.wrapper.synchronize()
        assert rank == 1 or run.is_finite

    run_threads(2, main)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("views", [True, False])
def test_a_caught_error_drops_the_round_that_follows_from_it(views: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[int]:
        run = Run(rank, group, "complete", param_as_bucket_view=views)
        raised = []
        for step in range(8):
            try:
                run.step(step, spoils=step == 1)
            except NonFiniteError:
                raised.append(step)
                with torch.no_grad():
                    for param in run.params:
                        param.fill_(1.0)
        assert run.is_finite
        return raised

    assert run_threads(3, main) == [[3]] * 3


@pytest.mark.usefixtures("on_gpu")
def test_nothing_is_told_of_a_round_before_the_state_was_loaded() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        run = Run(rank, group, "complete")
        run.step(0)
        run.step(1)
        state = copy.deepcopy(run.wrapper.state_dict())
        values = [param.detach().clone() for param in run.params]
        run.step(2, spoils=True)
        run.step(3)
        with torch.no_grad():
            for param, value in zip(run.params, values, strict=True):
                param.copy_(value)
        run.wrapper.load_state_dict(state)
        run.step(4)
        run.step(5)
        return run.is_finite

    assert run_threads(3, main) == [True] * 3
