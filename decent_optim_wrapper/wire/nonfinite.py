"""What happens to values that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

from decent_optim_wrapper.errors import NonFiniteError

OnNonfinite = Literal["raise", "skip", "ignore"]


class NonFinitePolicy(NamedTuple):
    """What happens to parameters that are not finite.

    Args:
        on_nonfinite: "raise" an error on all ranks of the group, "skip" these ranks in the round,
            or "ignore" it.
        checks: whether values are checked before they are mixed.
        replaces: whether mixing replaces parameters that are not finite.
    """

    on_nonfinite: OnNonfinite
    checks: bool
    replaces: bool

    @classmethod
    def of(cls, on_nonfinite: OnNonfinite) -> Self:
        """The policy of this name."""
        return cls(on_nonfinite, on_nonfinite != "ignore", on_nonfinite == "skip")


def nonfinite_error(
    bad: Sequence[int], own_rank: int, where: str, what: str = "parameters"
) -> NonFiniteError:
    """The error on every rank that would have mixed these values in.

    Args:
        bad: the ranks whose values are not finite.
        own_rank: this rank.
        where: the round or the average.
        what: the name of the values.
    """
    return NonFiniteError(
        f"rank {own_rank}: expected finite {what} in {where}, but ranks {[*bad]} have NaN or "
        f"infinity, or values too large for comm_dtype; none of them were mixed. Look for the "
        f'overflow there (learning rate, loss scale, data), or pass on_nonfinite="skip"',
        [*bad],
    )
