"""Old spellings of options warn, and train as the new ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import modules
import pytest
import torch.distributed as dist
from problem import flatten, make_params, nesterov, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import (
    AsItArrives,
    GradientTracking,
    Late,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
)

OUTER = nesterov(0.5)
AUTO: Any = "auto"
TRACKED: dict[str, Any] = {"extensions": [GradientTracking()]}
# Old and new options, and what the warning says to pass.
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "staleness": (
        {"schedule": Schedule(gossip_every=2, staleness=2)},
        {"schedule": Schedule(gossip_every=2), "overlap": Late(2)},
        r"overlap=Late\(steps=2\)",
    ),
    "auto": (
        # Waits for each round, so that it is the same in every run.
        {"schedule": Schedule(gossip_every=AUTO, max_staleness=1), "overlap": True},
        {"overlap": AsItArrives(1)},
        r"overlap=AsItArrives\(max_steps=1\)",
    ),
    "a staleness of 1": ({"schedule": Schedule(staleness=1)}, {}, "nothing"),
    "the default bound alone": ({"schedule": Schedule(max_staleness=16)}, {}, "nothing"),
    "both": (
        {"schedule": Schedule(gossip_every=AUTO, staleness=1, max_staleness=1), "overlap": True},
        {"overlap": AsItArrives(1)},
        r"overlap=AsItArrives\(max_steps=1\)",
    ),
    "tracking": ({"gradient_tracking": True}, TRACKED, "GradientTracking"),
    "outer": (
        {"schedule": Schedule(outer=OUTER), **TRACKED},
        {"extensions": [GradientTracking(), OuterOptimizer(OUTER)]},
        "OuterOptimizer",
    ),
    "average": (
        {"schedule": Schedule(global_avg_every=2, average_state="average")},
        {"schedule": Schedule(global_avg_every=2), "extensions": [StateAverage()]},
        "StateAverage",
    ),
    "names": (
        {"schedule": Schedule(average_state=("momentum_buffer",))},
        {"extensions": [StateGossip("momentum_buffer")]},
        "StateGossip",
    ),
}


def by_steps(rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Tensor:
    params = make_params(seed=rank)
    optimizer = wrap(params, group, topology="ring", **options)
    take_steps(optimizer, params, rank, range(6))
    # How many rounds a call mixes may depend on who comes first.
    end = flatten(params)
    optimizer.synchronize()
    return end


def in_backward(rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Tensor:
    # Their default, which is not that of the tests.
    model = modules.wrap(modules.make_model(rank), group, **{"overlap": None, **options})
    modules.train(model, rank, range(6))
    end = modules.flat(model)
    model.optimizer.synchronize()
    return end


@pytest.mark.parametrize(
    ("train", "spelling"), [*product([by_steps], SPELLINGS), (in_backward, "auto")]
)
def test_an_old_spelling_warns_and_has_the_same_trajectory(
    train: Callable[..., Tensor], spelling: str
) -> None:
    old, new, said = SPELLINGS[spelling]
    ours, plain = (run_threads(2, partial(train, options=each)) for each in (new, {}))
    with pytest.warns(DeprecationWarning, match=f"removed in the next release; pass .*{said}"):
        theirs = run_threads(2, partial(train, options=old))
    assert all(map(Tensor.equal, ours, theirs))
    assert Tensor.equal(ours[0], plain[0]) == (not new)


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        (Schedule(average_state="exp_avg"), "average_state expects one of .* got 'exp_avg'"),
        (Schedule(staleness=2), r"contradicts staleness=2; pass overlap=Late\(steps=2\)"),
        (Schedule(gossip_every=AUTO), "overlap=False contradicts gossip_every='auto'"),
        (Schedule(max_staleness=3), "max_staleness=3 has no meaning without gossip_every=.auto"),
        (Schedule(gossip_every=AUTO, staleness=2), "staleness=2 has no meaning with gossip_every="),
    ],
)
def test_old_spellings_may_not_contradict_the_overlap_or_each_other(
    schedule: Schedule, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        wrap(make_params(), overlap=False, schedule=schedule)


def test_tracking_is_given_up_by_its_old_property() -> None:
    optimizer = wrap(make_params(), extensions=[GradientTracking()])
    assert optimizer.gradient_tracking
    for value in (True, False, False):
        with pytest.warns(DeprecationWarning, match="drop_extension"):
            optimizer.gradient_tracking = value
        assert optimizer.gradient_tracking == bool(optimizer.extensions) == value
