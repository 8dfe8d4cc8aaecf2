"""AccumAdam against torch and its formula, and what all the optimizers have in common."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decent_dp import optim as decent_dp
from dense import oracle
from problem import TINY_CAP_MB, backward, flatten, in_one_call, make_params
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory
from decent_optim_wrapper.optim import QGSGD, AccumAdam, AccumAdamW

Make = Callable[[Sequence[Tensor]], Optimizer]

BOTH = pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW])
ALL_THREE = pytest.mark.parametrize(
    "make",
    [
        partial(AccumAdam, lr=0.05, weight_decay=0.1, accum_iter=3),
        partial(AccumAdamW, lr=0.05, weight_decay=0.1, accum_iter=3),
        partial(QGSGD, lr=0.05, weight_decay=0.1, nesterov=True),
    ],
    ids=["AccumAdam", "AccumAdamW", "QGSGD"],
)
BETA1, BETA2, EPS = 0.8, 0.95, 1e-8


def train(params: Sequence[Tensor], optimizer: Optimizer, steps: range) -> Tensor:
    start = flatten(params)
    for step in steps:
        backward(params, 0, step)
        optimizer.step()
    end = flatten(params)
    assert (end - start).abs().mean() > 1e-3
    return end


def ending(make: Make, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    params = make_params(dtype=dtype)
    return train(params, make(params), range(steps))


@pytest.mark.parametrize(
    ("kind", "of_torch"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)]
)
def test_windows_of_one_step_are_torchs_adam(kind: Any, of_torch: Any) -> None:
    kwargs = {"lr": 0.02, "betas": (BETA1, BETA2), "weight_decay": 0.1}
    ours = ending(partial(kind, accum_iter=1, **kwargs), 100)
    torch.testing.assert_close(ours, ending(partial(of_torch, **kwargs), 100), rtol=0, atol=1e-13)


def accum_by_formula(
    x: float, grads: Sequence[float], s: int, lr: float, decay: float, decoupled: bool
) -> float:
    """One scalar through the definition, gradients given."""
    m = v = b = 0.0
    for t, grad in enumerate(grads, start=1):
        g = grad if decoupled else grad + decay * x
        k = math.ceil(t / s)
        m_hat = (BETA1 * m + (1 - BETA1) * g) / (1 - BETA1**k)
        v_hat = (BETA2 * v + (1 - BETA2) * g * g) / (1 - BETA2**k)
        if decoupled:
            x -= lr * decay * x
        x -= lr * m_hat / (math.sqrt(v_hat) + EPS)
        b += g / s
        if t % s == 0:
            m = BETA1 * m + (1 - BETA1) * b
            v = BETA2 * v + (1 - BETA2) * b * b
            b = 0.0
    return x


@BOTH
@pytest.mark.parametrize("s", [2, 5])
def test_longer_windows_follow_the_formula(kind: Any, s: int) -> None:
    generator = torch.Generator().manual_seed(s)
    grads = torch.randn(23, 6, dtype=torch.float64, generator=generator)
    param = torch.linspace(-2, 2, 6, dtype=torch.float64).requires_grad_()
    expected = [
        accum_by_formula(x, g, s, 0.03, 0.1, kind is AccumAdamW)
        for x, g in zip(param.tolist(), grads.T.tolist(), strict=True)
    ]
    optimizer = kind([param], 0.03, (BETA1, BETA2), EPS, weight_decay=0.1, accum_iter=s)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
    torch.testing.assert_close(param.tolist(), expected, rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.parametrize("s", [1, 4])
def test_decent_dp_agrees(kind: Any, s: int) -> None:
    theirs = getattr(decent_dp, kind.__name__)
    kwargs = {"lr": 0.02, "betas": (BETA1, BETA2), "weight_decay": 0.1, "accum_iter": s}
    ours = ending(partial(kind, **kwargs), 30)
    torch.testing.assert_close(ours, ending(partial(theirs, **kwargs), 30), rtol=0, atol=1e-13)


def make_mixed_params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.float64, torch.complex128, torch.bfloat16)
    shapes = ((3, 2), (), (4,), (2, 2))
    return [
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@BOTH
def test_parameters_of_several_dtypes_are_updated_as_each_alone(kind: Any) -> None:
    """One of them has no gradient in every step."""
    together, apart = make_mixed_params(), make_mixed_params()
    make = partial(kind, lr=0.05, weight_decay=0.1, accum_iter=3)
    optimizers = [make(together), *(make([param]) for param in apart)]
    generator = torch.Generator().manual_seed(2)
    for step in range(14):
        for index, (one, other) in enumerate(zip(together, apart, strict=True)):
            grad = torch.randn(one.shape, dtype=one.dtype, generator=generator)
            one.grad = other.grad = None if index == step % 4 else grad
        for optimizer in optimizers:
            optimizer.step()
    for one, other, start in zip(together, apart, make_mixed_params(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, start)


@BOTH
def test_a_complex_parameter_is_two_real_ones(kind: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    start, *grads = torch.randn(8, 5, 2, dtype=torch.float64, generator=generator)
    real, whole = start.clone(), torch.view_as_complex(start.clone())
    optimizer = kind(
        [real.requires_grad_(), whole.requires_grad_()], weight_decay=0.1, accum_iter=2
    )
    for grad in grads:
        real.grad, whole.grad = grad, torch.view_as_complex(grad)
        optimizer.step()
    assert torch.equal(torch.view_as_real(whole.detach()), real)
    assert not torch.equal(real, start)


@BOTH
def test_maximize_goes_where_negated_gradients_go(kind: Any) -> None:
    def run(sign: int, maximize: bool) -> Tensor:
        param = torch.ones(3, requires_grad=True)
        optimizer = kind([param], lr=0.1, weight_decay=0.1, accum_iter=2, maximize=maximize)
        for step in range(5):
            param.grad = sign * torch.tensor([1.0, -2.0, step])
            optimizer.step()
        return param.detach()

    up = run(1, maximize=True)
    assert torch.equal(up, run(-1, maximize=False))
    assert not torch.equal(up, run(1, maximize=False))


@ALL_THREE
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


@BOTH
def test_counts_are_exact_whatever_the_dtype_of_the_parameters(kind: Any) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = kind(params, accum_iter=2)
    train(params, optimizer, range(5))
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        assert (state["step"], state["position"]) == (2, 1)
        assert state["grad_sum"].dtype == torch.bfloat16


@BOTH
@pytest.mark.parametrize("changed", [1, 2, 6])
def test_a_changed_window_ends_with_the_gradients_it_then_holds(kind: Any, changed: int) -> None:
    grads = torch.arange(1.0, 8.0, dtype=torch.float64)
    param = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimizer = kind([param], betas=(BETA1, BETA2), weight_decay=0.0, accum_iter=4)
    held, exp_avg, exp_avg_sq, windows = [], 0.0, 0.0, 0
    for index, grad in enumerate(grads.tolist()):
        if index == 3:
            optimizer.param_groups[0]["accum_iter"] = changed
        param.grad = grads[index]
        optimizer.step()
        held.append(grad)
        if len(held) >= (4 if index < 3 else changed):
            mean = sum(held) / len(held)
            exp_avg = BETA1 * exp_avg + (1 - BETA1) * mean
            exp_avg_sq = BETA2 * exp_avg_sq + (1 - BETA2) * mean**2
            held, windows = [], windows + 1
    state = optimizer.state[param]
    assert windows >= 1
    assert (state["step"], state["position"]) == (windows, len(held))
    assert state["exp_avg"].item() == pytest.approx(exp_avg, rel=1e-14)
    assert state["exp_avg_sq"].item() == pytest.approx(exp_avg_sq, rel=1e-14)


@ALL_THREE
def test_stepping_parameters_in_parts_is_stepping_them_at_once(make: Make) -> None:
    params = make_params()
    optimizer = make(params)
    group = optimizer.param_groups[0]
    for step in range(8):
        backward(params, 0, step)
        for part in (params[:2], params[2:3], params[3:]):
            group["params"] = part
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        group["params"] = params
    assert torch.equal(flatten(params), ending(make, 8))


@ALL_THREE
def test_a_parameter_without_gradient_is_skipped(make: Make) -> None:
    params = make_params()
    optimizer = make(params)
    for step in range(4):
        backward(params, 0, step)
        params[1].grad = None
        optimizer.step()
    assert torch.equal(params[1], make_params()[1])
    assert not torch.equal(params[2], make_params()[2])
    assert params[1] not in optimizer.state


@ALL_THREE
def test_a_sparse_gradient_is_refused(make: Make) -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse_coo.*\(4, 2\)"):
        make(list(layer.parameters())).step()


@ALL_THREE
def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(make: Make) -> None:
    params = make_params()
    loss = make(params).step(lambda: backward(params, 0, 0).item())
    assert loss == backward(make_params(), 0, 0).item()
    assert not torch.equal(flatten(params), flatten(make_params()))


@ALL_THREE
def test_schedulers_set_the_rate(make: Make) -> None:
    params, by_hand = make_params(), make_params()
    optimizer, other = make(params), make(by_hand)
    scheduler = ExponentialLR(optimizer, 0.5)
    for step in range(6):
        train(params, optimizer, range(step, step + 1))
        scheduler.step()
        other.param_groups[0]["lr"] = 0.05 * 0.5**step
        train(by_hand, other, range(step, step + 1))
    assert torch.equal(flatten(params), flatten(by_hand))


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -1.0}, {"accum_iter": 0}],
)
@BOTH
def test_accum_refuses_numbers_out_of_range(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(make_params(), **wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_a_cuda_graph_is_refused_and_a_plain_step_waits_for_nothing(kind: Any) -> None:
    params = [p.detach().cuda().requires_grad_() for p in make_params()]
    by_hand = make_params()
    optimizer = kind(params, weight_decay=0.1, accum_iter=2)
    other = kind(by_hand, weight_decay=0.1, accum_iter=2)
    for step in range(5):
        backward(by_hand, 0, step)
        for param, host in zip(params, by_hand, strict=True):
            assert host.grad is not None
            param.grad = host.grad.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        other.step()
    torch.testing.assert_close(flatten(params).cpu(), flatten(by_hand), rtol=1e-12, atol=1e-13)
    assert not torch.equal(flatten(by_hand), flatten(make_params()))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.slow
@ALL_THREE
@pytest.mark.parametrize("overlap", [True, False])
def test_the_wrapper_trains_with_it_whole_and_by_bucket(make: Make, overlap: bool) -> None:
    def train_rank(rank: int, group: dist.ProcessGroup, split: bool) -> Tensor:
        params = make_params()
        optimizer = DecentOptimWrapper(
            make(params) if split else in_one_call(make(params)),
            topology="ring",
            bucket_cap_mb=TINY_CAP_MB,
            overlap=overlap,
            process_group=group,
        )
        for step in range(7):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    whole = torch.stack(run_threads(4, partial(train_rank, split=False)))
    parts = torch.stack(run_threads(4, partial(train_rank, split=True)))
    assert torch.equal(whole, parts)
    expected = oracle(TopologyFactory.create("ring", 4), 7, overlap, make)
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-12)
    assert (whole[0] - flatten(make_params())).abs().max() > 0.05
