"""Transfer of state between ranks: structure as JSON, tensors as bytes, no pickle."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.comm.process_groups import CPU
from decent_optim_wrapper.comm.transport import Transport


def send_state(state: Any, transport: Transport) -> None:
    """Send nested dicts, lists, tuples, numbers, strings and tensors to all ranks; collective.

    Raises:
        TypeError: the state contains other objects.
    """
    tensors: list[Tensor] = []
    share_text(json.dumps(describe(state, tensors)), transport, transport.rank)
    for tensor in tensors:
        transport.broadcast(tensor.detach().cpu().contiguous().reshape(-1), transport.rank)


def receive_state(transport: Transport, source: int) -> Any:
    """Receive the state that rank `source` sends; collective. Tensors are on the CPU.

    Args:
        transport: connects the ranks.
        source: the position of the sender among the members.
    """
    tensors: list[Tensor] = []

    # Called at the end of each object: the tensors arrive in the order of the text.
    def rebuild(described: dict[str, Any]) -> Any:
        ((kind, content),) = described.items()
        if kind != "tensor":
            return tuple(content) if kind == "tuple" else dict(content)
        dtype, shape = content
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=CPU))
        return tensors[-1]

    state = json.loads(share_text("", transport, source), object_hook=rebuild)
    for tensor in tensors:
        transport.broadcast(tensor.view(-1), source)
    return state


def share_text(text: str, transport: Transport, source: int) -> str:
    """The `text` of rank `source`, on every rank; collective."""
    data = torch.tensor([*text.encode()], dtype=torch.uint8, device=CPU)
    size = torch.tensor([len(data)], device=CPU)
    transport.broadcast(size, source)
    if transport.rank != source:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=CPU)
    transport.broadcast(data, source)
    return bytes(data.tolist()).decode()


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """Describe a state as JSON values, and append its tensors to a list.

    Raises:
        TypeError: the state contains other objects.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[describe(k, tensors), describe(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [describe(item, tensors) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"cannot send a {type(value).__name__} to a rank that comes back: {value!r}; use a base "
        f"optimizer whose state_dict() holds only tensors, numbers, strings and containers of "
        f"these, or restart all ranks from a checkpoint"
    )


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
