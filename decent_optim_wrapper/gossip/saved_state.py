"""The state of the gossip in a checkpoint, in addition to the base optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.references import Meetings, referring
from decent_optim_wrapper.gossip.schedule import check_mixing_rate
from decent_optim_wrapper.gossip.state_by_name import by_name, by_place
from decent_optim_wrapper.gossip.step import GossipState
from decent_optim_wrapper.gossip.tracking import check_rows

# What a state dict holds for each parameter.
_BY_PARAMETER = frozenset({"starts", "tracked"})


class Arrange(NamedTuple):
    """How to put parts of a state dict into the order of the parameters.

    Args:
        outer: makes what `Outer.load_state_dict` takes.
        by_parameter: makes a list, with an entry for each parameter.
        references: makes a list, a tensor for each parameter that has references.
    """

    outer: Callable[[dict[str, Any]], dict[str, Any]]
    by_parameter: Callable[[Any], list[Any]]
    references: Callable[[Any], list[Tensor]]


class SavedState(NamedTuple):
    """The checked contents of a state dict.

    Args:
        gossip: the state of the rounds.
        kept: whether an average was in place, which the next step keeps.
        outer: the outer optimizer with the saved state, if there is one.
        starts: the parameters with which the round in flight was launched, where they may have
            changed since.
        tracked: what is tracked of each parameter; None to start again.
        references: to which differences are coded, by group.
    """

    gossip: GossipState
    kept: bool
    outer: Outer | None
    starts: dict[Tensor, Tensor]
    tracked: list[dict[str, Any]] | None
    references: dict[str, Meetings]


def gossip_state(gossip: Gossip) -> dict[str, Any]:
    """The state of the gossip, to save now."""
    state = gossip.state._asdict()
    age = state.pop("age")
    if gossip.average.snapshot is not None:
        # The next step() would keep the average, which is what is saved now.
        state |= {"in_flight": False, "kept": True}
    if gossip.cadence.auto:
        # Others may have mixed it, or not have launched it yet.
        state["in_flight"] = False
    elif gossip.cadence.freezes:
        # Also where none is in flight: torch.distributed.checkpoint loads into existing entries.
        state |= {"age": age, "starts": gossip.starts()}
    if gossip.tracking:
        transport = gossip.session.transport
        state["tracked"] = gossip.tracking.rows(gossip.params)
        state["tracked_by"] = [transport.initial_rank, *transport.members]
    if params := _referring(gossip):
        session = gossip.session
        state["references"] = session.references.state(params, session.transport.members)
    outer = _outer_of(gossip)
    return state | ({"outer": outer.state_dict()} if outer else {})


def named_state(gossip: Gossip) -> dict[str, Any]:
    """What to save of the gossip now, with the same keys however the replica is spread.

    Raises:
        ValueError: there is an outer optimizer, and the names of its parameters are not known.
    """
    state = {"kept": False, **gossip_state(gossip)}
    outer = _outer_of(gossip)
    if outer:
        state["outer"] = by_name(state["outer"], gossip.replica.names_of(outer.params))
    for key in _BY_PARAMETER & state.keys():
        names = gossip.replica.names_of(gossip.params)
        state[key] = dict(zip(names, state[key], strict=True))
    if "references" in state:
        names = gossip.replica.names_of(_referring(gossip))
        for edge in state["references"].values():
            edge["values"] = dict(zip(names, edge["values"], strict=True))
    return state


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
    expected = (
        "load_state_dict expects what state_dict() of a DecentOptimWrapper around the same "
        "parameters has returned, but its key 'gossip' holds something else"
    )
    arrange = Arrange(
        outer=lambda outer: outer,
        by_parameter=lambda rows: rows,
        references=lambda references: references,
    )
    return _read(gossip, saved, mixing_rate, expected, arrange)


def read_named_state(gossip: Gossip, saved: Any, mixing_rate: float) -> SavedState:
    """As `read_state`, of what `named_state` has returned."""
    outer = _outer_of(gossip)
    names = gossip.replica.names_of(outer.params) if outer else []
    groups = outer.groups if outer else []
    expected = (
        "load_gossip_state_dict expects what gossip_state_dict() of a DecentOptimWrapper around "
        "the same model has returned, but got something else"
    )
    by_parameter = gossip.cadence.freezes or gossip.tracking is not None
    own = gossip.replica.names_of(gossip.params) if by_parameter else []
    referred = gossip.replica.names_of(_referring(gossip))
    arrange = Arrange(
        outer=lambda state: by_place(state, names, groups),
        by_parameter=lambda rows: [rows[name] for name in own],
        references=lambda values: [values[name] for name in referred],
    )
    return _read(gossip, saved, mixing_rate, expected, arrange)


def restore(gossip: Gossip, saved: SavedState) -> None:
    """Continue from a saved state."""
    gossip.average.keep()
    if gossip.post_mix:
        gossip.post_mix.outer = saved.outer
    gossip.restore_tracking(saved.tracked)
    gossip.restore(saved.gossip, saved.kept, saved.starts, saved.references)


def _read(
    gossip: Gossip,
    saved: Any,
    mixing_rate: float,
    expected: str,
    arrange: Arrange,
) -> SavedState:
    """Check a state.

    Args:
        gossip: which is to continue; not changed.
        saved: the state.
        mixing_rate: where none was saved.
        expected: what an error says of a state that is something else.
        arrange: puts the parts into the order of the parameters.
    """
    gossip.check_idle()
    try:
        rate = check_mixing_rate(saved.get("mixing_rate", mixing_rate))
        state = GossipState(
            round=index(saved["round"]),
            # Others may have mixed it already, or count rounds in another way.
            in_flight=bool(saved["in_flight"]) and not gossip.cadence.auto,
            mixing_rate=rate,
            last_rate=check_mixing_rate(saved.get("last_rate", rate)),
            age=max(1, index(saved.get("age", 1))),
        )
        if state.round < state.in_flight * state.age:
            raise ValueError(f"round must be 0 or more, and 1 in flight, got {state.round}")
        outer = _read_outer(_outer_of(gossip), saved, arrange.outer)
        starts = _read_starts(gossip, saved, arrange.by_parameter)
        tracked = _read_tracked(gossip, saved, arrange.by_parameter)
        references = _read_references(gossip, saved, arrange.references)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"rank {gossip.session.transport.initial_rank}: {expected} "
            f"({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    kept = bool(saved.get("kept", False))
    return SavedState(
        gossip=state,
        kept=kept,
        outer=outer,
        starts=starts,
        tracked=tracked,
        references=references,
    )


def _read_tracked(
    gossip: Gossip, saved: dict[str, Any], arrange: Callable[[Any], list[Any]]
) -> list[dict[str, Any]] | None:
    """What is tracked of each parameter; None if nothing was saved, or that of another rank."""
    if gossip.tracking is None or "tracked" not in saved:
        return None
    rows = check_rows(gossip.params, arrange(saved["tracked"]))
    transport = gossip.session.transport
    own = [transport.initial_rank, *transport.members]
    return rows if list(saved.get("tracked_by", [])) == own else None


def _read_starts(
    gossip: Gossip, saved: dict[str, Any], arrange: Callable[[Any], list[Tensor]]
) -> dict[Tensor, Tensor]:
    """The parameters at the launch of the round in flight; none if they have not changed since."""
    if "starts" not in saved or not saved["in_flight"]:
        return {}
    starts = dict(zip(gossip.params, arrange(saved["starts"]), strict=True))
    for param, start in starts.items():
        if param.shape != start.shape:
            raise ValueError(f"expected a start of shape {param.shape}, got {start.shape}")
    return starts


def _referring(gossip: Gossip) -> list[Tensor]:
    """The parameters whose references a checkpoint holds.

    With automatic rounds each rank may have mixed others, and all start again from zero.
    """
    if gossip.cadence.auto or not gossip.session.references.keeps:
        return []
    members = referring(gossip.buckets)
    return [param for param in gossip.params if param in members]


def _read_references(
    gossip: Gossip, saved: dict[str, Any], arrange: Callable[[Any], list[Tensor]]
) -> dict[str, Meetings]:
    """The references by group; none if there are none here or there."""
    params = _referring(gossip)
    found = {}
    for group, edge in saved.get("references", {}).items() if params else ():
        kept = arrange(edge["values"])
        if len(kept) != len(params):
            # Parameters were frozen or unfrozen since, on all ranks: references start again.
            return {}
        values = dict(zip(params, kept, strict=True))
        for param, value in values.items():
            if param.shape != value.shape:
                raise ValueError(f"expected a reference of shape {param.shape}, got {value.shape}")
        found[group] = Meetings(number=index(edge["meetings"]), values=values)
    return found


def _outer_of(gossip: Gossip) -> Outer | None:
    return gossip.post_mix.outer if gossip.post_mix else None


def _read_outer(
    outer: Outer | None,
    saved: dict[str, Any],
    arrange: Callable[[dict[str, Any]], dict[str, Any]],
) -> Outer | None:
    """The outer optimizer that continues; the state may be of a run without one."""
    restarted = outer and outer.restarted()
    if restarted is not None and "outer" in saved:
        restarted.load_state_dict(arrange(saved["outer"]))
    elif "outer" in saved:
        logger.warning(
            "the state of an outer optimizer is dropped: pass Schedule(outer=...), as in the run "
            "that was saved, to go on with it"
        )
    return restarted
