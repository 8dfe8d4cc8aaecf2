"""What a thread posts or codes later, or a GPU sends, is mixed as what is posted at once."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from fake_cuda import WAYS, mark_buckets, post_by_a_thread
from modules import Training
from problem import backward, flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, GradientTracking, Late, PeerError, Schedule
from decent_optim_wrapper.codecs import INT4, Codec
from decent_optim_wrapper.comm.streams import PostingThread

pytestmark = pytest.mark.slow

INT8 = {"topology": "ring", "comm_dtype": torch.int8}
# Each once, and codes both between pairs and as means of more: options, topology and views.
FORMS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "plain": ({}, "ring", True),
    "bf16, skip": ({"comm_dtype": torch.bfloat16, "on_nonfinite": "skip"}, "complete", False),
    "int8": ({"comm_dtype": torch.int8}, "complete", False),
    "int4, late": (
        {"comm_dtype": INT4, "schedule": Schedule(gossip_every=2), "overlap": Late(2)},
        *("ring", False),
    ),
    "exact": ({"schedule": Schedule(global_avg_every=2), "on_nonfinite": "skip"}, "ring", False),
    "int8, tracking": (
        {"comm_dtype": torch.int8, "extensions": [GradientTracking()]},
        *("ring", False),
    ),
    "tracking": ({"extensions": [GradientTracking()]}, "complete", True),
    "int8, whole": ({"comm_dtype": torch.int8, "overlap": False}, "ring", True),
}


def make(group: dist.ProcessGroup, **options: Any) -> tuple[DecentOptimWrapper, list[Tensor]]:
    params = make_params(dtype=torch.float32)
    wrapper = wrap(params, group, **options)
    assert len(wrapper.buckets) > 1
    return wrapper, params


def train(
    rank: int, group: dist.ProcessGroup, loads: bool, **options: Any
) -> tuple[Tensor, list[Any]]:
    """Train, perhaps go back to a state, look at averages and train on; all values and states."""
    wrapper, params = make(group, **options)
    rows: list[Tensor] = []
    saved: dict[int, tuple[Any, list[Tensor]]] = {}
    for position, step in enumerate((0, 1, 2, 3, 2, 3, 4)):
        backward(params, rank, step)
        wrapper.step()
        assert step != 1 or wrapper.stats().bytes_sent > 0 or "schedule" in options
        rows.append(flatten(params))
        if position in (1, 2):
            values = [param.detach().clone() for param in params]
            saved[position] = copy.deepcopy(wrapper.state_dict()), values
        if loads and position == 3:
            state, values = saved[1]
            with torch.no_grad():
                wrapper.load_state_dict(copy.deepcopy(state))
                torch._foreach_copy_(params, values)
        if position == 5:
            # Collectives on the communicator on which a thread may still post.
            rows.append(wrapper.all_gather(torch.ones(1, dtype=torch.float64)).flatten())
            rows.append(torch.tensor([wrapper.consensus_distance()]))
            with wrapper.averaged():
                rows.append(flatten(params))
    wrapper.synchronize()
    assert torch.equal(rows[3], rows[5]) == loads
    assert not torch.equal(rows[2], rows[3])
    return torch.cat([*rows, flatten(params)]), [state for state, _ in saved.values()]


def patch_encode(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run this before every coding."""
    encode = Codec.encode

    def patched(self: Codec, *args: Any) -> None:
        run()
        encode(self, *args)

    monkeypatch.setattr(Codec, "encode", patched)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_sent_in_another_way_is_mixed_and_saved_as_what_is_posted_at_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, topology, views = FORMS[form]
    options = {**others, "topology": topology, "param_as_bucket_view": views}
    draws = random.Random(0)

    def run(loads: bool) -> list[tuple[Tensor, list[Any]]]:
        size = 4 if topology == "ring" else 3
        return run_threads(size, lambda rank, group: train(rank, group, loads, **options))

    def code_late(patch: pytest.MonkeyPatch) -> None:
        patch_encode(patch, lambda: time.sleep(draws.choice((0.0, 0.002, 0.01))))

    ways = {name: way for name, way in WAYS.items() if name != "at once"}
    if "int" in form:
        ways["coded late"] = code_late
    if topology == "complete" and "comm_dtype" in options:
        # NCCL sends whole values in larger groups.
        del ways["on a GPU"]
    # A GPU finds the messages of a round that is dropped; gloo in its place does not.
    usual = {loads: run(loads) for loads in {name != "on a GPU" for name in ways}}
    for name, way in ways.items():
        loads = name != "on a GPU"
        with monkeypatch.context() as patch:
            way(patch)
            found = run(loads)
        rtol, atol = (0.0, 0.0) if loads else (1e-5, 1e-6)
        for one, expected in zip(found, usual[loads], strict=True):
            torch.testing.assert_close(
                one, expected, rtol=rtol, atol=atol, msg=f"{name}: {{}}".format
            )


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
    way: str, topology: str, views: bool, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"topology": topology, "comm_dtype": comm}

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        training = Training(rank, group, way, param_as_bucket_view=views, **options)
        training.train(range(4))
        return training.end()

    size = 2 if topology == "ring" else 3
    expected = run_threads(size, main)
    post_by_a_thread(monkeypatch)
    assert all(map(torch.equal, run_threads(size, main), expected))


def test_sums_come_in_the_same_order_whatever_a_thread_posts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=torch.float32) + make_params(seed=1)
        wrapper = wrap(params, group, topology="complete")
        take_steps(wrapper, params, rank, range(5))
        wrapper.synchronize()
        return flatten(params)

    expected = run_threads(4, main)
    post_by_a_thread(monkeypatch)
    # As of a model with parameters on the GPU and on the CPU.
    mark_buckets(monkeypatch, "via_cpu", lambda each: each.dtype == torch.float32)
    assert all(map(torch.equal, run_threads(4, main), expected))
    assert not torch.equal(expected[0], flatten(make_params(dtype=torch.float32) + make_params()))


def first_error(rank: int, group: dist.ProcessGroup, steps: int, **options: Any) -> str:
    """What ends the training; nothing if all steps are made."""
    wrapper, params = make(group, timeout=60.0, **options)
    for step in range(steps):
        backward(params, rank, step)
        try:
            wrapper.step()
        except (ValueError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_the_round_of_a_lost_peer_is_dropped_with_what_is_not_posted_yet(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = mock.create_autospec(PostingThread.abandon, side_effect=PostingThread.abandon)
    post_by_a_thread(monkeypatch)
    monkeypatch.setattr(PostingThread, "abandon", drop)
    launched = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> str:
        wrapper, params = make(group, timeout=60.0, topology=topology)
        take_steps(wrapper, params, rank, range(3))
        if rank == 1:
            # A peer that is lost before has no thread in this round.
            assert launched.wait(60)
            return ""
        take_steps(wrapper, params, rank, range(3, 4))
        launched.set()
        with pytest.raises(PeerError) as error:
            take_steps(wrapper, params, rank, range(4, 20))
        return str(error.value)

    lost, _ = run_threads(2, main)
    # As soon as the peer has closed its connections.
    assert "no answer within" not in lost
    assert drop.called


def test_what_fails_in_the_coding_of_a_rank_is_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coded = itertools.count()

    def fail() -> None:
        # On one of the ranks, in the fourth round.
        if next(coded) == 20:
            raise ValueError("no memory for codes")

    patch_encode(monkeypatch, fail)
    texts = run_threads(2, lambda rank, group: first_error(rank, group, 10, **INT8))
    own, peer = sorted(texts, reverse=True)
    assert own == "ValueError: no memory for codes"
    assert peer.startswith("PeerError")
    assert "ValueError: no memory for codes" in peer


@pytest.mark.parametrize("waits", [True, False])
def test_a_drop_waits_for_the_action_that_has_begun_unless_it_waits_and_runs_no_other(
    waits: bool,
) -> None:
    done, began, opened = list[int](), threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert opened.wait(60)

    def act() -> None:
        if not waits:
            block()
        done.append(0)

    posting = PostingThread()
    posting.add(act, block if waits else None)
    posting.add(lambda: done.append(1))
    assert began.wait(60)
    if not waits:
        threading.Timer(0.05, opened.set).start()
    posting.abandon()
    assert opened.is_set() != waits
    opened.set()
    posting.future.result(60)
    assert done == ([] if waits else [0])
