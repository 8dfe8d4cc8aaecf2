"""Which ranks are on one node: from the launcher's variables, agreed on by all ranks."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Hashable, Sequence
from itertools import groupby

import torch.distributed as dist

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.start.start import exchange


def agree_on_local_world_size(given: int | None, node: str, transport: Transport) -> int:
    """The number of ranks per node, the same on all ranks; collective.

    Args:
        given: the user's argument, which is used if it is the same on all ranks.
        node: `node_name` of this rank.
        transport: connects the ranks.
    """
    digest = hashlib.sha256(node.encode()).digest()[:8]
    rows = exchange(transport, [given or 0, int.from_bytes(digest, "little", signed=True)])
    stated, nodes = rows[:, 0].tolist(), rows[:, 1].tolist()
    if given is not None and len(set(stated)) == 1:
        return given
    return ranks_per_node(nodes)


def ranks_per_node(nodes: Sequence[Hashable]) -> int:
    """The number of consecutive ranks on a node, or 1 if it is not the same on all nodes.

    Args:
        nodes: an identifier of the node of each rank, by rank.
    """
    blocks = [len(list(block)) for _, block in groupby(nodes)]
    regular = len(set(blocks)) == 1 and len(blocks) == len(set(nodes))
    return blocks[0] if regular else 1


def launched_local_world_size() -> int:
    """LOCAL_WORLD_SIZE, or 1 if it is not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"the variable LOCAL_WORLD_SIZE must be a number above 0, got {text!r}; set it to the "
            f"number of ranks of this node, or unset it"
        )
    return int(text)


def node_name(local_world_size: int, rank: int) -> str:
    """A name for the node of this process: the host and the first rank on the node.

    The host alone would be the same for several nodes that are simulated on one machine.

    Args:
        local_world_size: number of ranks on this node.
        rank: this rank, for processes that no launcher has numbered.
    """
    number = _variable("RANK")
    if number is None:
        number = dist.get_rank() if dist.is_initialized() else rank
    place = _variable("LOCAL_RANK")
    if place is None or not place < local_world_size or place > number:
        place = number % local_world_size
    return f"{socket.gethostname()} from rank {number - place}"


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
