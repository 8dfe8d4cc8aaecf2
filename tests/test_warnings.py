"""A warning names the line of the user's script that has to be changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, Masters, backward, make_params, sgd, wrap
from ranks import run_threads
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, DecentralizedDataParallel

OWN_COPY = "rank 0: Masters keeps its own copy of the weights"


def in_module(name: str, source: str, **names: Any) -> Any:
    """What a library's `function` would be."""
    namespace = {"__name__": name, **names}
    exec(compile(source, f"{name}.py", "exec"), namespace)
    return namespace["function"]


def in_a_training_loop(rank: int, group: dist.ProcessGroup) -> None:
    params = make_params(dtype=torch.float32)
    optimizer = wrap(params, group, Masters(params, lr=0.005))
    # It wraps the step, in a frame of its own.
    LambdaLR(optimizer, lambda step: 1.0)
    fit = in_module("lightning.pytorch.loops", "def function(step):\n    step()\n")
    for _ in range(30):
        backward(params, rank, 0)
        fit(optimizer.step)


def in_a_backward_pass(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = DecentralizedDataParallel(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda named: Masters([param for _, param in named], lr=0.005),
        process_group=group,
        update_in_backward=False,
        bucket_size_in_mb=TINY_CAP_MB,
    )
    for _ in range(30):
        model(torch.full((2, 3), rank + 1.0)).square().mean().backward()


def from_other_seeds(rank: int, group: dist.ProcessGroup) -> None:
    DecentOptimWrapper(sgd(make_params(seed=rank)), process_group=group)


def alone(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:  # Each rank would warn.
        DecentOptimWrapper(sgd(make_params()))


@pytest.mark.parametrize(
    ("main", "words", "line"),
    [
        (in_a_training_loop, OWN_COPY, "fit(optimizer.step)"),
        (in_a_backward_pass, OWN_COPY, ".backward()"),
        (from_other_seeds, "tensors by rank: {1: 5} (of 5)", "DecentOptimWrapper("),
        (alone, "WORLD_SIZE=4", "DecentOptimWrapper("),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_warning_is_given_once_and_points_at_the_line_of_the_user(
    main: Callable[[int, dist.ProcessGroup], None],
    words: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run_threads(2, main)
    (warning,) = (each for each in record if words in str(each.message))
    assert Path(warning.filename).name == Path(__file__).name
    lines, first = inspect.getsourcelines(main)
    assert [text for text in lines if line in text] == [lines[warning.lineno - first]]
