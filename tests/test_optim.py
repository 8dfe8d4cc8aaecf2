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
from problem import backward, flatten, in_one_call, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.optim import QGSGD, AccumAdam, AccumAdamW

Make = Callable[[Sequence[Tensor]], Optimizer]

BOTH = pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW])
MAKERS: dict[str, Make] = {
    "AccumAdam": partial(AccumAdam, lr=0.05, weight_decay=0.1, accum_iter=3),
    "AccumAdamW": partial(AccumAdamW, lr=0.05, weight_decay=0.1, accum_iter=3),
    "QGSGD": partial(QGSGD, lr=0.05, weight_decay=0.1, nesterov=True),
}
ALL_THREE = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
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
    x: float, grads: Sequence[float], sizes: Sequence[int], decoupled: bool
) -> tuple[float, int, int]:
    """One scalar through the definition, and its counts of windows and of gradients in the last."""
    m = v = 0.0
    windows = 0
    held: list[float] = []
    for grad, size in zip(grads, sizes, strict=True):
        g = grad if decoupled else grad + DECAY * x
        m_hat = (BETA1 * m + (1 - BETA1) * g) / (1 - BETA1 ** (windows + 1))
        v_hat = (BETA2 * v + (1 - BETA2) * g * g) / (1 - BETA2 ** (windows + 1))
        if decoupled:
            x -= LR * DECAY * x
        x -= LR * m_hat / (math.sqrt(v_hat) + EPS)
        held.append(g)
        if len(held) >= size:
            b = sum(held) / len(held)
            m = BETA1 * m + (1 - BETA1) * b
            v = BETA2 * v + (1 - BETA2) * b * b
            windows, held = windows + 1, []
    return x, windows, len(held)


@BOTH
@pytest.mark.parametrize(("size", "changed"), [(2, 2), (5, 5), (4, 1), (4, 2), (4, 6)])
def test_longer_windows_follow_the_formula(kind: Any, size: int, changed: int) -> None:
    """A window whose length is changed ends with the gradients that it then holds."""
    generator = torch.Generator().manual_seed(size)
    grads = torch.randn(23, 6, dtype=torch.float64, generator=generator)
    sizes = [size] * 3 + [changed] * 20
    param = torch.linspace(-2, 2, 6, dtype=torch.float64).requires_grad_()
    expected = [
        accum_by_formula(x, g, sizes, kind is AccumAdamW)
        for x, g in zip(param.tolist(), grads.T.tolist(), strict=True)
    ]
    optimizer = kind([param], LR, (BETA1, BETA2), EPS, weight_decay=DECAY)
    for grad, accum_iter in zip(grads, sizes, strict=True):
        optimizer.param_groups[0]["accum_iter"] = accum_iter
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
    state = optimizer.state[param]
    for (x, *counts), value in zip(expected, param.tolist(), strict=True):
        assert value == pytest.approx(x, rel=1e-13, abs=1e-13)
        assert counts == [state["step"], state["position"]]


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
def test_a_complex_parameter_is_two_real_ones_and_maximizing_is_minimizing_the_negative(
    kind: Any,
) -> None:
    generator = torch.Generator().manual_seed(3)
    start, *grads = torch.randn(8, 5, 2, dtype=torch.float64, generator=generator)
    real, whole = start.clone(), torch.view_as_complex(start.clone())
    options = {"lr": 0.1, "weight_decay": 0.1, "accum_iter": 2}
    optimizers = kind([real], maximize=True, **options), kind([whole], **options)
    for grad in grads:
        real.grad, whole.grad = -grad, torch.view_as_complex(grad)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(whole), real)
    assert not torch.equal(real, start)


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


@ALL_THREE
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


@ALL_THREE
def test_a_sparse_gradient_is_refused(make: Make) -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse_coo.*\(4, 2\)"):
        make(list(layer.parameters())).step()


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
@pytest.mark.parametrize(
    ("make", "overlap"), [*zip(MAKERS.values(), (True, False, True), strict=True)], ids=MAKERS
)
def test_the_wrapper_trains_with_it_whole_and_by_bucket(make: Make, overlap: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        ends = []
        for change in (in_one_call, lambda base: base):
            params = make_params()
            optimizer = wrap(params, group, change(make(params)), topology="ring", overlap=overlap)
            take_steps(optimizer, params, rank, range(7))
            optimizer.synchronize()
            ends.append(flatten(params))
        assert torch.equal(*ends)
        return ends[0]

    rows = torch.stack(run_threads(4, main))
    expected = oracle(TopologyFactory.create("ring", 4), 7, overlap, make)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
    assert (rows[0] - flatten(make_params())).abs().max() > 0.05
