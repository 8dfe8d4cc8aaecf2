"""What a checkpoint holds of the gossip, in addition to the base optimizer's state."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

from loguru import logger

from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.schedule import check_mixing_rate
from decent_optim_wrapper.gossip.step import Gossip, GossipState


class SavedState(NamedTuple):
    """What a state dict holds, checked.

    Args:
        gossip: the counter and the rates.
        kept: whether an average was in place, which the next step keeps.
        outer: the outer optimizer with the state that was saved, if there is one.
    """

    gossip: GossipState
    kept: bool
    outer: Outer | None


def gossip_state(gossip: Gossip) -> dict[str, Any]:
    """What to save of the gossip now."""
    state = gossip.state._asdict()
    if gossip.average.snapshot is not None:
        # What a step() would do with the parameters that are saved now.
        state |= {"in_flight": False, "kept": True}
    outer = _outer_of(gossip)
    return state | ({"outer": outer.state_dict()} if outer else {})


def read_state(gossip: Gossip, saved: Any, mixing_rate: float) -> SavedState:
    """Check what `gossip_state` has returned; None is the start of the training.

    Args:
        gossip: which is to continue; not changed.
        saved: from the state dict.
        mixing_rate: where none was saved.

    Raises:
        ValueError: it is something else, or of other parameters.
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
    """Continue from a state that was saved."""
    gossip.average.keep()
    if gossip.post_mix:
        gossip.post_mix.outer = saved.outer
    gossip.restore(saved.gossip, saved.kept)


def _outer_of(gossip: Gossip) -> Outer | None:
    return gossip.post_mix.outer if gossip.post_mix else None


def _read_outer(outer: Outer | None, saved: dict[str, Any]) -> Outer | None:
    """The outer optimizer that continues; the state may be of a run without one."""
    restarted = outer and outer.restarted()
    if restarted is not None and "outer" in saved:
        restarted.load_state_dict(saved["outer"])
    elif "outer" in saved:
        logger.warning(
            "the state of an outer optimizer is dropped: pass Schedule(outer=...), as in the run "
            "that was saved, to go on with it"
        )
    return restarted
