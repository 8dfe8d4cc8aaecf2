"""Codes are those of their definitions, element by element."""

from __future__ import annotations

import pytest
import torch
from covering import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec_contract import DTYPES, coded, decoded, draw
from torch import Tensor

from decent_optim_wrapper.codecs import INT4, TopKCodec, codec_of, wide

LEVELS = {torch.int8: 127, INT4: 7}
# Less than a block, whole blocks, more than a slice of 2^17.
SIZES = [1, 255, 256, 257, 1000, (1 << 17) + 300]


def by_definition(values: Tensor, levels: int) -> Tensor:
    """s k for every block: the largest value is L steps away from 0."""
    result = []
    for block in torch.split(values.to(wide(values.dtype)), 256):
        scale = (block.abs().max() / levels).to(torch.float32).to(block.dtype)
        codes = torch.round(block * scale.reciprocal()) if scale else torch.zeros_like(block)
        result.append(scale * codes)
    return torch.cat(result)


@pytest.mark.parametrize(
    ("kind", "dtype", "numel"),
    pairwise({"int8": torch.int8, "int4": INT4}, DTYPES, {str(size): size for size in SIZES}),
)
def test_codes_are_those_of_the_definition(
    kind: torch.dtype, dtype: torch.dtype, numel: int
) -> None:
    values = draw(numel, seed=numel, dtype=dtype)
    codec = codec_of(kind)
    read = decoded(codec, coded(codec, values), values)
    assert torch.equal(read, by_definition(values, LEVELS[kind]))
    assert len(set(read.tolist())) > min(numel - 1, 2)


@pytest.mark.parametrize(("kind", "per_element"), [(torch.int8, 1 + 1 / 64), (INT4, 0.5 + 1 / 64)])
def test_a_message_holds_one_code_per_element_and_one_scale_per_block(
    kind: torch.dtype, per_element: float
) -> None:
    codec = codec_of(kind)
    assert codec.nbytes(1 << 20) == per_element * (1 << 20)
    assert codec.nbytes(1) == codec.nbytes(256) == codec.nbytes(257) / 2 == per_element * 256


@settings(deadline=None, max_examples=60)
@given(
    exponents=st.lists(st.integers(-45, 37), min_size=1, max_size=5),
    numel=st.integers(1, 900),
    kind=st.sampled_from([torch.int8, INT4]),
    seed=st.integers(0, 1000),
)
def test_no_element_is_off_by_more_than_half_a_step_of_its_block(
    exponents: list[int], numel: int, kind: torch.dtype, seed: int
) -> None:
    values = draw(numel, seed, torch.float64)
    for index, exponent in enumerate(exponents):
        values[256 * index : 256 * (index + 1)] *= 10.0**exponent
    values = values.to(torch.float32)
    codec = codec_of(kind)
    message = coded(codec, values)
    assert codec.is_finite(message)
    away = (decoded(codec, message, values) - values).double().abs()
    for block, errors in zip(torch.split(values, 256), torch.split(away, 256), strict=True):
        step = block.double().abs().max() / LEVELS[kind]
        # What no float32 scale can stand for is coded as zeros.
        assert errors.max() <= step * (0.5 + 1e-4) or step < 2.0**-125


@pytest.mark.parametrize("kind", [torch.int8, INT4])
def test_what_no_scale_can_stand_for_is_not_finite(kind: torch.dtype) -> None:
    codec = codec_of(kind)
    assert not codec.is_finite(coded(codec, torch.full((3,), 1e300, dtype=torch.float64)))


@pytest.mark.parametrize("numel", SIZES)
def test_float8_keeps_three_bits_of_what_is_large_in_a_block(numel: int) -> None:
    values = draw(numel, seed=numel) * 100
    codec = codec_of(torch.float8_e4m3fn)
    assert codec.nbytes(512) == 520
    read = decoded(codec, coded(codec, values), values)
    scales = torch.cat([b.abs().max().expand(b.numel()) for b in torch.split(values, 256)])
    # Half a step of the mantissa, or of what is below the smallest exponent.
    bound = torch.maximum(values.abs() / 16, scales / 448 * 2.0**-10)
    assert ((read - values).abs() <= bound * (1 + 1e-5)).all()
    assert numel == 1 or not torch.equal(read, values)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("k", [4, 256])
def test_the_largest_elements_of_each_block_are_sent_as_they_are(k: int, numel: int) -> None:
    values = draw(numel, seed=numel)
    codec = TopKCodec(k)
    assert codec.nbytes(512) == 2 * 5 * k
    read = decoded(codec, coded(codec, values), values)
    for block, part in zip(torch.split(values, 256), torch.split(read, 256), strict=True):
        kept = part != 0
        assert int(kept.sum()) == min(k, block.numel())
        assert torch.equal(part[kept], block[kept])
        if not kept.all():
            assert block.abs()[kept].min() >= block.abs()[~kept].max()


@pytest.mark.parametrize("k", [0, 3, 260])
def test_a_number_of_elements_that_no_message_can_hold_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k expects a multiple of 4"):
        TopKCodec(k)
