"""Gossips entries of the base optimizer's state together with the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import CastCodec
from decent_optim_wrapper.extensions.state_average import is_like
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.wire.bucket import Bucket, as_real
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.storage import Flat


class StateGossip(Extension):
    """Sends and mixes entries of the base's state in every round with the parameters.

    Args:
        name: name of entries with the shape of their parameter, such as ``"exp_avg_sq"``.
        more: further names.
    """

    def __init__(self, name: str, *more: str) -> None:
        self.names = (name, *more)

    def attach(self, context: ExtensionContext) -> None:
        """Gossip the state of the base.

        Raises:
            ValueError: local updates come between the launch of a round and its mixing.
        """
        if context.pacing.needs_snapshot:
            raise ValueError(
                f"StateGossip expects rounds that are mixed in the next step, not overlap="
                f"{context.pacing!r}: second moments that have become smaller since the launch "
                f"could become negative"
            )
        self._buckets: dict[Bucket, StateBucket] = {}
        self._optimizer = context.optimizer
        # Codecs of fewer bits would not code exactly which ranks have an entry.
        codec = context.layout.codec and CastCodec(torch.bfloat16, uses_reference=False)
        self._layout = context.layout._replace(as_view=False, codec=codec)

    def describe(self) -> str:
        """The names."""
        return f"StateGossip({', '.join(map(repr, self.names))})"

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Forget the buckets that are gone."""
        self._buckets = {b: state for b, state in self._buckets.items() if b in buckets}

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the state that belongs to a bucket of parameters."""
        entries = [self._entry(param, name) for name in self.names for param in bucket.members]
        known = self._buckets.get(bucket)
        if known is None or not known.holds(entries):
            shapes = [param for _ in self.names for param in bucket.members]
            known = self._buckets[bucket] = StateBucket(entries, shapes, self._layout)
        return [known]

    def _entry(self, param: Tensor, name: str) -> Tensor | None:
        """An entry of the state; None if there is none yet.

        Raises:
            RuntimeError: the base has no such entries.
        """
        state = self._optimizer.state.get(param, {})
        value: Tensor | None = state.get(name)
        if state and not is_like(value, param):
            known = sorted(key for key, value in state.items() if is_like(value, param))
            raise RuntimeError(
                f"StateGossip expects entries of the state of {type(self._optimizer).__name__} "
                f"with the shape of their parameter, which are {known}, got {name!r}"
            )
        return value


class StateBucket(Bucket):
    """A bucket of state entries, with a flag for each that says whether this rank has it.

    A rank has no entry for a parameter without gradients. Only entries that all ranks of the group
    have are mixed.

    Args:
        entries: the entries; None for a missing one.
        shapes: for each entry, a tensor of its shape and dtype.
        layout: how they are exchanged.
    """

    def __init__(
        self, entries: Sequence[Tensor | None], shapes: Sequence[Tensor], layout: Layout
    ) -> None:
        self._entries = tuple(entries)
        like = next((entry for entry in entries if entry is not None), shapes[0])
        tensors = [
            torch.zeros_like(shape, dtype=like.dtype, requires_grad=False)
            if entry is None
            else entry
            for entry, shape in zip(entries, shapes, strict=True)
        ]
        present = [float(entry is not None) for entry in entries]
        real = as_real(like)
        self._present = torch.tensor(present, dtype=real.dtype, device=real.device)
        super().__init__([*tensors, self._present], layout)
        self._counts = torch.tensor(self._sizes[:-1], device=self.device)
        # Larger groups sum: the mean of ones must be one.
        self.group_codec = None

    def holds(self, entries: Sequence[Tensor | None]) -> bool:
        """Return whether these are its entries."""
        return all(one is other for one, other in zip(self._entries, entries, strict=True))

    @torch.no_grad()
    def mix_(self, flat: Flat, weight: float) -> None:
        """Like `Bucket.mix_`, for the entries that all ranks of the group have."""
        self.shift_(self._as_own(flat), self.pack(self.new_flat()), weight)

    @torch.no_grad()
    def add_(self, flat: Flat, factor: float) -> None:
        """Like `Bucket.add_`, for the entries that all ranks of the group have."""
        # The other ranks have an entry of this rank if the flags do not differ; larger groups send
        # the mean. No flag is read on the host, which would wait for a GPU.
        shared = self._spread(flat.views[-1] == 0)
        flat.data[: len(shared)].mul_(shared)
        own, parts = self._own(flat)
        if own:
            torch._foreach_add_(own, parts, alpha=factor)

    @torch.no_grad()
    def unpack_(self, flat: Flat) -> None:
        """Like `Bucket.unpack_`, for the entries that all ranks of the group have."""
        arriving, kept = self._as_own(flat), self.pack(self.new_flat())
        there = self._spread(arriving.views[-1] == 1)
        here = kept.data[: len(there)]
        torch.where(there, arriving.data[: len(there)], here, out=here)
        own, parts = self._own(kept)
        if own:
            torch._foreach_copy_(own, parts)

    def _spread(self, flags: Tensor) -> Tensor:
        """Expand one flag per entry to one per element."""
        return flags.repeat_interleave(self._counts, output_size=self.numel - len(self._entries))

    def _own(self, flat: Flat) -> tuple[list[Tensor], list[Tensor]]:
        """The entries that this rank has, and their parts of a flat vector."""
        pairs = zip(self._entries, flat.views, strict=False)
        own = [(as_real(entry), part) for entry, part in pairs if entry is not None]
        return [entry for entry, _ in own], [part for _, part in own]
