"""Gossips entries of the base optimizer's state together with the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import CastCodec, wide
from decent_optim_wrapper.extensions.state_average import is_like
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext, ReceivedBucket
from decent_optim_wrapper.optim.splittable import is_splittable
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
                f"{context.pacing!r}: second moments could become negative"
            )
        # By bucket of parameters; the round in flight keeps its own.
        self._buckets: WeakKeyDictionary[Bucket, StateBucket] = WeakKeyDictionary()
        self._optimizer = context.optimizer
        # Codecs of fewer bits would round the flags.
        codec = context.layout.codec and CastCodec(torch.bfloat16, uses_reference=False)
        self._layout = context.layout._replace(as_view=False, codec=codec)
        # Optimizers of which no more is known may keep states of half-precision parameters wider.
        self._widens = not is_splittable(type(context.optimizer))

    def describe(self) -> str:
        """The names."""
        return f"StateGossip({', '.join(map(repr, self.names))})"

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the state that belongs to a bucket of parameters."""
        entries = [self._entry(param, name) for name in self.names for param in bucket.members]
        known = self._buckets.get(bucket)
        if known is None or not known.consists_of(entries):
            dtype = wide(bucket.dtype) if self._widens else bucket.dtype
            known = StateBucket(entries, bucket.members * len(self.names), self._layout, dtype)
            self._buckets[bucket] = known
        return [known]

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        """Restore entries that a rank of the group does not have."""
        return self._buckets[received.bucket].mixing()

    def _entry(self, param: Tensor, name: str) -> Tensor | None:
        """An entry of the state; None if there is none yet.

        Raises:
            RuntimeError: the base has no such entries.
        """
        state = self._optimizer.state.get(param, {})
        value: Tensor | None = state.get(name)
        if state and not _fits(value, param):
            known = sorted(key for key, value in state.items() if _fits(value, param))
            raise RuntimeError(
                f"StateGossip expects entries of the state of {type(self._optimizer).__name__} "
                f"shaped as their parameter, and complex if it is: {known}, got {name!r}"
            )
        return value


class StateBucket(Bucket):
    """A bucket of state entries, with a flag for each that says whether this rank has it.

    A rank has no entry for a parameter without gradients. Only entries that all ranks of the group
    have are mixed. The format on the wire must not depend on which entries a rank has.

    Args:
        entries: the entries; None for a missing one.
        shapes: for each entry, its parameter.
        layout: how they are exchanged.
        dtype: the real dtype in which they are exchanged, whatever their own.
    """

    def __init__(
        self,
        entries: Sequence[Tensor | None],
        shapes: Sequence[Tensor],
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        self._entries = tuple(entries)
        pairs = zip(entries, shapes, strict=True)
        zeros = partial(torch.zeros_like, requires_grad=False)
        tensors = [zeros(shape) if entry is None else entry for entry, shape in pairs]
        present = [entry is not None for entry in entries]
        self._present = torch.tensor(present, dtype=dtype, device=as_real(tensors[0]).device)
        super().__init__([*tensors, self._present], layout, dtype=dtype)
        # Larger groups sum: the mean of ones must be one.
        self.group_codec = None

    def consists_of(self, entries: Sequence[Tensor | None]) -> bool:
        """Return whether these are its entries."""
        return all(one is other for one, other in zip(self._entries, entries, strict=True))

    @torch.no_grad()
    def mix_(self, flat: Flat, weight: float) -> None:
        """Like `Bucket.mix_`, rounded as if the values were sent with a codec."""
        self.shift_(self._as_own(flat), self.copy(), weight)

    @contextmanager
    def mixing(self) -> Iterator[None]:
        """Restore the flags, and the entries that a rank of the group does not have."""
        before = [tensor.detach().clone() for tensor in self._tensors()]
        yield
        # No flag is read on the host, which would wait for a GPU. The mean of ones is one.
        shared = (self._present == 1).unbind()
        with torch.no_grad():
            for is_shared, mixed, own in zip(shared, self._tensors(), before, strict=False):
                mixed.copy_(torch.where(is_shared, mixed, own))
            self._present.copy_(before[-1])


def _fits(value: Any, param: Tensor) -> bool:
    return is_like(value, param) and value.is_complex() == param.is_complex()
