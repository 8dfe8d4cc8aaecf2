"""Exceptions for what can go wrong between ranks."""

from __future__ import annotations

from collections.abc import Sequence

# What torch writes between the text of an error and its C++ stack.
_STACK = "\nException raised from "


def text_of(error: BaseException) -> str:
    """The text of an error of torch, without the C++ stack that some of them contain."""
    return str(error).partition(_STACK)[0]


class PeerError(RuntimeError):
    """A peer was lost, so its part of a round or a collective did not arrive.

    The parameters are those before the failed round: none of it was mixed.

    Args:
        text: what was expected, what came, and what to do.
        rank: the lost peer; None if it is not known.
        round: the round that failed; None outside a round.
        bucket: index of the first bucket that did not arrive; None outside a round.
    """

    def __init__(
        self,
        text: str,
        rank: int | None = None,
        round: int | None = None,
        bucket: int | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.round = round
        self.bucket = bucket


class CallOrderError(RuntimeError):
    """The ranks called different methods, or the same method a different number of times."""


class NonFiniteError(RuntimeError):
    """Parameters that should be mixed contain NaN or infinity.

    Args:
        text: what was expected, what came, and what to do.
        ranks: the ranks that have these parameters.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
