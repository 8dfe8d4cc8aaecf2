"""What a thread posts or codes later, as behind a GPU, is mixed as what is posted at once."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from problem import backward, flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, PeerError, Schedule
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.comm import streams
from decent_optim_wrapper.comm.streams import PostingThread
from decent_optim_wrapper.gossip.timing import SpareTime
from decent_optim_wrapper.wire import bucket as buckets
from decent_optim_wrapper.wire import coded, storage
from decent_optim_wrapper.wire.bucket import Bucket

pytestmark = pytest.mark.slow

FORMS: dict[str, dict[str, Any]] = {
    "pair": {"topology": "ring"},
    "views": {"topology": "ring", "param_as_bucket_view": True},
    "group": {"topology": "complete"},
    "group-bf16": {"topology": "complete", "comm_dtype": torch.bfloat16},
    "late": {"topology": "ring", "schedule": Schedule(gossip_every=2, staleness=2)},
    "late-group": {"topology": "complete", "schedule": Schedule(gossip_every=2, staleness=2)},
    "exact": {"topology": "ring", "schedule": Schedule(global_avg_every=2)},
    "tracking": {"topology": "ring", "gradient_tracking": True},
    "no-overlap": {"topology": "complete", "overlap": False},
    "int8": {"topology": "ring", "comm_dtype": torch.int8},
}
CODED: dict[str, dict[str, Any]] = {
    "copies": {"topology": "ring"},
    "views": {"topology": "ring", "param_as_bucket_view": True},
    "group": {"topology": "complete"},
    "tracking": {"topology": "ring", "gradient_tracking": True},
    "late": {"topology": "ring", "schedule": Schedule(gossip_every=2, staleness=2)},
    "whole": {"topology": "ring", "overlap": False},
}


class Late:
    """An event that comes late, and at another time on every rank."""

    draws = random.Random(0)
    delays: tuple[float, ...] = (0.0, 0.001, 0.005)

    def synchronize(self) -> None:
        time.sleep(self.draws.choice(self.delays))


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets travel as if their values had to come from a GPU."""
    new_vector = storage.new_vector

    def unpinned(
        numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> Tensor:
        return new_vector(numel, dtype, device)

    for module in (storage, buckets, coded):
        monkeypatch.setattr(module, "new_vector", unpinned)
    monkeypatch.setattr(Bucket, "via_cpu", True)
    monkeypatch.setattr(streams, "mark", lambda device: Late())


def make(group: dist.ProcessGroup, **options: Any) -> tuple[DecentOptimWrapper, list[Tensor]]:
    params = make_params(dtype=torch.float32)
    wrapper = wrap(params, group, **options)
    assert len(wrapper.buckets) > 1
    return wrapper, params


def train(rank: int, group: dist.ProcessGroup, **options: Any) -> tuple[Tensor, list[Any]]:
    """Train, look at averages, go back to a state and train on; all values and states."""
    wrapper, params = make(group, **options)
    rows: list[Tensor] = []
    saved: list[tuple[Any, list[Tensor]]] = []
    for position, step in enumerate((0, 1, 2, 3, 4, 3, 4, 5)):
        backward(params, rank, step)
        wrapper.step()
        assert step != 1 or wrapper.stats().bytes_sent > 0 or "schedule" in options
        rows.append(flatten(params))
        if position < 5:
            values = [param.detach().clone() for param in params]
            saved.append((copy.deepcopy(wrapper.state_dict()), values))
        if position == 4:
            state, values = saved[2]
            with torch.no_grad():
                wrapper.load_state_dict(copy.deepcopy(state))
                torch._foreach_copy_(params, values)
        if position > 5:
            # Collectives on the communicator on which a thread may still post.
            rows.append(wrapper.all_gather(torch.ones(1, dtype=torch.float64)).flatten())
            rows.append(torch.tensor([wrapper.consensus_distance()]))
            with wrapper.averaged():
                rows.append(flatten(params))
    wrapper.synchronize()
    assert torch.equal(rows[4], rows[6])
    assert not torch.equal(rows[3], rows[4])
    return torch.cat([*rows, flatten(params)]), [state for state, _ in saved]


def check_equal(one: list[tuple[Tensor, list[Any]]], other: list[tuple[Tensor, list[Any]]]) -> None:
    for (values, states), (expected, wanted) in zip(one, other, strict=True):
        assert torch.equal(values, expected)
        torch.testing.assert_close(states, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_posted_by_a_thread_is_mixed_and_saved_as_what_is_posted_at_once(
    form: str, request: pytest.FixtureRequest
) -> None:
    expected = run_threads(4, lambda rank, group: train(rank, group, **FORMS[form]))
    request.getfixturevalue("crossing")
    check_equal(run_threads(4, lambda rank, group: train(rank, group, **FORMS[form])), expected)


@pytest.mark.parametrize(
    ("way", "topology", "views", "comm"),
    pairwise(
        named("step", "backward"),
        named("ring", "complete"),
        VIEWS,
        {"exact": None, "bf16": torch.bfloat16, "int8": torch.int8},
    ),
)
def test_what_is_posted_by_a_thread_is_mixed_before_the_forward_pass(
    way: str, topology: str, views: bool, comm: Any, request: pytest.FixtureRequest
) -> None:
    left: list[int] = []

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = modules.make_model(seed=rank)
        options: dict[str, Any] = {"topology": topology, "comm_dtype": comm}
        options |= {"param_as_bucket_view": views, "overlap": "forward"}
        if way == "backward":
            wrapped = modules.wrap(model, group, **options)
            optimizer: DecentOptimWrapper = wrapped.optimizer
            run = partial(modules.train, wrapped, rank)
        else:
            options |= {"process_group": group, "bucket_cap_mb": modules.CAP_MB, "model": model}
            optimizer = DecentOptimWrapper(modules.sgd(model.parameters()), **options)
            run = partial(modules.train_by_steps, model, optimizer, rank)

        sent: list[Tensor] = []

        def look(*_: object) -> None:
            # All ranks differ, so mixing changes every parameter.
            pairs = zip(model.parameters(), sent, strict=False)
            left.append(sum(torch.equal(param, before) for param, before in pairs))

        def note() -> None:
            sent[:] = [param.detach().clone() for param in model.parameters()]

        optimizer.after_step(note)
        for module in model:
            module.register_forward_hook(look)
        run(range(6))
        optimizer.synchronize()
        return modules.flat(model)

    expected = run_threads(4, main)
    request.getfixturevalue("crossing")
    left.clear()
    for one, other in zip(run_threads(4, main), expected, strict=True):
        assert torch.equal(one, other)
        assert (one - modules.flat(modules.make_model())).abs().max() > 1e-2
    # Bucket by bucket: not all before the first module.
    assert max(left) > 0


@pytest.mark.parametrize("form", CODED)
def test_what_a_thread_still_codes_is_dropped_and_saved_as_what_was_coded_at_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**CODED[form], "comm_dtype": torch.int8}
    expected = run_threads(4, lambda rank, group: train(rank, group, **options))
    encode, draws = Codec.encode, random.Random(0)
    threads: list[str] = []

    def encode_late(self: Codec, *args: Any) -> None:
        threads.append(threading.current_thread().name)
        time.sleep(draws.choice((0.0, 0.002, 0.01)))
        encode(self, *args)

    monkeypatch.setattr(Codec, "encode", encode_late)
    check_equal(run_threads(4, lambda rank, group: train(rank, group, **options)), expected)
    # With estimates, and where the step waits for its own round, nobody has time.
    assert ("decent-background" in threads) == (form not in ("tracking", "whole"))


@pytest.mark.usefixtures("crossing")
def test_rounds_that_take_as_long_as_they_need_keep_the_mean() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        with torch.no_grad():
            for param in params:
                param.add_(rank)
        auto = Schedule(gossip_every="auto", max_staleness=4)
        base = torch.optim.SGD(params, lr=0.0)
        options: dict[str, Any] = {"topology": "ring", "schedule": auto, "sync_at_start": False}
        wrapper = wrap(params, group, base, **options)
        started = flatten(params)
        take_steps(wrapper, params, rank, range(40))
        wrapper.synchronize()
        return [started, flatten(params)]

    started, ended = (torch.stack(rows) for rows in zip(*run_threads(4, main), strict=True))
    torch.testing.assert_close(ended.mean(0), started.mean(0), rtol=1e-12, atol=1e-12)
    assert (ended - ended.mean(0)).norm() < 0.1 * (started - started.mean(0)).norm()


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("form", ["pair", "group", "int8"])
def test_values_that_are_not_finite_are_found_before_they_are_mixed(form: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        wrapper, params = make(group, **FORMS[form])
        for step in range(4):
            backward(params, rank, step)
            if rank == 1 and step == 1:
                params[2].grad[1, 1] = torch.nan  # type: ignore[index]
            try:
                wrapper.step()
            except NonFiniteError as error:
                assert rank == 1 or flatten(params).isfinite().all()
                return f"{step}: {error}"
        return ""

    told = run_threads(2, main)
    assert all(text.startswith("2: ") and "ranks [1] hold NaN" in text for text in told)


def test_sums_come_in_the_same_order_whatever_a_thread_posts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=torch.float32) + make_params(seed=1)
        wrapper = wrap(params, group, topology="complete")
        take_steps(wrapper, params, rank, range(5))
        wrapper.synchronize()
        return flatten(params)

    expected = run_threads(4, main)
    request.getfixturevalue("crossing")
    # As of a model with parameters on the GPU and on the CPU.
    monkeypatch.setattr(Bucket, "via_cpu", property(lambda each: each.dtype == torch.float32))
    for one, other in zip(run_threads(4, main), expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(expected[0], flatten(make_params(dtype=torch.float32) + make_params()))


@pytest.fixture
def spare_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are coded by a thread also on a busy machine, where they are waited for."""
    monkeypatch.setattr(SpareTime, "begin_round", lambda self: True)


def patch_encode(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run this before every coding on another thread."""
    encode = Codec.encode

    def patched(self: Codec, *args: Any) -> None:
        if threading.current_thread().name == "decent-background":
            run()
        encode(self, *args)

    monkeypatch.setattr(Codec, "encode", patched)


def first_error(
    rank: int,
    group: dist.ProcessGroup,
    steps: int,
    before: Callable[[int], object] | None = None,
    **options: Any,
) -> str:
    """What ends the training; nothing if all steps are made."""
    wrapper, params = make(group, **options)
    for step in range(steps):
        backward(params, rank, step)
        if before:
            before(step)
        try:
            wrapper.step()
        except (ValueError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("form", ["pair", "group", "int8"])
def test_a_lost_peer_is_an_error_within_the_timeout_and_its_round_is_dropped(
    form: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not posted or coded yet is not any more."""
    dropped: list[int] = []
    drop = PostingThread.drop

    def noted(self: PostingThread) -> None:
        drop(self)
        dropped.append(1)

    def main(rank: int, group: dist.ProcessGroup) -> float:
        start = time.monotonic()
        steps = 3 if rank == 1 else 20
        error = first_error(rank, group, steps, timeout=60.0, **FORMS[form])
        assert rank == 1 or error.startswith("PeerError")
        return time.monotonic() - start

    request.getfixturevalue("spare_time" if form == "int8" else "crossing")
    monkeypatch.setattr(PostingThread, "drop", noted)
    assert max(run_threads(2, main)) < 40
    assert dropped


@pytest.mark.usefixtures("spare_time")
def test_what_fails_in_the_coding_of_a_rank_is_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing: list[bool] = []

    def fail() -> None:
        if failing and failing.pop():
            raise ValueError("no memory for codes")

    def main(rank: int, group: dist.ProcessGroup) -> str:
        def let_fail(step: int) -> None:
            if (rank, step) == (0, 3):
                failing.append(True)

        return first_error(rank, group, 10, let_fail, timeout=60.0, **FORMS["int8"])

    patch_encode(monkeypatch, fail)
    own, peer = sorted(run_threads(2, main), reverse=True)
    assert own == "ValueError: no memory for codes"
    assert peer.startswith("PeerError")
    assert "ValueError: no memory for codes" in peer


@pytest.mark.usefixtures("spare_time")
def test_a_collective_does_not_wait_longer_for_codes_than_for_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> str:
        wrapper, params = make(group, timeout=2.0, **FORMS["int8"])
        backward(params, rank, 0)
        wrapper.step()
        try:
            wrapper.all_gather(torch.zeros(1))
        except PeerError as error:
            return str(error)
        finally:
            go_on.set()
        raise AssertionError("the codes have never come")

    patch_encode(monkeypatch, lambda: go_on.wait(60))
    assert any("no answer within 0:00:02" in text for text in run_threads(2, main))


@pytest.mark.usefixtures("spare_time")
def test_a_wrapper_that_is_collected_by_the_thread_that_codes_still_sends_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> bool:
        wrapper, params = make(group, timeout=20.0, **FORMS["int8"])
        take_steps(wrapper, params, rank, range(4))
        if rank == 1:
            # Raises if the round of the other rank does not come.
            wrapper.synchronize()
            return True
        cycle: list[Any] = [wrapper]
        cycle.append(cycle)
        del wrapper, cycle
        dropped.set()
        return True

    def collect() -> None:
        if dropped.wait(0.3):
            gc.collect()

    patch_encode(monkeypatch, collect)
    assert run_threads(2, main) == [True, True]


def test_rounds_leave_at_once_for_longer_and_longer_after_one_was_waited_for() -> None:
    spare = SpareTime()
    held: list[int] = []
    for step in range(40):
        if spare.begin_round():
            held.append(step)
            spare.note(0.02 if step else 0.001)
    assert held == [0, 1, 10, 27]


def test_a_drop_does_not_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    began, go_on = threading.Event(), threading.Event()

    class Stuck:
        def synchronize(self) -> None:
            began.set()
            go_on.wait(60)

    monkeypatch.setattr(streams, "mark", lambda device: Stuck())
    posting = PostingThread()
    posting.add(lambda: done.append(0), torch.device("cpu"))
    assert began.wait(60)
    posting.drop()
    assert not posting.future.done()
    go_on.set()
    posting.future.result(60)
    assert not done


def test_a_drop_waits_for_the_action_that_has_begun_and_runs_no_other() -> None:
    done: list[int] = []
    began, go_on = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        go_on.wait(60)
        done.append(0)

    posting = PostingThread()
    posting.add(first)
    posting.add(lambda: done.append(1))
    assert began.wait(60)
    threading.Timer(0.05, go_on.set).start()
    posting.drop()
    assert done == [0]
    posting.future.result(60)
    assert done == [0]
