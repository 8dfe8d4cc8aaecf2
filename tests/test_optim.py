"""AccumAdam against its formula, what all optimizers share, and their factories."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from decent_dp import optim as decent_dp
from problem import backward, flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.optim import (
    AccumAdam,
    AccumAdamW,
    AdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)

Make = Callable[[Sequence[Tensor]], Optimizer]

BOTH = pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW])
MAKERS: dict[str, Make] = {
    "AccumAdam": partial(AccumAdam, lr=0.05, weight_decay=0.1, accum_iter=3),
    "AccumAdamW": partial(AccumAdamW, lr=0.05, weight_decay=0.1, accum_iter=3),
    "AdamW": partial(AdamW, lr=0.05, weight_decay=0.1, ranks=4, amsgrad=True),
}
ALL_KINDS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
LR, BETA1, BETA2, EPS, DECAY = 0.03, 0.8, 0.95, 1e-8, 0.1


def train(params: Sequence[Tensor], optimizer: Optimizer, steps: range) -> Tensor:
    start = flatten(params)
    take_steps(optimizer, params, 0, steps)
    end = flatten(params)
    assert (end - start).abs().mean() > 1e-3
    return end


def ending(make: Make, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    params = make_params(dtype=dtype)
    return train(params, make(params), range(steps))


@pytest.mark.parametrize(
    ("kind", "reference", "accum_iter"),
    [
        (AccumAdam, torch.optim.Adam, 1),
        (AccumAdamW, torch.optim.AdamW, 1),
        (AccumAdam, partial(decent_dp.AccumAdam, accum_iter=4), 4),
        (AccumAdamW, partial(decent_dp.AccumAdamW, accum_iter=4), 4),
    ],
)
def test_windows_of_one_step_are_torchs_adam_and_longer_ones_decent_dps(
    kind: Any, reference: Any, accum_iter: int
) -> None:
    kwargs = {"lr": 0.02, "betas": (BETA1, BETA2), "weight_decay": 0.1}
    ours = ending(partial(kind, accum_iter=accum_iter, **kwargs), 60)
    torch.testing.assert_close(ours, ending(partial(reference, **kwargs), 60), rtol=0, atol=1e-13)


def accum_by_formula(
    x: Tensor, grads: Sequence[Tensor], sizes: Sequence[int], decoupled: bool
) -> tuple[Tensor, int, int]:
    """What the definition makes of it, and its counts of windows and of gradients in the last."""
    m = v = torch.zeros_like(x)
    windows = 0
    window: list[Tensor] = []
    for grad, size in zip(grads, sizes, strict=True):
        g = grad if decoupled else grad + DECAY * x
        m_hat = (BETA1 * m + (1 - BETA1) * g) / (1 - BETA1 ** (windows + 1))
        v_hat = (BETA2 * v + (1 - BETA2) * g * g) / (1 - BETA2 ** (windows + 1))
        if decoupled:
            x = x - LR * DECAY * x
        x = x - LR * m_hat / (v_hat.sqrt() + EPS)
        window.append(g)
        if len(window) >= size:
            b = torch.stack(window).mean(0)
            m = BETA1 * m + (1 - BETA1) * b
            v = BETA2 * v + (1 - BETA2) * b * b
            windows, window = windows + 1, []
    return x, windows, len(window)


def reals(tensor: Tensor) -> Tensor:
    """Its values in float64: a complex parameter is two real ones."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


@BOTH
@pytest.mark.parametrize(
    ("size", "changed", "maximize"),
    [(2, 2, False), (5, 5, True), (4, 1, False), (4, 2, True), (4, 6, False)],
)
def test_longer_windows_follow_the_formula(
    kind: Any, size: int, changed: int, maximize: bool
) -> None:
    """A window whose length is changed ends with the gradients that it has then.

    The parameters, of several dtypes, have gradients in other steps.
    """
    generator = torch.Generator().manual_seed(size)
    draw = partial(torch.randn, generator=generator)
    dtypes = {torch.float64: 1e-13, torch.complex128: 1e-13, torch.float32: 1e-5}
    params = [draw(3, dtype=dtype).requires_grad_() for dtype in dtypes]
    starts = [reals(param).clone() for param in params]
    sign = -1 if maximize else 1
    options = {"weight_decay": DECAY, "maximize": maximize}
    optimizer = kind(params, LR, (BETA1, BETA2), EPS, **options)
    grads: list[list[Tensor]] = [[] for _ in params]
    sizes: list[list[int]] = [[] for _ in params]
    for step in range(31):
        accum_iter = optimizer.param_groups[0]["accum_iter"] = size if step < 4 else changed
        for index, param in enumerate(params):
            param.grad = None
            if index != step % 4:
                grad = draw(3, dtype=param.dtype)
                param.grad = sign * grad
                grads[index].append(reals(grad))
                sizes[index].append(accum_iter)
        optimizer.step()
        for param, given in zip(params, grads, strict=True):
            assert param.grad is None or torch.equal(sign * reals(param.grad), given[-1])
    each = zip(params, dtypes.values(), starts, grads, sizes, strict=True)
    for param, tolerance, x, given, lengths in each:
        expected, *counts = accum_by_formula(x, given, lengths, kind is AccumAdamW)
        torch.testing.assert_close(reals(param), expected, rtol=tolerance, atol=tolerance)
        assert counts == [optimizer.state[param]["step"], optimizer.state[param]["position"]]


@ALL_KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_resumed_run_continues_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    # 7 steps are two windows and a third of one.
    params = make_params(dtype=dtype)
    optimizer = make(params)
    train(params, optimizer, range(7))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), params], file)
    file.seek(0)
    saved_state, saved_params = torch.load(file, weights_only=True)
    resumed = make(saved_params)
    resumed.load_state_dict(saved_state)
    straight = train(params, optimizer, range(7, 14))
    assert torch.equal(train(saved_params, resumed, range(7, 14)), straight)


@ALL_KINDS
def test_a_closure_is_evaluated_and_a_parameter_without_gradient_is_skipped(make: Make) -> None:
    params = make_params()
    optimizer = make(params)

    def closure() -> float:
        loss = backward(params, 0, 0)
        params[1].grad = None
        return loss.item()

    assert optimizer.step(closure) == backward(make_params(), 0, 0).item()
    assert torch.equal(params[1], make_params()[1])
    assert not torch.equal(params[2], make_params()[2])
    assert params[1] not in optimizer.state
    after = flatten(params)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(flatten(params), after)


WRONG = {
    AccumAdam: ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"accum_iter": 0}),
    AccumAdamW: ({"weight_decay": -1.0},),
    AdamW: ({"ranks": 0}, {"ranks": 1.5}, {"betas": (0.0, 0.99)}),
}


def test_weights_decay_as_in_torch_unless_told_otherwise() -> None:
    for kind, torchs in ((AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)):
        found, expected = (make(make_params()) for make in (kind, torchs))
        assert found.defaults["weight_decay"] == expected.defaults["weight_decay"]


@pytest.mark.parametrize(
    ("kind", "wrong"), [(kind, wrong) for kind, rows in WRONG.items() for wrong in rows]
)
def test_numbers_out_of_range_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(make_params(), **wrong)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}], ids=str
)
def test_adamw_of_one_rank_is_torchs_bit_for_bit(options: dict[str, Any]) -> None:
    options = {"lr": LR, "weight_decay": DECAY, **options}
    ours, torchs, four = (
        ending(partial(make, **options), 20)
        for make in (partial(AdamW, ranks=1), torch.optim.AdamW, partial(AdamW, ranks=4))
    )
    assert torch.equal(ours, torchs)
    assert (four - ours).abs().max() > 1e-3


def adamw_by_formula(x: Tensor, grads: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """What the definition makes of it; `counts` are the n of each step."""
    b = m = v = torch.zeros_like(x)
    for t, (g, n) in enumerate(zip(grads, counts, strict=True), 1):
        decay = (n - 1) / (n + 1)
        b = b + (1 - decay) / (1 - decay**t) * (g - b)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * b * b
        root = (v / (1 - BETA2**t)).sqrt() + EPS
        x = (1 - LR * DECAY) * x - LR * m / (1 - BETA1**t) / root
    return x


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}], ids=str)
def test_adamw_follows_its_formula_also_when_the_number_of_ranks_changes(
    options: dict[str, Any], maximize: bool
) -> None:
    """The parameters, of several dtypes, have gradients in other steps; one has its own n."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(5))
    dtypes = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5}
    params = [draw(3, dtype=dtype).requires_grad_() for dtype in dtypes]
    starts = [reals(param).clone() for param in params]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "ranks": 8}]
    optimizer = AdamW(
        groups, LR, betas=(BETA1, BETA2), weight_decay=DECAY, maximize=maximize, **options
    )
    grads: list[list[Tensor]] = [[] for _ in params]
    counts: list[list[int]] = [[] for _ in params]
    for step in range(30):
        members = 4 if step < 20 else 16
        optimizer.set_members(members)
        for index, param in enumerate(params):
            param.grad = None
            if index != step % 4:
                grad = draw(3, dtype=param.dtype)
                param.grad = -grad if maximize else grad
                grads[index].append(reals(grad))
                counts[index].append(8 if index == 2 else members)
        optimizer.step()
        for param, given in zip(params, grads, strict=True):
            # Gradients stay as they are.
            assert param.grad is None or torch.equal(reals(param.grad).abs(), given[-1].abs())
    for param, tolerance, x, given, numbers in zip(
        params, dtypes.values(), starts, grads, counts, strict=True
    ):
        expected = adamw_by_formula(x, given, numbers)
        torch.testing.assert_close(reals(param), expected, rtol=tolerance, atol=tolerance)


def test_adamw_goes_on_from_torchs_state_and_refuses_beta_zero_in_an_added_group() -> None:
    params = make_params()
    torchs = torch.optim.AdamW(params, lr=LR)
    train(params, torchs, range(5))
    optimizer = AdamW(params, lr=LR, ranks=4)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["ranks"] == 4
    assert train(params, optimizer, range(5, 9)).isfinite().all()
    assert {"short_avg", "exp_avg"} <= optimizer.state[params[0]].keys()
    with pytest.raises(ValueError, match=r"betas\[0\] must be a number above 0"):
        optimizer.add_param_group({"params": [torch.ones(2)], "betas": (0.0, 0.9)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_the_short_average_begins_as_the_first_moment_after_steps_without_it(sign: int) -> None:
    param = torch.zeros(3, dtype=torch.float64)
    optimizer = AdamW([param], lr=LR, maximize=sign < 0)

    def step(ranks: int, size: float, count: int) -> None:
        optimizer.set_members(ranks)
        for _ in range(count):
            param.grad = torch.full_like(param, sign * size)
            optimizer.step()

    step(4, 100.0, 5)
    step(1, 1.0, 200)
    assert "short_avg" not in optimizer.state[param]
    step(16, 1.0, 1)
    torch.testing.assert_close(optimizer.state[param]["short_avg"], param.grad)


@pytest.mark.parametrize(("own", "saved"), [(8, 4), (8, None), (None, 4)])
def test_the_number_of_ranks_of_adamw_is_not_loaded(own: int | None, saved: int | None) -> None:
    params = make_params()
    optimizers = [AdamW([{"params": params, "ranks": n}], lr=LR) for n in (saved, own)]
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].param_groups[0]["ranks"] == own


def test_a_compiled_step_of_adamw_moves_its_averages_in_each_step() -> None:
    """Of gradients and numbers of ranks that change."""

    def run(compiles: bool) -> Tensor:
        params = make_params()
        optimizer, steps = AdamW(params, lr=LR), list[int]()
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        if compiles:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        for step in range(10):
            optimizer.set_members(4 if step < 6 else 8)
            backward(params, rank=0, step=step)
            optimizer.step()
        assert len(steps) == 10
        return flatten(params)

    assert torch.equal(run(compiles=True), run(compiles=False))
    assert (run(compiles=False) - flatten(make_params())).abs().max() > LR


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("ranks", [None, 4])
def test_a_copy_of_adamw_goes_on_as_the_original(
    make_copy: Callable[[AdamW], AdamW], ranks: int | None
) -> None:
    params = make_params()
    optimizer = AdamW(params, lr=LR, ranks=ranks)
    train(params, optimizer, range(3))
    copied = make_copy(optimizer)
    copied_params = copied.param_groups[0]["params"]
    ends = [train(copied_params, copied, range(3, 6)), train(params, optimizer, range(3, 6))]
    assert torch.equal(*ends)
    assert copied_params[0] is not params[0]


def test_adamw_is_differentiable() -> None:
    def end(scale: Tensor) -> Tensor:
        param = torch.zeros(3, dtype=torch.float64).requires_grad_()
        optimizer = AdamW([param], lr=LR, ranks=4, differentiable=True)
        optimizer.param_groups[0]["params"] = moved = [param.clone()]
        for step in range(1, 4):
            moved[0].grad = scale * step + 1
            optimizer.step()
        return moved[0]

    scale = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(end, (scale,))
    assert torch.autograd.grad(end(scale).sum(), scale)[0].abs().min() > 1e-4


def test_gradients_of_adamw_are_unscaled_also_for_a_group_with_its_own_ranks() -> None:
    """Scaled ones would get into its averages, whatever the fused kernel unscales."""

    def run(factor: float) -> Tensor:
        params = make_params()
        base = AdamW([{"params": params, "ranks": 8}], lr=LR, ranks=1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=factor, enabled=factor > 1)
        for step in range(3):
            backward(params, rank=0, step=step)
            for param in params:
                assert param.grad is not None
                param.grad *= factor
            # Sets up the scaler.
            scaler.scale(torch.zeros(()))
            scaler.step(base)
            scaler.update()
        return flatten(params)

    assert torch.equal(run(2.0**10), run(1.0))


@pytest.mark.parametrize(
    ("optim_fn", "kind", "decay"),
    [
        (optim_fn_adam, torch.optim.Adam, 1 / 32768),
        (optim_fn_adamw, torch.optim.AdamW, 0.1),
        (optim_fn_accum_adam, AccumAdam, 1 / 32768),
        (optim_fn_accum_adamw, AccumAdamW, 0.1),
    ],
)
def test_a_factory_lets_weights_decay_and_not_biases_and_norms_and_partial_sets_the_rest(
    optim_fn: Any, kind: Any, decay: float
) -> None:
    """decent-dp has it the other way round."""
    weights = {"fc.weight": (3, 2), "subnet.0.weight": (2, 2, 3, 3)}
    others = {
        "fc.bias": (3,),
        "scale": (),
        "layers.0.weight": (3,),
        "final_norm.weight": (4, 4),
        "layer1.bn2.weight": (1, 4, 1),
        "attention.relative_position_bias_table": (9, 2),
    }
    shapes = weights | others
    made = {name: torch.ones(shapes[name], requires_grad=True) for name in shapes}
    given = {"lr": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4}
    given |= {"accum_iter": 7} if issubclass(kind, AccumAdam) else {}
    usual, changed = optim_fn([*made.items()]), partial(optim_fn, **given)([*made.items()])
    for optimizer, expected in ((usual, decay), (changed, 0.4)):
        assert type(optimizer) is kind
        groups = optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [expected, 0.0]
        for group, names in zip(groups, (weights, others), strict=True):
            assert [*map(id, group["params"])] == [id(made[name]) for name in names]
    for group in changed.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 0.3)
        assert group.get("accum_iter") == given.get("accum_iter")
    (only,) = optim_fn([("fc.bias", made["fc.bias"])]).param_groups
    assert only["weight_decay"] == 0.0


@mock.patch("torch.cuda.is_available", return_value=True)
@mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
def test_accum_is_not_captured_in_a_cuda_graph(*_: Any) -> None:
    params = make_params()
    with pytest.raises(RuntimeError, match="AccumAdam cannot be captured"):
        take_steps(AccumAdam(params), params, 0, range(1))


def rates_of(schedule: Any, steps: int, lr: float = 0.1, resumes: bool = False) -> list[float]:
    """The rate of each step of a run that may be resumed after every step."""

    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD(make_params(), lr=lr)

    optimizer = make()
    scheduler = schedule(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    while len(rates) < steps:
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if resumes:
            saved, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(saved)
            saved, scheduler = scheduler.state_dict(), schedule(optimizer)
            scheduler.load_state_dict(saved)
    return rates


def test_the_schedule_warms_up_anneals_and_stays() -> None:
    schedule = partial(
        lr_scheduler_fn_cosine_with_warmup,
        t_max=8,
        t_warmup=4,
        cosine_eta_min=0.02,
        warmup_decay=0.2,
    )
    rates = rates_of(schedule, 16)
    half = [0.02 + 0.04 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, *half, 0.02, 0.02, 0.02])
    assert rates_of(partial(schedule, t_warmup=0), 9) == pytest.approx(half)
    assert rates_of(schedule, 16, lr=0.0) == [0.0] * 16
    assert rates_of(schedule, 16, resumes=True) == rates
    for t_max, t_warmup in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="t_max >= 1"):
            rates_of(partial(schedule, t_max=t_max, t_warmup=t_warmup), 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_adamw_takes_the_number_of_ranks_from_its_wrapper(ranks: int) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        ends = []
        for count in (None, ranks, 1):
            params = make_params(seed=rank)
            base = AdamW(params, lr=LR, ranks=count)
            optimizer = wrap(params, group, base=base, topology="ring")
            take_steps(optimizer, params, rank, range(5))
            optimizer.synchronize()
            ends.append(flatten(params))
        return ends

    for from_wrapper, given, one in run_threads(ranks, main):
        assert torch.equal(from_wrapper, given)
        assert (from_wrapper - one).abs().max() > LR / 10
