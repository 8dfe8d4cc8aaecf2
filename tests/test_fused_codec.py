"""The 8-bit codec in fused kernels gives what it gives operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from fake_cuda import fake_cuda
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from decent_optim_wrapper.codecs import Int8Codec, fused, wide

pytestmark = pytest.mark.slow

CODEC = Int8Codec()


@contextmanager
def fused_on_a_cpu() -> Iterator[None]:
    """Use the compiled functions on the CPU, for which torch compiles them, too."""
    # Torch would find out by six compilations which vector instructions there are.
    without_vectors = config.patch({"cpp.vec_isa_ok": False})
    with without_vectors, mock.patch.object(fused.FUSED, "serves", return_value=True):
        yield


def through(values: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """The message of a vector, and what is read from it."""
    message = torch.zeros(CODEC.nbytes(values.numel()), dtype=torch.uint8)
    CODEC.encode(values, message, reference)
    read = torch.zeros(values.numel(), dtype=wide(values.dtype))
    for place, (part,) in CODEC.decode(message, numel=values.numel(), dtype=read.dtype):
        read[place] = part
    return message, read


def vector(dtype: torch.dtype, numel: int) -> Tensor:
    """Values with blocks of tiny ones, of huge ones, and of zeros."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    values[numel // 3 : numel // 2] *= 1e-42
    values[: numel // 5] *= 1e30
    values[numel // 5 : numel // 4] = 0
    return values.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "has_reference"), [(torch.float32, True), (torch.bfloat16, False)]
)
def test_each_direction_is_one_kernel_and_gives_the_same(
    dtype: torch.dtype, has_reference: bool
) -> None:
    values = vector(dtype, 20_001)
    reference = torch.linspace(-1, 1, 20_001) if has_reference else None
    plain, read_plain = through(values, reference)
    with fused_on_a_cpu():
        (message, read), sources = run_and_get_code(through, values, reference)
        # Of another length, too: there it is the same kernel.
        shorter = through(values[:700], None if reference is None else reference[:700])[1]
    assert [source.count("= async_compile") for source in sources[:2]] == [1, 1]
    assert read_plain.count_nonzero() > 10_000
    # A quotient may be rounded in another way, and with it a code at the middle of two.
    different = (message.view(torch.int8) != plain.view(torch.int8)).sum()
    assert different <= 1e-3 * len(message)
    end = 512  # Of the last whole block of the shorter vector.
    assert torch.equal(shorter[:end], read[:end])
    # All ranks must read the same bits, with fused kernels or without.
    for place, (part,) in CODEC.decode(message, numel=20_001, dtype=torch.float32):
        assert torch.equal(part, read[place])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_seen_in_the_message(bad: float) -> None:
    # Of a dtype that is compiled already.
    values = torch.ones(1_000, dtype=torch.bfloat16)
    values[600] = bad
    with fused_on_a_cpu():
        message, _ = through(values, None)
        assert not CODEC.is_finite(message)
        assert CODEC.is_finite(through(torch.ones_like(values), None)[0])


def test_where_torch_cannot_compile_the_values_are_coded_without() -> None:
    calls: list[object] = []

    def fails(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            calls.append(function)
            raise RuntimeError("no compiler")

        return call

    ours, number = fused.Fused(), torch.ones(())
    with (
        fake_cuda("gloo"),
        mock.patch.object(fused, "compiled", fails),
    ):
        on_gpu = torch.ones((), device="cuda")
        assert ours.call(fused.decode, on_gpu) is ours.call(fused.decode, on_gpu) is None
        assert not ours.serves(on_gpu.device)
        assert fused.Fused().call(fused.decode, number) is None
    assert calls == [fused.decode]
