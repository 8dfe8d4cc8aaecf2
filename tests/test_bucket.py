"""Buckets: which tensors share one, in any layout, and what both of their storages promise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from problem import wrap
from ranks import run_threads
from torch import Tensor
from torch.autograd.profiler import profile

from decent_optim_wrapper import Late, Schedule, TopologyFactory
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.plan import plan_buckets


class Elsewhere(Tensor):
    """A tensor that says that it is on another device than the parameters."""

    device = torch.device("meta")


DTYPES = [torch.float32, torch.bfloat16, torch.complex64]


def awkward_tensors(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The first four without gaps, so that they keep their layout in a bucket."""
    draw = partial(torch.randn, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return [
        draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
        draw(6, 4).T,
        draw(()),
        draw(0, 3),
        draw(8)[::2],
    ]


# Pairs, and groups of all.
TOPOLOGY = TopologyFactory.create("alternating-exp-ring", 4, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "every step": {"schedule": Schedule(mixing_rate=0.7)},
    "late": {"overlap": Late(2), "schedule": Schedule(gossip_every=2, mixing_rate=0.7)},
    "int8": {"comm_dtype": torch.int8},
}


@pytest.mark.parametrize(("views", "option"), pairwise(VIEWS, named(*OPTIONS)))
def test_parameters_of_any_layout_and_dtype_are_mixed_as_contiguous_ones(
    views: bool, option: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        def trained(is_contiguous: bool) -> list[Tensor]:
            params = [each for dtype in DTYPES for each in awkward_tensors(dtype, seed=rank)]
            if is_contiguous:
                params = [param.contiguous() for param in params]
            strides = [param.stride() for param in params]
            base = torch.optim.SGD([param.requires_grad_() for param in params], lr=0.0)
            options = {"param_as_bucket_view": views, "sync_at_start": False, **OPTIONS[option]}
            options |= {"topology": TOPOLOGY, "bucket_cap_mb": 600 / 2**20}
            optimizer = wrap(params, group, base, **options)
            assert len(optimizer.buckets) > len(DTYPES)
            start = [param.detach().clone() for param in params]
            for _ in range(4):
                optimizer.step()
            optimizer.synchronize()
            own = [param.detach().clone() for param in params]
            with optimizer.averaged():
                assert not torch.equal(params[0], own[0])
            for index, (param, value) in enumerate(zip(params, own, strict=True)):
                assert torch.equal(param, value)
                # The last one of each dtype has gaps.
                assert param.stride() == strides[index] or index % 5 == 4
                assert not torch.equal(value, start[index]) or not param.numel()
            return own

        for one, other in zip(trained(False), trained(True), strict=True):
            # Sums come in another order, and other values are coded together.
            slack = 0.1 if option == "int8" else 8 * torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=0, atol=slack)

    run_threads(4, main)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_so_that_agreeing_ranks_stay(dtype: torch.dtype) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    (bucket,) = plan_buckets([value.clone()], Layout(25))
    total = bucket.pack(bucket.wire.flat(torch.float32))
    total.data.mul_(7).div_(7)
    bucket.mix_(total, 1.0)
    assert torch.equal(bucket.members[0], value)
    assert not torch.equal(value * 7 / 7, value)


@pytest.mark.parametrize("views", [False, True])
def test_what_a_peer_sent_is_mixed_in_without_memory_of_its_own(views: bool) -> None:
    params = [torch.randn(300, 1000), torch.randn(40), torch.randn(1000, 200)]
    before = [param.clone() for param in params]
    bucket = Bucket(params, Layout(25, as_view=views))
    outgoing, incoming = bucket.pair(needs_snapshot=True)
    bucket.pack(outgoing)
    incoming.data.copy_(torch.randn(bucket.wire.numel))
    parts = [[part.clone() for part in bucket.parts(flat)] for flat in (incoming, outgoing)]
    with profile(profile_memory=True) as noted:
        bucket.shift_(incoming, outgoing, 0.5)
    # Torch makes tensors of numbers.
    largest = max(event.self_cpu_memory_usage for event in noted.function_events)
    assert largest < params[1].nbytes
    for param, old, theirs, ours in zip(params, before, *parts, strict=True):
        torch.testing.assert_close(param, old + 0.5 * (theirs - ours))


@pytest.mark.parametrize("cuts", [[], [100]], ids=["at once", "in slices"])
def test_changes_leave_alone_the_values_that_were_coded(cuts: list[int]) -> None:
    """A round that does not arrive as a whole restores them."""
    params = [torch.randn(32, 10), torch.randn(40)]
    bucket = Bucket(params, Layout(25))
    sent = bucket.values({}, needs_snapshot=False)
    before, changes = sent.data.clone(), torch.randn(360)
    ends = zip([0, *cuts], [*cuts, 360], strict=True)
    bucket.absorb_(((slice(*each), changes[slice(*each)]) for each in ends), 0.5, keeps=True)
    assert torch.equal(sent.data, before)
    torch.testing.assert_close(params[0].flatten(), (before + 0.5 * changes)[:320])
    torch.testing.assert_close(params[1], (before + 0.5 * changes)[320:])


@pytest.mark.parametrize("views", [False, True])
def test_what_passes_through_the_cpu_leaves_alone_what_a_round_in_flight_keeps(views: bool) -> None:
    """As where an average comes between the launch and the mixing of a GPU's round over gloo."""
    params = [torch.randn(32, 10), torch.randn(40)]
    bucket = Bucket(params, Layout(25, as_view=views))
    bucket.via_cpu = True
    kept = bucket.values({}, needs_snapshot=True)
    before = kept.data.clone()
    for param in params:
        param.add_(1.0)
    flat = bucket.wire.new(torch.float32)
    flat = flat._replace(data=flat.data.as_subclass(Elsewhere))
    bucket.pack(flat)
    assert torch.equal(flat.data.as_subclass(Tensor), before + 1.0)
    assert torch.equal(kept.data, before)
    flat.data.fill_(5.0)
    bucket.unpack_(flat)
    assert torch.equal(params[0], torch.full((32, 10), 5.0))
    assert torch.equal(kept.data, before)
