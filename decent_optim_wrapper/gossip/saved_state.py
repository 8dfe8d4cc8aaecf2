"""The state of the gossip in a checkpoint, in addition to the base optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from decent_optim_wrapper.checks import check_mixing_rate
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.rounds import PendingResume
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import fill_copies
from decent_optim_wrapper.wire.plan import read_plan, rebuild, saved_plan
from decent_optim_wrapper.wire.references import SavedReference, with_references

# The key of the state of the gossip in a state dict, beside the base's.
GOSSIP_KEY = "gossip"


def gossip_state(coordinator: Coordinator) -> dict[str, Any]:
    """Return the state of the gossip, once the parameters are settled."""
    rounds, pending = coordinator.rounds, coordinator.rounds.pending
    pacing, round = rounds.policy.pacing, rounds.in_flight
    # The next step() would keep the average, which is what is saved now.
    kept = pending.keeps_average or coordinator.average.snapshot is not None
    rate, age = (round.plan.mixing_rate, rounds.age) if round else (pending.rate, pending.age)
    state: dict[str, Any] = {
        "round": rounds.count,
        # Others may have mixed it, or not have launched it yet.
        "in_flight": bool(pending.in_flight or round) and not kept and pacing.synchronous,
        "mixing_rate": rounds.mixing_rate,
        "last_rate": rate,
        # Even outside of an average: torch.distributed.checkpoint loads into existing entries.
        "kept": kept,
    }
    if pacing.synchronous and pacing.needs_snapshot:
        # Even if no round is in flight.
        state |= {"age": age, "launch_snapshot": _launched_values(coordinator)}
    if extensions := {each.name: each.state_dict() for each in rounds.extensions.all if each.name}:
        own = _saved_by(coordinator)
        # The states of another rank are reset by the next step() on all ranks.
        saved_by = [None] * len(own) if pending.source == "other" else own
        state |= {"extensions": extensions, "saved_by": saved_by}
    if params := _with_references(coordinator):
        session = rounds.session
        members, buckets = session.transport.members, coordinator.rounds.buckets
        state["references"] = session.references.state(params, members, buckets)
    if plan := saved_plan(rounds.buckets, coordinator.params):
        state["plan"] = plan
    return state


@torch.no_grad()
def _launched_values(coordinator: Coordinator) -> list[Tensor]:
    """Copies of the parameters when the round in flight was launched, or of the present ones."""
    copies = {param: param.detach().clone() for param in coordinator.params}
    if round := coordinator.rounds.in_flight:
        for bucket in round.unmixed:
            if launched := round.snapshot_of(bucket):
                fill_copies(copies, bucket, launched)
    # A parameter that is in a group twice has two entries.
    return [coordinator.rounds.pending.snapshot.get(p, copies[p]) for p in coordinator.params]


def named_state(coordinator: Coordinator) -> dict[str, Any]:
    """Like `gossip_state`, with the names of parameters as keys, however the replica is spread.

    Raises:
        ValueError: something is saved of each parameter, and their names are not known.
    """
    coordinator.commit_or_roll_back()
    state = gossip_state(coordinator)
    # Other layouts of the replica have other buckets.
    state.pop("plan", None)

    def named(rows: list[Any], params: list[Tensor]) -> dict[str, Any]:
        return dict(zip(coordinator.replica.names_of(params), rows, strict=True))

    return _rearranged(state, named, coordinator.params, _with_references(coordinator))


def _by_position(coordinator: Coordinator, named: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of `named_state` to the form of `gossip_state`."""

    def in_order(rows: dict[str, Any], params: list[Tensor]) -> list[Any]:
        return [rows[name] for name in coordinator.replica.names_of(params)]

    unused = () if named["in_flight"] else ("launch_snapshot",)
    used = {key: value for key, value in named.items() if key not in unused}
    return _rearranged(used, in_order, coordinator.params, _with_references(coordinator))


def renumbered(state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Number the parameters in a state dict as in these groups, which name them in another order.

    Torch finds a parameter by its position, which may be another one in each process, as in a set.

    Args:
        state: the state dict of a base, which may contain the state of the gossip.
        groups: of a base or of its state dict.

    Returns:
        A new dict; `state` itself if it has the same order, or no names, or other ones. Groups are
        those of the same parameters, and otherwise those at the same position.
    """
    saved = state.get("param_groups", ())
    numbers: dict[str, Any] = {}
    for group in saved:
        numbers |= zip(group.get("param_names", ()), group.get("params", ()), strict=False)
    order = [numbers.get(name) for group in groups for name in group.get("param_names", ())]
    places = {number: place for place, number in enumerate(order)}
    counted = range(sum(len(group["params"]) for group in groups))
    if places.keys() != {*counted} or order == [*counted]:
        return state
    by_names = {frozenset(group.get("param_names", ())): group for group in saved}
    wanted = [frozenset(group.get("param_names", ())) for group in groups]
    # Otherwise torch refuses groups of other sizes.
    if by_names.keys() == {*wanted}:
        named = zip(wanted, groups, strict=True)
        saved = [by_names[key] | {"param_names": own.get("param_names", [])} for key, own in named]
    fresh = iter(range(sum(len(g["params"]) for g in saved)))
    moved = {**state, "state": {places.get(key, key): row for key, row in state["state"].items()}}
    moved["param_groups"] = [{**g, "params": [next(fresh) for _ in g["params"]]} for g in saved]
    if GOSSIP_KEY in state:
        gossip = moved[GOSSIP_KEY] = _rearranged(state[GOSSIP_KEY], _pick, order, order)
        if "plan" in gossip:
            gossip["plan"] = [[places[number] for number in bucket] for bucket in gossip["plan"]]
    return moved


def _pick(rows: list[Any], order: list[Any]) -> list[Any]:
    # References of some parameters only are left, which makes them unusable: all ranks raise.
    return [rows[number] for number in order] if len(rows) == len(order) else []


def _rearranged(
    saved: dict[str, Any],
    arrange: Callable[[Any, list[Any]], Any],
    params: list[Any],
    coded: list[Any],
) -> dict[str, Any]:
    """Copy a state, with `arrange` applied to each list of values of parameters."""
    state = dict(saved)
    if "launch_snapshot" in state:
        state["launch_snapshot"] = arrange(state["launch_snapshot"], params)
    if "extensions" in state:
        state["extensions"] = {
            name: {**each, "params": arrange(each["params"], params)}
            # Some have none, because it belongs to another rank.
            if "params" in (each or ())
            else each
            for name, each in state["extensions"].items()
        }
    if "references" in state and coded:
        state["references"] = {
            group: {**each, "values": arrange(each["values"], coded)}
            for group, each in state["references"].items()
        }
    return state


def prepare_load(
    coordinator: Coordinator, saved: Any, mixing_rate: float, by_name: bool = False
) -> Callable[[], None]:
    """Check a state, and return the function that continues from it.

    Args:
        coordinator: coordinates the rounds that are to continue; not changed yet.
        saved: a result of `gossip_state`; None means the start of the training.
        mixing_rate: the rate if none was saved.
        by_name: whether it is a result of `named_state`.

    Raises:
        ValueError: `saved` is something else, or belongs to other parameters.
    """
    coordinator.check_idle()
    if saved is None and not by_name:
        saved = {"round": 0, "in_flight": False}
    try:
        saved = _by_position(coordinator, saved) if by_name else dict(saved)
        return _read(coordinator, saved, mixing_rate)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        call = "gossip_state_dict" if by_name else "state_dict"
        raise ValueError(
            f"rank {coordinator.rounds.session.transport.initial_rank}: load_{call} expects what "
            f"{call}() of a DecentOptimWrapper around the same parameters has returned, but got "
            f"another state of the gossip ({type(error).__name__}: {error}); nothing was loaded"
        ) from error


def _read(coordinator: Coordinator, saved: dict[str, Any], rate: float) -> Callable[[], None]:
    """Read a state that may be anything; see `prepare_load`."""
    rounds, pacing = coordinator.rounds, coordinator.rounds.policy.pacing
    rate = check_mixing_rate(saved.get("mixing_rate", rate))
    launched = saved.get("launch_snapshot") if pacing.needs_snapshot else None
    pending = PendingResume(
        keeps_average=bool(saved.get("kept", False)),
        source=_source(coordinator, saved),
        # Others may have mixed it already, or count rounds in another way.
        in_flight=bool(saved["in_flight"]) and pacing.synchronous,
        rate=check_mixing_rate(saved.get("last_rate", rate)),
        age=max(1, index(saved.get("age", 1))) if pacing.needs_snapshot else 1,
        snapshot=_by_param(coordinator.params, launched) if launched and saved["in_flight"] else {},
    )
    round = index(saved["round"])
    if round < pending.in_flight * pending.age:
        raise ValueError(f"round must be 0 or more, and 1 in flight, got {round}")
    extensions = _read_extensions(coordinator, saved, is_own=pending.source == "own")
    references = _read_references(coordinator, saved)
    plan = read_plan(saved["plan"], coordinator.params, rounds.buckets) if "plan" in saved else []

    def load() -> None:
        coordinator.average.keep()
        try:
            coordinator.receive_and_abandon()
        finally:
            # Even if the round in flight has failed. Extensions load only now: that round may have
            # been sending their tensors, and a new plan changes their tensors.
            session = rounds.session
            if plan:
                rounds.set_buckets(rebuild(plan, rounds.buckets))
            for each in extensions:
                each()
            rounds.set_mixing_rate(rate)
            session.references.load(references, rounds.buckets, session.transport.members)
            rounds.resume_at(round, pending)

    return load


def _saved_by(coordinator: Coordinator) -> list[int]:
    """This rank and the members: a state that belongs to a rank is valid for these only."""
    transport = coordinator.rounds.session.transport
    return [transport.initial_rank, *transport.members]


def _source(coordinator: Coordinator, saved: dict[str, Any]) -> Literal["own", "other"] | None:
    """Which rank has saved the states of extensions that belong to a rank; see `PendingResume`."""
    if not coordinator.rounds.policy.pacing.synchronous:
        # Each rank may have saved its own round.
        return "other"
    belong = {each.name for each in coordinator.rounds.extensions.all if each.belongs_to_rank}
    if coordinator.members or not belong:
        # A rank that comes back may load at another step than the others.
        return None
    is_own = list(saved.get("saved_by", [])) == _saved_by(coordinator)
    return "own" if is_own and belong <= {*saved.get("extensions", {})} else "other"


def _read_extensions(
    coordinator: Coordinator, saved: dict[str, Any], is_own: bool
) -> list[Callable[[], None]]:
    """Check the states of the extensions; extensions without a valid state are reset."""
    states, extensions = saved.get("extensions", {}), coordinator.rounds.extensions.all
    if dropped := sorted({*states} - {each.name for each in extensions}):
        warn(
            f"the state of {' and '.join(dropped)} is dropped: pass the same extensions, or "
            f"options, as in the run that was saved, to go on with it"
        )
    # The states of another rank start again.
    names = [None if each.belongs_to_rank and not is_own else each.name for each in extensions]
    pairs = zip(extensions, names, strict=True)
    return [extension.prepare_load(states.get(name)) for extension, name in pairs]


def _by_param(params: Sequence[Tensor], values: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The saved value of each parameter, which must have its shape."""
    found = dict(zip(params, values, strict=True))
    for param, value in found.items():
        if param.shape != value.shape:
            raise ValueError(f"expected values of shape {param.shape}, got {value.shape}")
    return found


def _with_references(coordinator: Coordinator) -> list[Tensor]:
    """The parameters whose references a checkpoint contains.

    Ranks that do not mix in the same step may have mixed other rounds, so all references start
    again from zero.
    """
    rounds = coordinator.rounds
    are_saved = rounds.policy.pacing.synchronous and rounds.session.references.are_used
    members = with_references(rounds.buckets) if are_saved else ()
    return [param for param in coordinator.params if param in members]


def _read_references(coordinator: Coordinator, saved: dict[str, Any]) -> dict[str, SavedReference]:
    """The references by group; empty if there are none in the state or on this rank."""
    params = _with_references(coordinator)
    found = {}
    for group, reference in saved.get("references", {}).items() if params else ():
        kept = reference["values"]
        if len(kept) != len(params):
            # Parameters were frozen or unfrozen since, on all ranks: references start again.
            return {}
        found[group] = SavedReference(
            coded_rounds=index(reference["coded_rounds"]), values=_by_param(params, kept)
        )
    return found
