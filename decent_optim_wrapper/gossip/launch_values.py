"""The parameters with which a round was launched, if they have changed since.

A checkpoint holds them: a resumed run launches the round with them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.optim.shards import local


def starts_of(flying: Round | None, params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the parameters as a round in flight has them, or as they are without one."""
    if flying is None:
        return [param.detach().clone() for param in params]
    frozen = [(bucket, flying.start_of(bucket)) for bucket in flying.unmixed]
    known = [(bucket, start) for bucket, start in frozen if start is not None]
    now = [bucket.pack(bucket.new_flat()) for bucket, _ in known]
    for bucket, start in known:
        bucket.unpack_(start)
    copies = [param.detach().clone() for param in params]
    for (bucket, _), flat in zip(known, now, strict=True):
        bucket.unpack_(flat)
    return copies


@contextmanager
@torch.no_grad()
def in_place(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give the tensors these values inside the context, and their own again afterwards."""
    now = {tensor: local(tensor).clone() for tensor in values}
    for tensor, value in values.items():
        local(tensor).copy_(local(value))
    try:
        yield
    finally:
        for tensor, value in now.items():
            local(tensor).copy_(value)
