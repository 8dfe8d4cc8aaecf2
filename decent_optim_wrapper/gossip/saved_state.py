"""The state of the gossip in a checkpoint, in addition to the base optimizer's state."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

from loguru import logger

from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.schedule import check_mixing_rate
from decent_optim_wrapper.gossip.step import Gossip, GossipState


class SavedState(NamedTuple):
    """The checked contents of a state dict.

    Args:
        gossip: the state of the rounds.
        kept: whether an average was in place, which the next step keeps.
        outer: the outer optimizer with the saved state, if there is one.
    """

    gossip: GossipState
    kept: bool
    outer: Outer | None


def gossip_state(gossip: Gossip) -> dict[str, Any]:
    """The state of the gossip, to save now."""
    state = gossip.state._asdict()
    if gossip.average.snapshot is not None:
        # The next step() would keep the average, which is what is saved now.
        state |= {"in_flight": False, "kept": True}
    outer = _outer_of(gossip)
    return state | ({"outer": outer.state_dict()} if outer else {})


def read_state(gossip: Gossip, saved: Any, mixing_rate: float) -> SavedState:
    """Check a result of `gossip_state`; None means the start of the training.

    Args:
        gossip: the gossip that is to continue; not changed.
        saved: the entry of the state dict.
        mixing_rate: the rate if none was saved.

    Raises:
        ValueError: `saved` is something else, or belongs to other parameters.
    """
    saved = {"round": 0, "in_flight": False} if saved is None else saved
    try:
        rate = check_mixing_rate(saved.get("mixing_rate", mixing_rate))
        state = GossipState(
            round=index(saved["round"]),
            in_flight=bool(saved["in_flight"]),
            mixing_rate=rate,
            last_rate=check_mixing_rate(saved.get("last_rate", rate)),
        )
        if state.round < state.in_flight:
            raise ValueError(f"round must be 0 or more, and 1 in flight, got {state.round}")
        outer = _read_outer(_outer_of(gossip), saved)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"rank {gossip.session.transport.name}: load_state_dict expects what state_dict() of a "
            f"DecentOptimWrapper around the same parameters has returned, but its key 'gossip' "
            f"holds something else ({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    return SavedState(gossip=state, kept=bool(saved.get("kept", False)), outer=outer)


def restore(gossip: Gossip, saved: SavedState) -> None:
    """Continue from a saved state."""
    gossip.average.keep()
    if gossip.post_mix:
        gossip.post_mix.outer = saved.outer
    gossip.restore(saved.gossip, saved.kept)


def _outer_of(gossip: Gossip) -> Outer | None:
    return gossip.post_mix.outer if gossip.post_mix else None


def _read_outer(outer: Outer | None, saved: dict[str, Any]) -> Outer | None:
    """The outer optimizer that continues; the state may come from a run without one."""
    restarted = outer and outer.restarted()
    if restarted is not None and "outer" in saved:
        restarted.load_state_dict(saved["outer"])
    elif "outer" in saved:
        logger.warning(
            "the state of an outer optimizer is dropped: pass Schedule(outer=...), as in the run "
            "that was saved, to go on with it"
        )
    return restarted
