"""Buckets: which tensors share one, and what both of their storages promise, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import VIEWS, pairwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decent_optim_wrapper.wire.bucket import Bucket, all_finite
from decent_optim_wrapper.wire.layout import MIB, Layout
from decent_optim_wrapper.wire.plan import plan_buckets

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


class Held:
    """A bucket of tensors in awkward layouts, with what they were before.

    Args:
        dtype: of all of them.
        views: whether they are views of the bucket's storage.
    """

    def __init__(self, dtype: torch.dtype, views: bool) -> None:
        self.tensors = awkward_tensors(dtype)
        self.before = [tensor.clone() for tensor in self.tensors]
        self.strides = [tensor.stride() for tensor in self.tensors]
        (self.bucket,) = plan_buckets(self.tensors, Layout(25, as_view=views))
        assert all(map(torch.equal, self.tensors, self.before))
        if not views:
            assert [tensor.stride() for tensor in self.tensors] == self.strides
        self.strides = [tensor.stride() for tensor in self.tensors]

    def flat(self, change: Callable[[Tensor], Tensor]) -> Any:
        """A flat vector with what the tensors were, changed."""
        flat = self.bucket.new_flat()
        flat.data.zero_()
        for part, tensor in zip(self.bucket.parts(flat), self.before, strict=True):
            value = change(tensor)
            part.copy_(torch.view_as_real(value) if value.is_complex() else value)
        return flat

    def check(self, expected: Callable[[Tensor], Tensor]) -> None:
        """Compare with what the old values become in double precision."""
        for tensor, old in zip(self.tensors, self.before, strict=True):
            wide = torch.complex128 if old.is_complex() else torch.float64
            eps = 2 * torch.finfo(old.dtype).eps
            torch.testing.assert_close(tensor.to(wide), expected(old.to(wide)), rtol=eps, atol=eps)
        assert [tensor.stride() for tensor in self.tensors] == self.strides
        assert not torch.equal(self.tensors[0], self.before[0])


STORAGE = pairwise({str(dtype): dtype for dtype in DTYPES}, VIEWS)
BOTH = pytest.mark.parametrize(("dtype", "views"), STORAGE)


@BOTH
def test_packing_and_unpacking_keeps_every_layout(dtype: torch.dtype, views: bool) -> None:
    held = Held(dtype, views)
    flat = held.bucket.pack(held.bucket.new_flat())
    again = held.bucket.pack(held.bucket.new_flat(), {held.tensors[2]: held.tensors[2] + 1})
    for tensor in held.tensors:
        tensor.zero_()
    held.bucket.unpack_(flat)
    assert all(map(torch.equal, held.tensors, held.before))
    assert held.before[0].abs().sum() > 0
    held.bucket.unpack_(again)
    assert torch.equal(held.tensors[2], held.before[2] + 1)
    assert torch.equal(held.tensors[0], held.before[0])
    assert [tensor.stride() for tensor in held.tensors] == held.strides


def mix(held: Held) -> None:
    held.bucket.mix_(held.flat(lambda old: torch.full_like(old, 2)), 0.25)


def shift(held: Held) -> None:
    ours = held.flat(lambda old: old)
    held.bucket.shift_(held.flat(lambda old: 2 * old + 1), ours, 0.5)


def add(held: Held) -> None:
    held.bucket.add_(held.flat(torch.ones_like), -0.5)


def absorb(held: Held) -> None:
    data = held.flat(torch.ones_like).data
    middle = len(data) // 2
    places = (slice(0, middle), slice(middle, len(data)))
    held.bucket.absorb_(((place, data[place]) for place in places), 0.5)


def replace(held: Held) -> None:
    data = held.flat(lambda old: 3 * old).data
    held.bucket.absorb_([(slice(0, len(data)), data)], None)


def whole(old: Tensor) -> Tensor:
    return torch.full_like(old, 1 + 0j if old.is_complex() else 1)


# What each does to a value.
CHANGES: dict[str, tuple[Callable[[Held], None], Callable[[Tensor], Tensor]]] = {
    "mix": (mix, lambda old: 0.75 * old + 0.25 * 2 * whole(old)),
    "shift": (shift, lambda old: old + 0.5 * (old + whole(old))),
    "add": (add, lambda old: old - 0.5 * whole(old)),
    "absorb": (absorb, lambda old: old + 0.5 * whole(old)),
    "replace": (replace, lambda old: 3 * old),
}


@pytest.mark.parametrize(
    ("dtype", "views", "change"),
    pairwise({str(dtype): dtype for dtype in DTYPES}, VIEWS, CHANGES),
)
def test_a_change_is_that_of_its_formula_and_autograd_hears_of_it(
    dtype: torch.dtype, views: bool, change: Any
) -> None:
    held = Held(dtype, views)
    versions = [tensor._version for tensor in held.tensors]
    make, expected = change
    make(held)
    held.check(expected)
    assert all(new._version > old for new, old in zip(held.tensors, versions, strict=True))


@BOTH
def test_values_that_are_not_finite_are_found(dtype: torch.dtype, views: bool) -> None:
    held = Held(dtype, views)
    assert held.bucket.is_finite()
    held.tensors[4][-1] = float("-inf")
    assert not held.bucket.is_finite()
    others = plan_buckets([torch.ones(2), torch.zeros(0, dtype=torch.float64)], Layout(25))
    assert all_finite([others[0], held.bucket, others[1]]) == [True, False, True]


@BOTH
def test_tensors_that_were_converted_are_named_and_replaced_views_too(
    dtype: torch.dtype, views: bool
) -> None:
    held = Held(dtype, views)
    assert held.bucket.relocated() == []
    held.tensors[0].data = held.tensors[0].clone()
    assert [id(each) for each in held.bucket.relocated()] == [id(held.tensors[0])] * views
    other = torch.float64 if dtype is torch.float32 else torch.float32
    held.tensors[1].data = held.tensors[1].real.to(other)
    assert id(held.tensors[1]) in map(id, held.bucket.relocated())


@BOTH
def test_the_storage_itself_is_sent_if_the_values_stay_until_it_has_arrived(
    dtype: torch.dtype, views: bool
) -> None:
    held = Held(dtype, views)
    for needs_snapshot in (False, True):
        outgoing, incoming = held.bucket.pair(needs_snapshot)
        held.bucket.pack(outgoing)
        sent = outgoing.data.clone()
        assert torch.equal(held.bucket.values({}, needs_snapshot).data, sent)
        incoming.data.fill_(7)
        held.tensors[0].mul_(2)
        assert torch.equal(outgoing.data, sent) == (needs_snapshot or not views)
    assert bool(held.bucket.versions()) == views


@pytest.mark.parametrize("weight", [0.1, 0.5, 2 / 3, 1.0])
@BOTH
def test_what_agrees_stays_bit_for_bit(dtype: torch.dtype, views: bool, weight: float) -> None:
    held = Held(dtype, views)
    held.bucket.mix_(held.bucket.pack(held.bucket.new_flat()), weight)
    assert all(map(torch.equal, held.tensors, held.before))


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
