"""Transfer of state between ranks: structure as JSON, tensors as bytes, no pickle."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.comm.process_groups import CPU
from decent_optim_wrapper.comm.transport import Transport

# A longer text cannot be the description of an optimizer's state.
_LONGEST_TEXT = 1 << 28


def send_state(state: Any, transport: Transport) -> None:
    """Send nested dicts, lists, tuples, numbers, strings and tensors to all ranks; collective.

    Raises:
        TypeError: the state contains other objects.
    """
    tensors: list[Tensor] = []
    share_text(json.dumps(_describe(state, tensors)), transport, transport.rank)
    for tensor in tensors:
        transport.broadcast(tensor.detach().cpu().contiguous().reshape(-1), transport.rank)


def sendable(state: Any) -> bool:
    """Return whether everything in a state can be sent."""
    try:
        json.dumps(_describe(state, []))
    except TypeError:
        return False
    return True


def receive_state(transport: Transport, source: int, parts: int) -> list[Any]:
    """Receive the state that rank `source` sends; collective. Tensors are on the CPU.

    Args:
        transport: connects the ranks.
        source: the position of the sender among the members.
        parts: the length of the list that it sends.

    Raises:
        ValueError: the rank has sent something else.
    """
    tensors: list[Tensor] = []

    # Called at the end of each object: the tensors arrive in the order of the text.
    def rebuild(described: dict[str, Any]) -> Any:
        ((kind, content),) = described.items()
        if kind != "tensor":
            return tuple(content) if kind == "tuple" else dict(content)
        dtype, shape = content
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        tensors.append(tensor)
        return tensor

    text = share_text("", transport, source)
    try:
        state = json.loads(text, object_hook=rebuild)
        if len(state) != parts:
            raise ValueError(f"{len(state)} parts")
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(transport, source, f"{type(error).__name__}: {error}") from error
    for tensor in tensors:
        transport.broadcast(tensor.view(-1), source)
    return list(state)


def share_text(text: str, transport: Transport, source: int) -> str:
    """The `text` of rank `source`, on every rank; collective.

    Raises:
        ValueError: the announced length is impossible.
    """
    data = torch.tensor([*text.encode()], dtype=torch.uint8, device=CPU)
    announced = torch.tensor([len(data)], device=CPU)
    transport.broadcast(announced, source)
    size = int(announced.item())
    if not 0 <= size <= _LONGEST_TEXT:
        raise _unreadable(transport, source, f"a text of {size} bytes")
    if transport.rank != source:
        data = torch.empty(size, dtype=torch.uint8, device=CPU)
    transport.broadcast(data, source)
    return bytes(data.tolist()).decode(errors="replace")


def _unreadable(transport: Transport, source: int, what: str) -> ValueError:
    return ValueError(
        f"rank {transport.initial_rank}: expected a text of a wrapper from rank "
        f"{transport.members[source]}, which has sent something else ({what}); make sure that "
        f"nothing else communicates on this process group at the same time, and that all ranks run "
        f"the same version"
    )


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        pairs = [[_describe(k, tensors), _describe(v, tensors)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_describe(item, tensors) for item in value]
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
