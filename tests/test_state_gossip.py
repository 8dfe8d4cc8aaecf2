"""Entries of the base's state that are mixed with the parameters: ranks without them, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import MODES, adamw, backward, flatten, make_params, sgd, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from warned import warned_texts

from decent_optim_wrapper import Schedule

NAMES = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_an_entry_leaves_those_of_the_others_as_they_are(mode: str) -> None:
    """One skips its first updates, as GradScaler makes it do, and one has no gradient for long."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor | None:
        params = make_params()
        base = torch.optim.AdamW(params, lr=0.0)
        options: Any = {"topology": "ring", "schedule": Schedule(average_state=NAMES)}
        optimizer = wrap(params, group, base, **options, **MODES[mode])
        for step in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            if rank == 1:
                params[1].grad = None
            overflow = torch.tensor(float(rank == 2 and step < 2))
            vars(optimizer).update(found_inf=overflow, grad_scale=None)
            optimizer.step()
        optimizer.synchronize()
        assert ("exp_avg_sq" in base.state[params[1]]) == (rank != 1)
        return None if rank == 1 else flatten([base.state[p]["exp_avg_sq"] for p in params])

    def after(updates: int) -> float:
        """The entries of a rank alone."""
        return 1 - 0.999**updates

    for entries in run_threads(4, main):
        # Nothing was mixed with zeros, but with what rank 2 has after its two updates.
        if entries is not None:
            assert (entries > 0.99 * after(2)).all()
            assert (entries < 0.99 * after(4)).all()


def test_a_rank_that_is_left_out_takes_only_entries_that_the_others_have() -> None:
    """And still tells them which entries it has itself."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        base = adamw(params)
        schedule = Schedule(average_state=("exp_avg",))
        optimizer = wrap(params, group, base, schedule=schedule, on_nonfinite="skip")
        for step in range(5):
            backward(params, rank, step)
            if rank == 1 and step < 3:
                params[1].grad = None
            optimizer.step()
            if (rank, step) == (0, 1):
                base.state[params[1]]["exp_avg"].fill_(float("nan"))
        optimizer.synchronize()
        return [base.state[param]["exp_avg"] for param in params]

    one, other = run_threads(2, main)
    assert one[1].isfinite().all()
    # Mixed again once both have it.
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert flatten(one).abs().max() > 1e-3


def step_with(**options: Any) -> None:
    params = make_params()
    take_steps(wrap(params, schedule=Schedule(**options)), params, 0, [0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"average_state": ("no",)}, RuntimeError, r"\['momentum_buffer'\], got 'no'"),
        ({"average_state": NAMES, "gossip_every": 2, "staleness": 2}, ValueError, "second moments"),
        ({"average_state": NAMES, "gossip_every": "auto"}, ValueError, "second moments"),
        ({"average_state": ()}, TypeError, "average_state"),
        ({"average_state": (1,)}, TypeError, "average_state"),
    ],
)
def test_late_rounds_and_what_are_no_entries_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        step_with(**options)


class ScheduleFree(torch.optim.SGD):
    """As those of Defazio et al., whose own iterate z has to be mixed, too, to converge."""


def test_an_iterate_that_is_not_mixed_is_warned_of() -> None:
    params = make_params()
    with warned_texts() as texts:
        wrap(params, None, ScheduleFree(params, lr=0.1))
        wrap(params, None, ScheduleFree(params, lr=0.1), schedule=Schedule(average_state=("z",)))
        wrap(params, None, sgd(params))
    (text,) = texts
    assert 'average_state=("z",)' in text
