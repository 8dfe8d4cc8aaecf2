"""The ranks that mix together in one round."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, init=False, slots=True)
class Group:
    """The ranks that mix together in one round.

    A member i of a group of m ranks becomes
    ``self_weight * x_i + (1 - self_weight) / (m - 1) * sum of the other members``.

    Args:
        ranks: the members; kept sorted.
        self_weight: weight of a member's own parameters, in (0, 1); None means 1/m, the mean.

    Raises:
        ValueError: no ranks, a rank twice, a negative rank, or a weight outside (0, 1).
    """

    ranks: tuple[int, ...]
    self_weight: float
    # Number of ranks in the group.
    size: int = field(repr=False, compare=False)

    def __init__(self, ranks: Iterable[int], self_weight: float | None = None) -> None:
        members = tuple(sorted(operator.index(rank) for rank in ranks))
        if not members or len(set(members)) != len(members) or members[0] < 0:
            raise ValueError(
                f"a group needs distinct ranks, at least one and none negative, got {members}"
            )
        weight = 1 / len(members) if self_weight is None else float(self_weight)
        # A group of one rank keeps its parameters, whatever its weight.
        if len(members) > 1 and not 0 < weight < 1:
            raise ValueError(f"self_weight must lie in (0, 1), got {weight} for ranks {members}")
        object.__setattr__(self, "ranks", members)
        object.__setattr__(self, "size", len(members))
        object.__setattr__(self, "self_weight", weight if len(members) > 1 else 1.0)

    @property
    def copies_sent(self) -> float:
        """Copies of the parameters that a member sends; 1 in a pair, otherwise 2 (m - 1) / m."""
        if self.size <= 2:
            return float(self.size - 1)
        return 2 * (self.size - 1) / self.size
