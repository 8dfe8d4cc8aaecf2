"""Small messages to all ranks, each of which sends its own when it comes to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import Arrival, Awaited, PendingMessage, WireError

# One below the first tag of all other messages; the next one is for aborting.
_TAG = -2


class Announcement(NamedTuple):
    """The messages of all other ranks, on their way.

    Args:
        arrival: waits for them in the background.
        messages: the messages.
    """

    arrival: Arrival
    messages: list[PendingMessage]


def send_to_all(message: Tensor, transport: Transport) -> Announcement:
    """Start exchanging small messages with all ranks.

    Args:
        message: a tensor on the CPU, of the same shape on all of them.
        transport: connects the ranks.

    Returns:
        The messages of the others, for `read`.

    Raises:
        PeerError: a rank was lost.
    """
    pending = []
    for rank in transport.others:
        row = torch.empty_like(message)
        try:
            works = transport.exchange(message, row, rank, _TAG)
        except WireError as error:
            raise transport.lose_in_collective((rank,), error) from error
        pending.append(PendingMessage(rank, works, row, (rank,)))
    awaited = [Awaited(work) for each in pending for work in each.works]
    return Announcement(arrival=Arrival(awaited), messages=pending)


def read(announced: Announcement, transport: Transport) -> dict[int, list[int]]:
    """Wait for the messages of the others, by rank.

    Raises:
        PeerError: a rank was lost.
    """
    try:
        transport.finish(announced.arrival)
    except WireError as error:
        senders = [each.rank for each in announced.messages for _ in each.works]
        # The last work may have ended since the wait was given up.
        sender = senders[min(announced.arrival.finished, len(senders) - 1)]
        raise transport.lose_in_collective((sender,), error) from error
    return {each.rank: each.message.tolist() for each in announced.messages}
