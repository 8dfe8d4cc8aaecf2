"""The mean of the coded values of a group: a reduce-scatter and an all-gather of codes.

Each rank owns a chunk. All ranks send their codes of it to the owner, which decodes and averages
them, codes the mean, and sends it to all. Messages are point to point, since collectives would have
to come in the same order on all ranks, and on a separate thread, since the mean is due in the
middle of a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import LONGEST_WAIT, Waitable


class CodedMean:
    """The exchange of one vector; after `start` a work to wait for.

    Args:
        transport: connects the ranks.
        ranks: the group, each of which owns a chunk.
        codec: the codec of the messages.
        outgoing: this rank's message of each chunk.
        room: memory for as many messages of the largest chunk as there are ranks. It first takes
            the others' messages of this rank's chunk, and then the means of theirs.
        own: memory for the message of this rank's mean. Like `error`, no other round uses it: after
            a loss a new one may begin before the thread has noticed.
        error: zeros, for this rank's mean less the one that it sends; in the dtype of means.
        tags: of the messages to the owners, and of those from them.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        codec: Codec,
        *,
        outgoing: Sequence[Tensor],
        room: Tensor,
        own: Tensor,
        error: Tensor,
        tags: tuple[int, int],
    ) -> None:
        self._transport = transport
        self._codec = codec
        self._size = len(ranks)
        self.position = ranks.index(transport.rank)
        self._others = [place for place in range(self._size) if place != self.position]
        self._ranks = ranks
        self._tags = tags
        rooms = room.view(self._size, -1)
        self.means = [rooms[place, : each.numel()] for place, each in enumerate(outgoing)]
        self.means[self.position] = own
        self.error = error
        self._arriving = [row[: own.numel()] for row in rooms]
        self._arriving[self.position] = outgoing[self.position]
        self._outgoing = outgoing
        # Chunks of a small vector may be empty; they are not sent.
        self._owners = [place for place in self._others if outgoing[place].numel()]
        self._coming: dict[int, Waitable] = {}
        self._going: list[Waitable] = []
        # The text of an error only: the error would keep alive what the thread has used.
        self._failure: Future[str] = Future()

    def start(self) -> CodedMean:
        """Send this rank's codes to the owners, and go on on a thread.

        Raises:
            WireError: the connection is closed already.
        """
        ranks, tag = self._ranks, self._tags[0]
        receive, send = self._transport.receive, self._transport.send
        senders = self._others if self._arriving[self.position].numel() else []
        # The receives first: their notices let the data start.
        self._coming = {p: receive(self._arriving[p], ranks[p], tag) for p in senders}
        self._going = [send(self._outgoing[p], ranks[p], tag) for p in self._owners]
        self._failure = in_background(self._run)
        return self

    def wait(self, timeout: timedelta = LONGEST_WAIT) -> bool:
        """Wait until all means have arrived.

        Raises:
            RuntimeError: a rank is gone, or the wait timed out.
        """
        try:
            failure = self._failure.result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError(f"no mean of the group within {timeout}") from error
        if failure:
            raise RuntimeError(failure)
        return True

    def is_completed(self) -> bool:
        """Return whether all means have arrived, or something has failed."""
        return self._failure.done()

    def _run(self) -> str:
        try:
            self._exchange()
        except RuntimeError as error:
            return str(error)
        return ""

    def _exchange(self) -> None:
        if self._coming:
            self._average()
        receive, send, tag = self._transport.receive, self._transport.send, self._tags[1]
        works = [receive(self.means[p], self._ranks[p], tag) for p in self._owners]
        own = self.means[self.position]
        works += [send(own, self._ranks[p], tag) for p in self._coming]
        for work in (*self._going, *works):
            work.wait(LONGEST_WAIT)

    @torch.no_grad()
    def _average(self) -> None:
        total, own = self.error, self.means[self.position]
        # In the order of the ranks: the mean must not depend on the order of arrival.
        for place, message in enumerate(self._arriving):
            if place in self._coming:
                self._coming[place].wait(LONGEST_WAIT)
            self._add(message, total)
        total.div_(self._size)
        self._codec.encode(total, own)
        self._add(own, total, -1.0)

    def _add(self, message: Tensor, total: Tensor, factor: float = 1.0) -> None:
        parts = self._codec.decode(message, numel=total.numel(), dtype=total.dtype)
        for place, (values,) in parts:
            total[place].add_(values, alpha=factor)
