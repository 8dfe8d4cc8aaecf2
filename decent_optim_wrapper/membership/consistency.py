"""The start: prove that all ranks train the same thing in the same way, and from the same values.

Nothing that arrives is unpickled: descriptions travel as UTF-8 bytes in tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decent_optim_wrapper.comm.state_transfer import share_text
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.bucket import Layout, plan_buckets
from decent_optim_wrapper.gossip.storage import overlapping
from decent_optim_wrapper.membership.start import exchange
from decent_optim_wrapper.topo import Topology


class Named(NamedTuple):
    """A tensor and what to call it in an error."""

    kind: str
    name: str
    tensor: Tensor

    def describe(self) -> str:
        """One line with everything in which ranks must agree on the tensor."""
        frozen = ", frozen" if self.kind == "parameter" and not self.tensor.requires_grad else ""
        shape, device = tuple(self.tensor.shape), self.tensor.device.type
        return f"{self.kind} {self.name}: {self.tensor.dtype} {shape} on {device}{frozen}"


def named_parameters(param_groups: Sequence[dict[str, Any]]) -> list[Named]:
    """The parameters in their groups' order, by name where the optimizer was given names."""
    named = []
    for number, group in enumerate(param_groups):
        names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        named += [Named("parameter", *pair) for pair in zip(names, group["params"], strict=True)]
    return named


def named_buffers(buffers: Any) -> list[Named]:
    """The tensors by number.

    Raises:
        TypeError: they are no iterable of tensors.
    """
    if isinstance(buffers, Tensor) or not isinstance(buffers, Iterable):
        kind = "a single one" if isinstance(buffers, Tensor) else repr(buffers)
        raise TypeError(f"buffers expects several tensors (model.buffers()), got {kind}")
    named = [Named("buffer", str(number), tensor) for number, tensor in enumerate(buffers)]
    for each in named:
        if not isinstance(each.tensor, Tensor):
            kind = type(each.tensor).__name__
            raise TypeError(f"buffers expects tensors (model.buffers()), got a {kind}")
    return named


def check_tensors(named: Sequence[Named]) -> None:
    """Make sure that every parameter is a dense tensor with memory of its own.

    Raises:
        TypeError: one is made of other tensors.
        ValueError: names one that is not dense, or two that overlap and would be mixed twice.
    """
    check_dense(named)
    distinct = list({id(each.tensor): each for each in named}.values())
    found = overlapping([each.tensor for each in distinct])
    if found is not None:
        one, other = (next(e.name for e in distinct if e.tensor is tensor) for tensor in found)
        raise ValueError(
            f"expected parameters with memory of their own, but {one} and {other} overlap; tie "
            f"them by using one and the same Parameter"
        )


def check_dense(named: Sequence[Named]) -> None:
    """Make sure that every tensor is a dense one of its own kind.

    Raises:
        TypeError: one is made of other tensors.
        ValueError: one is sparse, or has no values.
    """
    for each in named:
        if is_traceable_wrapper_subclass(each.tensor):
            raise TypeError(
                f"expected {each.kind}s that are plain tensors, but {each.kind} {each.name} "
                f"is a {type(each.tensor).__name__}, which gossip cannot exchange yet; build the "
                f"wrapper on a model that is whole on every rank, without FSDP or tensor "
                f"parallelism"
            )
        if each.tensor.layout != torch.strided or each.tensor.is_meta:
            kind = "on the meta device" if each.tensor.is_meta else f"{each.tensor.layout}"
            raise ValueError(
                f"expected dense {each.kind}s with values, but {each.kind} {each.name} is {kind}; "
                f"materialise the model (to_empty, to_dense) before building the wrapper"
            )


def check_gradients(param_groups: Sequence[dict[str, Any]], rank: int) -> None:
    """Make sure that there are no sparse gradients.

    Raises:
        RuntimeError: names the first one.
    """
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.layout != torch.strided:
                name = next(p.name for p in named_parameters(param_groups) if p.tensor is param)
                raise RuntimeError(
                    f"rank {rank}: expected dense gradients, but that of {name} is "
                    f"{param.grad.layout}; gossip exchanges whole parameters: build the module "
                    f"with sparse=False"
                )


class Agreement:
    """What the ranks must have in common.

    Args:
        transport: the ranks and how to reach them.
        topology: the same on every rank.
        layout: how tensors travel.
        settings: a line for each.
    """

    def __init__(
        self, transport: Transport, topology: Topology, layout: Layout, settings: Sequence[str]
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._settings = [
            f"decent_optim_wrapper {version('decent-optim-wrapper')}",
            f"topology {type(topology).__name__} with schedule {topology.digest}",
            *settings,
        ]

    def describe(self, tensors: Iterable[Named]) -> str:
        """All that must be the same on every rank, a line each."""
        lines = [*self._settings]
        for named in tensors:
            # Views exchange their storage as it lies in memory.
            strides = f", strides {named.tensor.stride()}" if self._layout.as_view else ""
            lines.append(named.describe() + strides)
        return "\n".join(lines)

    def check(self, text: str) -> None:
        """Compare a description with those of the other ranks; collective.

        Raises:
            ValueError: on every rank; names a rank that differs from rank 0 and the first thing in
                which it does.
        """
        digest = hashlib.sha256(text.encode()).digest()
        digests = exchange(self._transport, struct.unpack("<4q", digest))
        differing = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
        if differing:
            there, here = (
                share_text(text, self._transport, source) for source in (differing[0], 0)
            )
            raise ValueError(
                f"the ranks disagree: rank {differing[0]} has {difference(there, here, 'rank 0')}; "
                f"build the same model, optimizer and wrapper in the same order on every rank "
                f"(seen on rank {self._transport.name}; ranks unlike rank 0: {differing})"
            )

    def synchronize(self, tensors: Sequence[Named]) -> None:
        """Start all ranks from the values of rank 0, and log which ranks had others; collective."""
        replaced = self._transport.all_gather(
            torch.tensor([self.broadcast(tensors, source=0)], device="cpu")
        )
        counts = zip(self._transport.members, replaced.flatten().tolist(), strict=True)
        by_rank = {rank: count for rank, count in counts if count}
        if by_rank and self._transport.rank == 0:
            logger.info(
                "the values of rank 0 have replaced others, tensors by rank: {} (of {}); load "
                "weights on rank 0 or on all ranks before the wrapper is built",
                *(by_rank, len(tensors)),
            )

    def broadcast(self, tensors: Iterable[Named], source: int, keep: bool = False) -> int:
        """Overwrite the tensors with those of one rank, bucket by bucket; collective.

        Args:
            tensors: the same on every rank.
            source: whose values are taken.
            keep: hear them and keep one's own.

        Returns:
            How many tensors had other values here.
        """
        layout = Layout(self._layout.cap_mb, self._layout.wire_device)
        replaced = 0
        # Behind autograd's back: a backward pass in which this happens can still come to its end.
        for bucket in plan_buckets((named.tensor.data for named in tensors), layout):
            own = bucket.pack(bucket.new_flat(bucket.wire_device))
            flat = bucket.view(own.data.clone())
            self._transport.broadcast(flat.data, source)
            pairs = zip(own.views, flat.views, strict=True)
            replaced += sum(not _same_bytes(*pair) for pair in pairs)
            if not keep:
                bucket.unpack_(flat)
        return replaced


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, NaN included."""
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def difference(theirs: str, ours: str, whose: str) -> str:
    """The first line in which two descriptions differ, in words.

    Args:
        theirs: one description.
        ours: another.
        whose: the owner of `ours`.
    """
    pairs = zip_longest(theirs.split("\n"), ours.split("\n"), fillvalue="nothing more")
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"<{one}> where {whose} has <{other}>"
