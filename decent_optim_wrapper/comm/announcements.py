"""Small messages to all ranks, each of which sends its own when it is ready."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from decent_optim_wrapper.comm.tags import ANNOUNCEMENT
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage, WireError


class Announcement(NamedTuple):
    """The messages of all other ranks, in flight.

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
    try:
        # In pairs: a collective would have to come in the same order on all ranks.
        messages = transport.send_control(message, transport.others, ANNOUNCEMENT)
    except WireError as error:
        raise transport.lost_in_collective(transport.others, error) from error
    expected = [Expected(each.works, 0, (each.rank,)) for each in messages]
    return Announcement(arrival=Arrival(expected), messages=messages)


def read(announced: Announcement, transport: Transport) -> dict[int, list[int]]:
    """Wait for the messages of the others, by rank.

    Raises:
        PeerError: a rank was lost.
    """
    try:
        transport.wait_until(announced.arrival.future)
    except WireError as error:
        lost = announced.arrival.lost()
        suspects = lost.suspects if lost else transport.others
        raise transport.lost_in_collective(suspects, error) from error
    return {each.rank: each.message.tolist() for each in announced.messages}
