"""The state of the gossip in a checkpoint, in addition to the base optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from torch import Tensor

from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.in_flight import GossipState
from decent_optim_wrapper.optim.mixing_rate import check_mixing_rate
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.plan import read_plan, rebuild, saved_plan
from decent_optim_wrapper.wire.references import SavedReference, referring


class SavedState(NamedTuple):
    """The checked contents of a state dict.

    Args:
        gossip: the state of the rounds.
        kept: whether an average was in place, which the next step keeps.
        extensions: continue each extension with its state.
        snapshot: the parameters at the launch of the round in flight, if they may have changed
            since.
        references: the references of coded differences, by group.
        plan: the members of each bucket, if a new wrapper would plan others.
    """

    gossip: GossipState
    kept: bool
    extensions: list[Callable[[], None]]
    snapshot: dict[Tensor, Tensor]
    references: dict[str, SavedReference]
    plan: list[list[Tensor]]


def gossip_state(gossip: Gossip) -> dict[str, Any]:
    """The state of the gossip, to save now, with parameters that are settled."""
    state = gossip.pipeline.state._asdict()
    age = state.pop("age")
    # Even outside of an average: torch.distributed.checkpoint loads into existing entries.
    state["kept"] = False
    if gossip.loaded.is_average or gossip.average.snapshot is not None:
        # The next step() would keep the average, which is what is saved now.
        state |= {"in_flight": False, "kept": True}
    if not gossip.pipeline.policy.pacing.synchronous:
        # Others may have mixed it, or not have launched it yet.
        state["in_flight"] = False
    elif gossip.pipeline.policy.pacing.needs_snapshot:
        # Even if no round is in flight.
        state |= {"age": age, "launch_snapshot": gossip.pipeline.in_flight.values(gossip.params)}
    if extensions := {
        each.name: each.state_dict() for each in gossip.pipeline.extensions.all if each.name
    }:
        own = _saved_by(gossip)
        # What belongs to another rank is reset by the next step() on all ranks.
        saved_by = [None] * len(own) if gossip.loaded.source == "other" else own
        state |= {"extensions": extensions, "saved_by": saved_by}
    if params := _referring(gossip):
        session = gossip.pipeline.session
        state["references"] = session.references.state(params, session.transport.members)
    if plan := saved_plan(gossip.pipeline.buckets, gossip.params):
        state["plan"] = plan
    return state


def named_state(gossip: Gossip) -> dict[str, Any]:
    """What to save of the gossip now, with the same keys however the replica is spread.

    Raises:
        ValueError: something is saved of each parameter, and their names are not known.
    """
    gossip.settle()
    state = gossip_state(gossip)
    # Other layouts of the replica have other buckets.
    state.pop("plan", None)

    def named(rows: list[Any], params: list[Tensor]) -> dict[str, Any]:
        return dict(zip(gossip.replica.names_of(params), rows, strict=True))

    return _rearranged(state, named, gossip)


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
    return _read(gossip, saved, mixing_rate, expected, dict)


def read_named_state(gossip: Gossip, saved: Any, mixing_rate: float) -> SavedState:
    """Like `read_state`, for a result of `named_state`."""
    expected = (
        "load_gossip_state_dict expects what gossip_state_dict() of a DecentOptimWrapper around "
        "the same model has returned, but got something else"
    )

    def in_order(rows: dict[str, Any], params: list[Tensor]) -> list[Any]:
        return [rows[name] for name in gossip.replica.names_of(params)]

    def by_position(state: dict[str, Any]) -> dict[str, Any]:
        unused = () if state["in_flight"] else ("launch_snapshot",)
        used = {key: value for key, value in state.items() if key not in unused}
        return _rearranged(used, in_order, gossip)

    return _read(gossip, saved, mixing_rate, expected, by_position)


def _rearranged(
    saved: dict[str, Any], arrange: Callable[[Any, list[Tensor]], Any], gossip: Gossip
) -> dict[str, Any]:
    """A copy of a state in which what is saved of each parameter is arranged in another way."""
    state, params = dict(saved), gossip.params
    if "launch_snapshot" in state:
        state["launch_snapshot"] = arrange(state["launch_snapshot"], params)
    if "extensions" in state:
        state["extensions"] = {
            name: {**each, "params": arrange(each["params"], params)} if "params" in each else each
            for name, each in state["extensions"].items()
        }
    if "references" in state and (coded := _referring(gossip)):
        state["references"] = {
            group: {**each, "values": arrange(each["values"], coded)}
            for group, each in state["references"].items()
        }
    return state


def restore(gossip: Gossip, saved: SavedState) -> None:
    """Continue from a saved state."""
    gossip.average.keep()
    try:
        gossip.discard()
    finally:
        # Even if the round in flight has failed. Extensions load last: the round may still send
        # their tensors, and other buckets would change what they have loaded.
        if saved.plan:
            gossip.pipeline.plan(rebuild(saved.plan, gossip.pipeline.buckets))
        for load in saved.extensions:
            load()
        gossip.loaded.restore(saved.gossip, saved.kept, saved.snapshot, saved.references)


def _read(
    gossip: Gossip,
    saved: Any,
    mixing_rate: float,
    expected: str,
    by_position: Callable[[Any], dict[str, Any]],
) -> SavedState:
    """Check a state.

    Args:
        gossip: the gossip that is to continue; not changed.
        saved: the state.
        mixing_rate: the rate if none was saved.
        expected: the beginning of the error if the state does not fit.
        by_position: function that brings the states of the parameters into their order.
    """
    gossip.check_idle()
    try:
        saved = by_position(saved)
        rate = check_mixing_rate(saved.get("mixing_rate", mixing_rate))
        state = GossipState(
            round=index(saved["round"]),
            # Others may have mixed it already, or count rounds in another way.
            in_flight=bool(saved["in_flight"]) and gossip.pipeline.policy.pacing.synchronous,
            mixing_rate=rate,
            last_rate=check_mixing_rate(saved.get("last_rate", rate)),
            age=max(1, index(saved.get("age", 1))),
        )
        if state.round < state.in_flight * state.age:
            raise ValueError(f"round must be 0 or more, and 1 in flight, got {state.round}")
        extensions = _read_extensions(gossip, saved)
        snapshot = _read_snapshot(gossip, saved)
        references = _read_references(gossip, saved)
        buckets = gossip.pipeline.buckets
        plan = read_plan(saved["plan"], gossip.params, buckets) if "plan" in saved else []
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"rank {gossip.pipeline.session.transport.initial_rank}: {expected} "
            f"({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    return SavedState(
        gossip=state,
        kept=bool(saved.get("kept", False)),
        extensions=extensions,
        snapshot=snapshot,
        references=references,
        plan=plan,
    )


def _saved_by(gossip: Gossip) -> list[int]:
    """This rank and the members: a state that belongs to a rank is valid for these only."""
    transport = gossip.pipeline.session.transport
    return [transport.initial_rank, *transport.members]


def _read_extensions(gossip: Gossip, saved: dict[str, Any]) -> list[Callable[[], None]]:
    """Check the states of the extensions; extensions without a saved state are reset."""
    states = dict(saved.get("extensions", {}))
    is_own = list(saved.get("saved_by", [])) == _saved_by(gossip)
    loads = []
    for extension in gossip.pipeline.extensions.all:
        state = states.pop(extension.name, None)
        loads.append(gossip.loaded.prepare(extension, state, is_own))
    if states:
        warn(
            f"the state of {' and '.join(sorted(states))} is dropped: pass the same extensions, or "
            f"options, as in the run that was saved, to go on with it"
        )
    return loads


def _read_snapshot(gossip: Gossip, saved: dict[str, Any]) -> dict[Tensor, Tensor]:
    """The parameters at the launch of the round in flight; empty if they have not changed."""
    if "launch_snapshot" not in saved or not saved["in_flight"]:
        return {}
    snapshot = dict(zip(gossip.params, saved["launch_snapshot"], strict=True))
    for param, launched in snapshot.items():
        if param.shape != launched.shape:
            raise ValueError(f"expected a snapshot of shape {param.shape}, got {launched.shape}")
    return snapshot


def _referring(gossip: Gossip) -> list[Tensor]:
    """The parameters whose references a checkpoint holds.

    With "auto" each rank may have mixed other rounds, so all references start again from zero.
    """
    if (
        not gossip.pipeline.policy.pacing.synchronous
        or not gossip.pipeline.session.references.keeps
    ):
        return []
    members = referring(gossip.pipeline.buckets)
    return [param for param in gossip.params if param in members]


def _read_references(gossip: Gossip, saved: dict[str, Any]) -> dict[str, SavedReference]:
    """The references by group; empty if there are none in the state or on this rank."""
    params = _referring(gossip)
    found = {}
    for group, reference in saved.get("references", {}).items() if params else ():
        kept = reference["values"]
        if len(kept) != len(params):
            # Parameters were frozen or unfrozen since, on all ranks: references start again.
            return {}
        values = dict(zip(params, kept, strict=True))
        for param, value in values.items():
            if param.shape != value.shape:
                raise ValueError(f"expected a reference of shape {param.shape}, got {value.shape}")
        found[group] = SavedReference(coded_rounds=index(reference["coded_rounds"]), values=values)
    return found
