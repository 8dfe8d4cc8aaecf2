"""Buckets: layout, packing and mixing, without communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decent_optim_wrapper.wire.bucket import MIB, Bucket, Layout, plan_buckets

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def members(buckets: tuple[Bucket, ...], tensors: list[Tensor]) -> list[list[int]]:
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    return [[index[id(member)] for member in bucket.members] for bucket in buckets]


def awkward_tensors(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.randn(6, 4, dtype=dtype).T,
        torch.randn((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(8, dtype=dtype)[::2],
    ]


def test_a_bucket_is_filled_up_to_the_cap_and_no_further() -> None:
    tensors = [torch.empty(25, dtype=torch.float32) for _ in range(5)]
    assert members(plan_buckets(tensors, Layout(200 / MIB)), tensors) == [[0, 1], [2, 3], [4]]
    assert members(plan_buckets(tensors, Layout(199 / MIB)), tensors) == [[0], [1], [2], [3], [4]]


def test_a_tensor_beyond_the_cap_is_a_bucket_of_its_own() -> None:
    tensors = [torch.empty(n) for n in (2, 1000, 2, 2)]
    assert members(plan_buckets(tensors, Layout(64 / MIB)), tensors) == [[0], [1], [2, 3]]


def test_dtypes_never_share_a_bucket_and_buckets_follow_their_first_tensor() -> None:
    tensors = [torch.empty(3, dtype=dtype) for dtype in DTYPES * 2]
    plan = plan_buckets(tensors, Layout(25))
    assert members(plan, tensors) == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    assert all(len({tensor.dtype for tensor in bucket.members}) == 1 for bucket in plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_and_unpacking_keeps_every_layout(dtype: torch.dtype) -> None:
    tensors = awkward_tensors(dtype)
    before = [tensor.clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    (bucket,) = plan_buckets(tensors, Layout(25))
    flat = bucket.pack(bucket.new_flat())
    for tensor in tensors:
        tensor.zero_()
    bucket.unpack_(flat)
    assert all(map(torch.equal, tensors, before))
    assert before[0].abs().sum() > 0
    assert [tensor.stride() for tensor in tensors] == strides


def test_the_order_on_the_wire_does_not_depend_on_the_memory_layout() -> None:
    image = torch.randn(2, 3, 4, 5)
    (plain,) = plan_buckets([image], Layout(25))
    (last,) = plan_buckets([image.to(memory_format=torch.channels_last)], Layout(25))
    assert torch.equal(plain.pack(plain.new_flat()).data, last.pack(last.new_flat()).data)


@pytest.mark.parametrize("numel", [1, 7])
def test_a_bucket_of_one_tensor_owns_its_wire_buffer(numel: int) -> None:
    tensor = torch.ones(numel)
    (bucket,) = plan_buckets([tensor], Layout(25))
    bucket.pack(bucket.pair().outgoing).data.mul_(5)
    assert torch.equal(tensor, torch.ones(numel))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixing_is_the_weighted_mean(dtype: torch.dtype) -> None:
    tensors = awkward_tensors(dtype)
    before = [tensor.clone() for tensor in tensors]
    (bucket,) = plan_buckets(tensors, Layout(25))
    flat = bucket.new_flat()
    flat.data.fill_(2)
    bucket.mix_(flat, 0.25)
    for tensor, old in zip(tensors, before, strict=True):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = 0.75 * old.to(wide) + 0.25 * (2 + 2j if dtype.is_complex else 2)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(tensor.to(wide), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0.1, 0.5, 2 / 3, 1.0])
def test_what_agrees_stays_bit_for_bit(dtype: torch.dtype, weight: float) -> None:
    tensors = awkward_tensors(dtype)
    before = [tensor.clone() for tensor in tensors]
    (bucket,) = plan_buckets(tensors, Layout(25))
    bucket.mix_(bucket.pack(bucket.new_flat()), weight)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_so_that_agreeing_ranks_stay(dtype: torch.dtype) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    (bucket,) = plan_buckets([value.clone()], Layout(25))
    total = bucket.pack(bucket.summing()[0])
    total.data.mul_(7).div_(7)
    bucket.mix_(total, 1.0)
    assert torch.equal(bucket.members[0], value)
    assert not torch.equal(value * 7 / 7, value)


def test_a_replaced_storage_is_followed() -> None:
    tensor = torch.zeros(3, dtype=torch.complex64)
    (bucket,) = plan_buckets([tensor], Layout(25))
    tensor.data = torch.full((3,), 1 + 2j)
    assert bucket.pack(bucket.new_flat()).data.tolist() == [1, 2] * 3


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of a result that is in memory of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        known = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.numel = max(self.numel, result.numel())
        return result


def test_what_a_peer_sent_is_mixed_in_without_a_copy_of_the_bucket() -> None:
    params = [torch.randn(30, 40), torch.randn(40), torch.randn(20, 60)]
    before = [param.clone() for param in params]
    bucket = Bucket(params, Layout(25))
    outgoing, incoming = bucket.pair()
    bucket.pack(outgoing)
    incoming.data.copy_(torch.randn(bucket.numel))
    with Largest() as largest:
        bucket.shift_(incoming, outgoing, 0.5)
    assert largest.numel == 1200
    for param, old, theirs, ours in zip(
        params, before, incoming.views, outgoing.views, strict=True
    ):
        torch.testing.assert_close(param, old + 0.5 * (theirs - ours).float())
