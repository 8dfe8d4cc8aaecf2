"""What every codec promises, and what each makes of values: bytes, codes, differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering_arrays import named, pairwise
from problem import of_guide
from torch import Tensor

from decent_optim_wrapper.codecs import (
    INT2,
    INT3,
    INT4,
    CastCodec,
    Codec,
    Int3Codec,
    Place,
    TopKCodec,
    base,
    codec_of,
    wide,
)
from decent_optim_wrapper.wire.layout import saving

# Elements that are coded at once.
SLICE = base.SLICE


CODECS: dict[str, Any] = {
    "int8": codec_of(torch.int8),
    "int4": codec_of(INT4),
    "int3": codec_of(INT3),
    "int3, means": Int3Codec().of_means(3),
    "int2": codec_of(INT2),
    "bfloat16": codec_of(torch.bfloat16),
    "float16": codec_of(torch.float16),
    "float32": CastCodec(torch.float32),
    "top 16": TopKCodec(16),
    "top 4": TopKCodec(4),
    # One that a user writes.
    "own": of_guide()["Signs"](),
}
EACH = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
# Less than a block, whole blocks, a part of one more, and more than what is coded at once.
SIZES = {str(size): size for size in (1, 255, 256, 257, 383, 384, 385, 1000, SLICE, SLICE + 300)}
DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def draw(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def coded(
    codec: Codec, values: Tensor, reference: Tensor | None = None, before: int = 255
) -> Tensor:
    message = torch.full((codec.nbytes(values.numel()),), before, dtype=torch.uint8)
    codec.encode(values, message, reference)
    return message


def decoded(codec: Codec, message: Tensor, values: Tensor) -> Tensor:
    """As many values as those."""
    parts = codec.decode(message, numel=values.numel(), dtype=wide(values.dtype))
    return torch.cat([part.clone() for _, (part,) in parts])


@pytest.mark.parametrize(("codec", "numel", "dtype"), pairwise(CODECS, SIZES, DTYPES))
def test_a_message_depends_on_the_values_only_and_says_how_large_it_is(
    codec: Codec, numel: int, dtype: torch.dtype
) -> None:
    values = draw(numel, dtype=dtype)
    kept = values.clone()
    message = coded(codec, values)
    assert torch.equal(message, coded(codec, values, before=0)), "every byte is written"
    assert torch.equal(values, kept)
    whole, rest = divmod(numel, codec.block)
    assert message.numel() == codec.nbytes(whole * codec.block) + codec.nbytes(rest)
    assert codec.nbytes(0) == 0
    # What stands for a rank that is left out.
    assert not decoded(codec, torch.zeros_like(message), values).any()
    read = decoded(codec, message, values)
    assert read.dtype == wide(dtype)
    assert torch.equal(read, decoded(codec, message, values))
    assert read.count_nonzero() > 0
    # What is coded at once does not see its neighbours.
    cut = torch.split(values, SLICE // codec.block * codec.block)
    parts = [decoded(codec, coded(codec, part), part) for part in cut]
    assert torch.equal(read, torch.cat(parts))


@pytest.mark.parametrize("least", [700, SLICE + 700])
@EACH
def test_chunks_that_are_coded_at_once_are_decoded_one_by_one(codec: Codec, least: int) -> None:
    """The third of four is not full, the last one empty; the messages lie apart."""
    length = -(-least // codec.block) * codec.block
    values, nbytes = draw(2 * length + 300), codec.nbytes(length)
    room = torch.zeros(4, nbytes + 64, dtype=torch.uint8)
    codec.encode(values, room[:, :nbytes])
    assert not room[3].any()
    assert not room[:, nbytes:].any()
    chunks = torch.split(values, length)
    rows = [
        decoded(codec, row[:nbytes], chunk) for row, chunk in zip(room[:3], chunks, strict=True)
    ]
    for row, chunk in zip(rows, chunks, strict=True):
        assert torch.equal(row, decoded(codec, coded(codec, chunk), chunk))
    together = codec.decode(room[:, :nbytes], numel=len(values), dtype=torch.float32)
    whole = torch.cat([part.clone() for _, (part,) in together])
    assert torch.equal(whole, torch.cat(rows))
    assert whole.count_nonzero() > 0


@pytest.mark.parametrize("numel", [100, 3_000, 9_000, 20_000])
@pytest.mark.parametrize("chunks", [1, 4])
@EACH
def test_a_gpu_codes_whole_slices_at_once_and_writes_the_same(
    codec: Codec, chunks: int, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SLICE", 1 << 11)
    values = draw(numel)
    length = -(-numel // (codec.block * chunks)) * codec.block
    messages = torch.zeros(chunks, codec.nbytes(length), dtype=torch.uint8)

    def through() -> tuple[Tensor, Tensor]:
        codec.encode(values, messages.zero_())
        parts = codec.decode(messages, numel=numel, dtype=torch.float32)
        return messages.clone(), torch.cat([part.clone() for _, (part,) in parts])

    expected, read = through()
    places, counts = type(codec)._places, list[int]()  # noqa: SLF001

    def of_a_gpu(self: Codec, messages: Tensor, numel: int) -> list[Place]:
        found = [*places(self, messages.to("meta"), numel)]
        counts.append(len(found))
        return found

    monkeypatch.setattr(type(codec), "_places", of_a_gpu)
    message, read_there = through()
    assert expected.any()
    assert torch.equal(message, expected)
    assert torch.equal(read_there, read)
    # The whole slices of a chunk, and its rest; however many slices there are.
    assert max(counts) <= 2 * chunks


@EACH
def test_a_message_tells_of_one_value_that_is_not_finite(codec: Codec) -> None:
    values = torch.ones(SLICE + 1, dtype=torch.float64)
    assert codec.is_finite(coded(codec, values))
    # The last one is too large for the scale of a block, and for a cast.
    bad = [*((place, math.nan) for place in (0, 700, SLICE)), (700, math.inf), (SLICE, -math.inf)]
    for place, value in [*bad, (300, 1e300)]:
        values[place] = value
        found = codec.is_finite(coded(codec, values))
        assert found.shape == ()
        assert not found, (place, value)
        values[place] = 1.0


@pytest.mark.parametrize(("codec", "dtype"), pairwise(CODECS, DTYPES))
def test_what_counts_as_finite_is_decoded_as_finite(codec: Codec, dtype: torch.dtype) -> None:
    largest, seen = torch.finfo(dtype).max, set()
    # Up to the last value below, whose scale may be rounded up.
    for size in (1.0, 1e4, *(largest * (1 - 2.0**-place) for place in range(1, 26)), largest):
        values = torch.full((300,), size, dtype=torch.float64).to(dtype)
        values[::2] *= -1
        message = coded(codec, values)
        seen.add(bool(codec.is_finite(message)))
        if codec.is_finite(message):
            read = decoded(codec, message, values)
            assert read.isfinite().all(), size
            # Where it would not save anything, it is not used.
            assert saving(codec, dtype) is None or read.to(dtype).isfinite().all(), size
    assert True in seen


@EACH
def test_the_difference_to_a_reference_is_coded_and_vanishes(codec: Codec) -> None:
    values, reference = draw(1000), draw(1000, seed=1)
    message = coded(codec, values, reference)
    assert torch.equal(message, coded(codec, values - reference))
    assert not torch.equal(message, coded(codec, values))
    start = (values - reference).norm()
    # The reference moves with each message, as in the rounds.
    for _ in range(120):
        reference += decoded(codec, coded(codec, values, reference), values)
    assert (values - reference).norm() < 0.05 * start


Definition = Callable[[Tensor], Tensor]


def cast(dtype: torch.dtype) -> Definition:
    return lambda values: values.to(dtype).to(wide(values.dtype))


def scaled(largest: float) -> Definition:
    """Codes times a scale for every block, whose largest value is the largest code."""

    def read(values: Tensor) -> Tensor:
        parts = []
        for block in torch.split(values.to(wide(values.dtype)), 256):
            scale = (block.abs().max() / largest).to(torch.float32)
            factor = scale.to(block.dtype)
            # What no reciprocal can stand for is coded as zeros.
            codes = (block * factor.reciprocal()).round() if scale >= 2.0**-126 else block * 0.0
            parts.append(codes * factor)
        return torch.cat(parts)

    return read


SCALED = {
    "int8": scaled(127),
    "int4": scaled(7),
}
DEFINITIONS = {
    **SCALED,
    **{name: cast(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")},
}


@pytest.mark.parametrize(("name", "numel", "dtype"), pairwise(named(*DEFINITIONS), SIZES, DTYPES))
def test_codes_follow_their_definition(name: str, numel: int, dtype: torch.dtype) -> None:
    values = draw(numel, seed=numel, dtype=dtype)
    read = decoded(CODECS[name], coded(CODECS[name], values), values)
    assert torch.equal(read, DEFINITIONS[name](values))
    assert len(set(read.tolist())) > min(numel - 1, 2)


@pytest.mark.parametrize("name", SCALED)
def test_each_block_has_its_own_scale_whatever_the_size_of_its_values(name: str) -> None:
    codec, powers = CODECS[name], 10.0 ** torch.arange(-45, 38, dtype=torch.float64)
    values = (powers.repeat_interleave(256) * draw(256 * len(powers), seed=1).double()).float()
    message = coded(codec, values)
    assert codec.is_finite(message)
    read = decoded(codec, message, values)
    assert torch.equal(read, SCALED[name](values))
    kept = [block.count_nonzero() for block in torch.split(read, 256)]
    assert not any(kept[:5])
    assert all(kept[10:])


def of_squares(block: Tensor) -> Tensor:
    return block.square().sum() / block.abs().sum()


def of_largest(block: Tensor) -> Tensor:
    return block.abs().max() / 2.9


# The largest code, and the scale.
COARSE: dict[str, tuple[int, Definition]] = {"int3": (2, of_largest), "int2": (1, of_squares)}


@pytest.mark.parametrize("power", [1, 5])
@pytest.mark.parametrize(("name", "numel", "dtype"), pairwise(named(*COARSE), SIZES, DTYPES))
def test_few_levels_are_whole_multiples_of_a_scale_and_leave_less_than_there_was(
    name: str, numel: int, dtype: torch.dtype, power: int
) -> None:
    """With a power of 5 some values are far larger than the others."""
    values, codec = draw(numel, seed=numel, dtype=dtype) ** power, CODECS[name]
    largest, scale_of = COARSE[name]
    read = decoded(codec, coded(codec, values), values)
    wider, seen = values.to(wide(dtype)), set[float]()
    for block, part in zip(
        *(torch.split(each, codec.block) for each in (wider, read)), strict=True
    ):
        scale = scale_of(block)
        sizes, levels = (block.abs() / scale).clamp(max=largest), (part.abs() / scale).round()
        torch.testing.assert_close(part.abs(), levels * scale)
        assert ((levels - sizes).abs() <= 0.5001).all()
        kept = part != 0
        assert torch.equal(part[kept].sign(), block[kept].sign())
        assert (block - part).norm() < block.norm()
        # So a reference comes near whatever the values are.
        assert name == "int2" or (block - part).abs().max() < 0.32 * block.abs().max()
        seen.update(levels.tolist())
    assert seen <= {*map(float, range(largest + 1))}
    assert numel == 1 or power > 1 or len(seen) == largest + 1


@pytest.mark.parametrize("name", [*COARSE, "int3, means"])
def test_few_levels_send_blocks_of_any_usual_size(name: str) -> None:
    """Squares are the limit: differences of 1e-25 are zeros, and a norm of 1.8e19 is infinite."""
    codec = CODECS[name]
    values = draw(codec.block)
    for size in (1e-20, 1e-10, 1.0, 1e10, 1e17):
        read = decoded(codec, coded(codec, size * values), values)
        assert (values - read / size).norm() < 0.5 * values.norm(), size
    assert name != "int2" or not decoded(codec, coded(codec, 1e-25 * values), values).any()
    assert name != "int2" or not codec.is_finite(coded(codec, 2e18 * values))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["int4", "int3", "int2"])
@pytest.mark.parametrize("largest", [1, 2])
def test_what_was_coded_is_a_mean_that_is_coded_as_it_is(
    name: str, dtype: torch.dtype, largest: int
) -> None:
    """If ranks agree, their mean is what each has sent: they stay together."""
    values = draw(5000, seed=7, dtype=dtype).clamp(-largest, largest)
    sent = decoded(CODECS[name], coded(CODECS[name], values), values)
    assert (sent - values.to(sent.dtype)).norm() > 0.01 * sent.norm()
    again = decoded(means := CODECS[name].of_means(4), coded(means, sent), sent)
    torch.testing.assert_close(again, sent, rtol=2e-6, atol=0)


def test_five_levels_lose_less_than_half_of_what_three_lose() -> None:
    values = draw(1 << 14)
    lost = {
        name: (values - decoded(CODECS[name], coded(CODECS[name], values), values)).square().mean()
        for name in ("int4", *COARSE)
    }
    # Of normally distributed values; 0.08 and 0.19 are the least that so many levels can lose.
    assert 0.08 < lost["int3"] < 0.11
    assert 0.19 < lost["int2"] < 0.21
    assert lost["int4"] < lost["int3"] / 4


@pytest.mark.parametrize("numel", SIZES.values())
@pytest.mark.parametrize("k", [4, 256])
def test_the_largest_elements_of_each_block_are_sent_in_two_bits(k: int, numel: int) -> None:
    # Some values are far larger than the others.
    values, codec = draw(numel, seed=numel) ** 3, TopKCodec(k)
    read = decoded(codec, coded(codec, values), values)
    for block, part in zip(torch.split(values, 256), torch.split(read, 256), strict=True):
        kept, sizes = part != 0, block.abs()
        largest = sizes.topk(min(k, block.numel())).values
        # The error of a smaller one would grow, as it becomes 0.85 times the mean at least.
        padded = largest.sum() / k
        assert torch.equal(
            sizes[kept].sort(descending=True).values, largest[largest >= 0.425 * padded]
        )
        assert kept.all() or sizes[kept].min() >= sizes[~kept].max()
        mean = sizes[kept].mean()
        # The mean is sent as bfloat16.
        away = [(sizes[kept] - level * mean).abs() for level in (0.85, 1.3)]
        assert ((sizes - part.abs())[kept].abs() <= torch.minimum(*away) + 0.01 * mean).all()
        assert torch.equal(part[kept].sign(), block[kept].sign())
        # What is left is less than what was there, so that it is sent in the end.
        assert (block - part).norm() < block.norm()


@pytest.mark.parametrize("numel", [256, 300, 40, 4])
@pytest.mark.parametrize("moved", [1, 3])
@pytest.mark.parametrize(
    "codec",
    [*(CODECS[name] for name in COARSE), CODECS["int3, means"], TopKCodec(4), TopKCodec(64)],
    ids=repr,
)
def test_elements_that_are_as_the_reference_stay_so(codec: Codec, moved: int, numel: int) -> None:
    """As in an embedding of which few rows occur."""
    values = torch.zeros(numel)
    values[-moved:] = draw(moved, seed=moved)
    left = values.clone()
    for _ in range(40):
        read = decoded(codec, coded(codec, left), left)
        assert not read[:-moved].any()
        left -= read
    assert left.norm() < 1e-3 * values.norm()


def test_codecs_of_the_library_are_told_apart_by_their_bytes_and_texts() -> None:
    """The ranks compare the texts; whole blocks are sent, with a scale and perhaps places."""
    of_a_block = {"int8": 260, "int4": 132, "int3": 132, "int2": 68, "top 16": 22, "top 4": 7}
    for name, nbytes in of_a_block.items():
        block = CODECS[name].block
        sizes = [CODECS[name].nbytes(numel) for numel in (1, block, block + 1, block << 12)]
        assert sizes == [nbytes, nbytes, 2 * nbytes, nbytes << 12]
    assert CODECS["bfloat16"].nbytes(3) == CODECS["float16"].nbytes(3) == 6
    assert len({repr(codec) for codec in CODECS.values()}) == len(CODECS)
    assert repr(TopKCodec(16)) == repr(CODECS["top 16"]) == "TopKCodec(k=16)"
    for k in (0, 3, 260):
        with pytest.raises(ValueError, match="k expects a multiple of 4"):
            TopKCodec(k)
    with pytest.raises(ValueError, match=r"torch\.int3, torch\.int2, a Codec or None"):
        codec_of(torch.int16)
    assert codec_of(torch.float32) is None
