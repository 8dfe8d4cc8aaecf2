"""Buckets: which tensors share one, and what both of their storages promise, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decent_optim_wrapper.wire.bucket import Bucket, all_finite, as_real
from decent_optim_wrapper.wire.layout import MIB, Layout
from decent_optim_wrapper.wire.plan import extend_plan, plan_buckets
from decent_optim_wrapper.wire.storage import Flat

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def awkward_tensors(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.randn(6, 4, dtype=dtype).T,
        torch.randn((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(8, dtype=dtype)[::2],
    ]


# What is drawn holds in test_properties.py; here are the limits themselves.
@pytest.mark.parametrize(
    ("numels", "cap_bytes", "expected"),
    [
        ([25] * 5, 200, [[0, 1], [2, 3], [4]]),
        ([25] * 5, 199, [[0], [1], [2], [3], [4]]),
        ([2, 1000, 2, 2], 64, [[0], [1], [2, 3]]),
    ],
)
def test_a_bucket_is_filled_up_to_the_cap_and_a_larger_tensor_has_its_own(
    numels: list[int], cap_bytes: int, expected: list[list[int]]
) -> None:
    tensors = [torch.empty(numel) for numel in numels]
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    buckets = plan_buckets(tensors, Layout(cap_bytes / MIB))
    assert [[index[id(member)] for member in bucket.members] for bucket in buckets] == expected


@pytest.mark.parametrize(("cap_mb", "first"), [(8, 2), (1, 1), (None, 1)])
@pytest.mark.parametrize("expert", [1, MIB])
def test_what_a_forward_pass_needs_first_is_a_small_bucket_if_others_are_larger(
    cap_mb: float | None, first: int, expert: int
) -> None:
    """Of the tensors in buckets: a rank may have an expert of any size in front of them."""
    tensors = [torch.empty(MIB * 2 // 5, dtype=torch.uint8) for _ in range(5)]
    order = (torch.empty(expert, dtype=torch.uint8), *tensors)
    layout = Layout(cap_mb, order=tuple(reversed(order)), forward_order=order)
    *_, last = plan_buckets(tensors, layout)
    assert [*last.members] == tensors[:first][::-1]


def test_buckets_of_late_parameters_are_as_large_as_those_of_the_model() -> None:
    sizes = [32 * MIB, *[MIB - 1] * 4]
    tensors = [torch.empty(size // 4, requires_grad=True) for size in sizes]
    layout = Layout(None, as_view=True, forward_order=tuple(tensors))
    buckets = extend_plan((), tensors[:1], layout)
    _, *late = extend_plan(buckets, tensors, layout)
    assert [len(bucket.members) for bucket in late] == [2, 2]


def test_a_bucket_of_one_tensor_owns_its_wire_buffer() -> None:
    tensor = torch.ones(7)
    (bucket,) = plan_buckets([tensor], Layout(25))
    bucket.pack(bucket.pair()[0]).data.mul_(5)
    assert torch.equal(tensor, torch.ones(7))


class Held:
    """A bucket of tensors in awkward layouts, with what they were before.

    Args:
        dtype: of all of them.
        views: whether they are views of the bucket's storage.
    """

    def __init__(self, dtype: torch.dtype, views: bool) -> None:
        self.tensors = awkward_tensors(dtype)
        self.before = [tensor.clone() for tensor in self.tensors]
        self.views = views
        # Those without gaps keep their layout in either case.
        dense = [tensor.stride() for tensor in self.tensors[:4]]
        (self.bucket,) = plan_buckets(self.tensors, Layout(25, as_view=views))
        self.strides = [tensor.stride() for tensor in self.tensors]
        assert self.strides[:4] == dense
        assert self.is_unchanged

    @property
    def is_unchanged(self) -> bool:
        return all(map(torch.equal, self.tensors, self.before))

    def flat(self, change: Callable[[Tensor], Tensor]) -> Flat:
        """A flat vector with what the tensors were, changed."""
        flat = self.bucket.new_flat()
        flat.data.zero_()
        for part, tensor in zip(self.bucket.parts(flat), self.before, strict=True):
            value = change(tensor)
            part.copy_(torch.view_as_real(value) if value.is_complex() else value)
        return flat


@pytest.fixture(params=product(DTYPES, (False, True)), ids=str)
def held(request: pytest.FixtureRequest) -> Held:
    return Held(*request.param)


def test_packing_keeps_every_layout_and_what_agrees_stays_bit_for_bit(held: Held) -> None:
    bucket, tensors = held.bucket, held.tensors
    flat = bucket.pack(bucket.new_flat())
    if not held.views:
        # Elements come in their logical order, whatever the layout.
        elements = torch.cat([tensor.flatten() for tensor in held.before])
        assert torch.equal(flat.data, as_real(elements).flatten())
    again = bucket.pack(bucket.new_flat(), {tensors[2]: tensors[2] + 1})
    for tensor in tensors:
        tensor.zero_()
    bucket.unpack_(flat)
    assert held.is_unchanged
    assert held.before[0].abs().sum() > 0
    for weight in (0.1, 0.5, 2 / 3, 1.0):
        bucket.mix_(flat, weight)
        assert held.is_unchanged, weight
    bucket.unpack_(again)
    assert torch.equal(tensors[2], held.before[2] + 1)
    assert torch.equal(tensors[0], held.before[0])
    assert [tensor.stride() for tensor in tensors] == held.strides


def halves(flat: Flat) -> list[tuple[slice, Tensor]]:
    middle = len(flat.data) // 2
    places = (slice(0, middle), slice(middle, len(flat.data)))
    return [(place, flat.data[place]) for place in places]


# What is called with vectors of changed values, and what that does to a value.
CHANGES: dict[str, tuple[Callable[[Bucket, Any], None], Callable[[Tensor], Tensor]]] = {
    "mix": (
        lambda bucket, flat: bucket.mix_(flat(lambda old: 0 * old + 2), 0.25),
        lambda old: 0.75 * old + 0.5,
    ),
    "shift": (
        lambda bucket, flat: bucket.shift_(flat(lambda old: 2 * old + 1), flat(torch.clone), 0.5),
        lambda old: 1.5 * old + 0.5,
    ),
    "add": (lambda bucket, flat: bucket.add_(flat(torch.ones_like), -0.5), lambda old: old - 0.5),
    "absorb": (
        lambda bucket, flat: bucket.absorb_(halves(flat(torch.ones_like)), 0.5),
        lambda old: old + 0.5,
    ),
    "replace": (
        lambda bucket, flat: bucket.unpack_(bucket.joined(halves(flat(lambda old: 3 * old)))),
        lambda old: 3 * old,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_that_of_its_formula_and_autograd_hears_of_it(held: Held, change: str) -> None:
    versions = [tensor._version for tensor in held.tensors]
    make, expected = CHANGES[change]
    make(held.bucket, held.flat)
    for tensor, old in zip(held.tensors, held.before, strict=True):
        wide = torch.complex128 if old.is_complex() else torch.float64
        eps = 2 * torch.finfo(old.dtype).eps
        torch.testing.assert_close(tensor.to(wide), expected(old.to(wide)), rtol=eps, atol=eps)
    assert not torch.equal(held.tensors[0], held.before[0])
    assert [tensor.stride() for tensor in held.tensors] == held.strides
    assert all(new._version > old for new, old in zip(held.tensors, versions, strict=True))


def test_values_that_are_not_finite_are_found(held: Held) -> None:
    assert held.bucket.is_finite()
    held.tensors[4][-1] = float("-inf")
    assert not held.bucket.is_finite()
    others = plan_buckets([torch.ones(2), torch.zeros(0, dtype=torch.float64)], Layout(25))
    assert all_finite([others[0], held.bucket, others[1]]) == [True, False, True]


def test_a_new_storage_is_named_with_views_and_another_dtype_always(held: Held) -> None:
    bucket, tensors = held.bucket, held.tensors
    assert bucket.relocated() == []
    tensors[0].data = tensors[0] * 2
    assert [id(each) for each in bucket.relocated()] == [id(tensors[0])] * held.views
    if not held.views:
        # The new one is sent.
        flat, doubled = bucket.pack(bucket.new_flat()), held.flat(lambda old: old * 2)
        assert torch.equal(bucket.parts(flat)[0], bucket.parts(doubled)[0])
    other = torch.float64 if tensors[1].dtype is torch.float32 else torch.float32
    tensors[1].data = tensors[1].real.to(other)
    assert id(tensors[1]) in map(id, bucket.relocated())


def test_the_storage_itself_is_sent_if_the_values_stay_until_it_has_arrived(held: Held) -> None:
    for needs_snapshot in (False, True):
        outgoing, incoming = held.bucket.pair(needs_snapshot)
        held.bucket.pack(outgoing)
        sent = outgoing.data.clone()
        assert torch.equal(held.bucket.values({}, needs_snapshot).data, sent)
        incoming.data.fill_(7)
        held.tensors[0].mul_(2)
        assert torch.equal(outgoing.data, sent) == (needs_snapshot or not held.views)
    assert held.bucket.is_sent_in_place == held.views


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_so_that_agreeing_ranks_stay(dtype: torch.dtype) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    (bucket,) = plan_buckets([value.clone()], Layout(25))
    total = bucket.pack(bucket.summing()[0])
    total.data.mul_(7).div_(7)
    bucket.mix_(total, 1.0)
    assert torch.equal(bucket.members[0], value)
    assert not torch.equal(value * 7 / 7, value)


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


@pytest.mark.parametrize("views", [False, True])
def test_what_a_peer_sent_is_mixed_in_without_memory_of_its_own(views: bool) -> None:
    params = [torch.randn(300, 1000), torch.randn(40), torch.randn(1000, 200)]
    before = [param.clone() for param in params]
    bucket = Bucket(params, Layout(25, as_view=views))
    outgoing, incoming = bucket.pair(needs_snapshot=True)
    bucket.pack(outgoing)
    incoming.data.copy_(torch.randn(bucket.flat_numel))
    parts = [[part.clone() for part in bucket.parts(flat)] for flat in (incoming, outgoing)]
    with Largest() as noted:
        bucket.shift_(incoming, outgoing, 0.5)
    assert noted.numel == 0
    for param, old, theirs, ours in zip(params, before, *parts, strict=True):
        torch.testing.assert_close(param, old + 0.5 * (theirs - ours))
