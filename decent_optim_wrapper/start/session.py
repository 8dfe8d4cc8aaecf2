"""Builds the parts of a wrapper from the constructor's arguments, together with the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, Settings
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.hand_over import HandOver
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.extension import ExtensionContext, Extensions
from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.parameters import (
    Named,
    check_dense,
    check_model,
    check_shards,
    check_tensors,
    named_buffers,
    named_parameters,
)
from decent_optim_wrapper.gossip.schedule import Pacing, Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.arguments import (
    check_arguments,
    check_sizes,
    resolve_store,
    resolve_topology,
)
from decent_optim_wrapper.start.consistency import Agreement
from decent_optim_wrapper.start.nodes import (
    agree_on_local_world_size,
    launched_local_world_size,
    node_name,
    ranks_per_node,
)
from decent_optim_wrapper.start.start import Start
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import Layout, extend_plan, plan_buckets
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.references import MOST_REFERENCES


@dataclass(frozen=True)
class Extras:
    """What a module that contains the optimizer adds to it.

    Args:
        order: the parameters that go first into buckets, in this order; empty means the order of
            the groups.
        carried: further tensors that are the same on all ranks at the start, and that a restarted
            rank receives.
        parts: objects whose `state_dict` a restarted rank receives.
    """

    order: tuple[Tensor, ...] = ()
    carried: tuple[Tensor, ...] = ()
    parts: tuple[Any, ...] = ()


@dataclass
class Parts:
    """The parts of a wrapper.

    Args:
        gossip: the rounds and the collective calls.
        agreement: what is the same on all ranks.
        process_group: the user's; None if the ranks meet in a store.
        hand_over: sends the state to ranks that come back; None if none can.
        join_config: that of torch.distributed.algorithms.Join. It is not on the wrapper: Join sets
            it on whatever it is given, such as Fabric's proxy of the wrapper, but steps read it
            here.
    """

    gossip: Gossip
    agreement: Agreement
    process_group: Any | None
    hand_over: HandOver | None
    join_config: Any = None


class _World(NamedTuple):
    """The ranks and their connections.

    Args:
        process_group: the user's; None if the ranks meet in a store.
        transport: connects the ranks.
        topology: that of all ranks.
        recovery: continues without lost ranks; None if their loss is an error.
    """

    process_group: Any | None
    transport: Transport
    topology: Topology
    recovery: Recovery | None


def open_session(
    local_update: LocalUpdate,
    optimizer: Optimizer,
    extensions: Extensions,
    settings: Settings,
    start: Start,
    topology: str | Topology,
    buffers: Iterable[Tensor],
    extras: Extras,
    model: nn.Module | None = None,
) -> Parts:
    """Meet the other ranks, compare what they train, and start from the same values; collective.

    Args:
        local_update: steps the base.
        optimizer: the base.
        extensions: what takes part besides the parameters.
        settings: the checked settings.
        start: reaches the other ranks.
        topology: a name or an instance.
        buffers: tensors to average in addition to the parameters.
        extras: what a module around the wrapper adds.
        model: the model of the parameters, needed if they are sharded.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument contradicts another or does not fit, or the ranks differ.
    """
    with start.failing_together():
        check_arguments(start.arguments)
    with start.over_the_mesh() as description:
        with start.failing_together():
            averaged = named_buffers(buffers)
            carried = [Named("tensor", str(i), tensor) for i, tensor in enumerate(extras.carried)]
            others = [*averaged, *carried]
            check_dense(others)
            parameters = named_parameters(optimizer.param_groups)
            replica = Replica(start.dimensions, check_model(model), start.gossip_ranks)
            _check_pacing(settings.pacing, replica)
            replica.reshard()
            check_shards([*parameters, *others], replica, settings.param_as_bucket_view)
            check_tensors(parameters)
        world = _find_world(start, topology, settings)
        transport, recovery = world.transport, world.recovery
        layout = Layout(
            settings.bucket_cap_mb,
            transport.wire_device if recovery is None else _on_cpu,
            settings.codec,
            settings.param_as_bucket_view,
            extras.order,
            replica.copies,
        )
        nonfinite, meter = NonFinitePolicy(settings.on_nonfinite), Meter()
        with start.failing_together():
            for each in extensions.all:
                each.attach(
                    ExtensionContext(
                        rank=transport.initial_rank,
                        optimizer=optimizer,
                        layout=layout,
                        intervals=settings.schedule.intervals,
                        pacing=settings.pacing,
                        nonfinite=nonfinite,
                        replica=replica,
                        meter=meter,
                        detach=partial(extensions.drop, each),
                    )
                )
            lines = [*settings.lines(), f"optimizer {type(optimizer).__name__}"]
            lines += [each.describe() for each in extensions.all if each.name or each.sends]
            if start.arguments.elastic is not None:
                lines.append(f"stale_after={start.arguments.elastic.stale_after}")
            sync = settings.sync_at_start
            agreement = Agreement(world.topology, layout, lines, others, recovery, sync, start)
            description += agreement.settings
        agreement.check(parameters, transport)
    replica.connect(named.tensor for named in parameters)

    session = _connect(world, settings, [named.tensor.device for named in (*parameters, *averaged)])
    if isinstance(topology, str):
        # The schedules of all ranks are needed no more; a user's own topology is left alone.
        world.topology.release()
        session.topology.release()
    _warn_of_codes(settings, layout, session)
    _warn_of_rare_rounds(settings, optimizer)
    extra = [named.tensor for named in averaged if named.tensor.is_floating_point()]
    if not sync:
        # Frozen parameters are then not the same everywhere.
        extra += [p.tensor for p in parameters if not p.tensor.requires_grad]
    gossip = Gossip(
        session,
        local_update,
        WorldAverage(transport.initial_rank, nonfinite, plan_buckets(extra, layout.plain)),
        nonfinite,
        meter,
        replica,
        mixing_rate=settings.schedule.mixing_rate,
        pacing=settings.pacing,
        extensions=extensions,
        members=recovery,
    )
    agreement.start(parameters, transport)
    local_update.know(parameters)
    gossip.buckets = extend_plan((), (p.tensor for p in parameters), layout)
    if sync and not (recovery and recovery.joins):
        session.references.begin(gossip.buckets)
    hand_over = None
    if recovery:
        hand_over = HandOver(optimizer, gossip, others, extras.parts, layout)
        recovery.begin(gossip, hand_over)
    return Parts(
        gossip=gossip,
        agreement=agreement,
        process_group=world.process_group,
        hand_over=hand_over,
    )


def _find_world(start: Start, topology: str | Topology, settings: Settings) -> _World:
    """Meet the other ranks in the process group or in the store; collective."""
    if start.arguments.elastic is None:
        return _in_process_group(start, topology)
    return _in_store(start, topology, settings, start.arguments.elastic)


def _in_process_group(start: Start, topology: str | Topology) -> _World:
    arguments = start.arguments
    with start.failing_together():
        group, transport = start.process_group, start.transport
        check_sizes(group, arguments.rank, arguments.world_size)
        node = node_name(arguments.local_world_size or launched_local_world_size(), transport.rank)
    local_world_size = agree_on_local_world_size(arguments.local_world_size, node, transport)
    with start.failing_together():
        resolved = resolve_topology(topology, transport.world_size, arguments, local_world_size)
    return _World(process_group=group, transport=transport, topology=resolved, recovery=None)


def _in_store(
    start: Start, topology: str | Topology, settings: Settings, elastic: Elastic
) -> _World:
    arguments = start.arguments
    with start.failing_together():
        found = resolve_store(arguments)
        # Nobody is there to agree with yet: every rank takes its own node for the size of all.
        local_world_size = arguments.local_world_size
        if local_world_size is None:
            size = launched_local_world_size()
            local_world_size = ranks_per_node([rank // size for rank in found.launched_as])
        resolved = resolve_topology(topology, found.world_size, arguments, local_world_size)
    timeout = settings.patience or found.timeout
    rendezvous = Rendezvous(found.store, found.rank, found.world_size, timeout, elastic.stale_after)
    epoch = rendezvous.gather(FIRST_NOTE)
    recovery = Recovery(
        rendezvous, epoch, resolved, settings.schedule, elastic.on_membership_change
    )
    return _World(
        process_group=None, transport=recovery.transport, topology=resolved, recovery=recovery
    )


def _connect(world: _World, settings: Settings, devices: Iterable[torch.device]) -> Session:
    if world.recovery:
        return world.recovery.open_session()
    intervals, distinct = settings.schedule.intervals, tuple(dict.fromkeys(devices))
    return Session.connect(world.transport, world.topology, intervals, devices=distinct)


def _check_pacing(pacing: Pacing, replica: Replica) -> None:
    if not pacing.synchronous and replica.size > 1:
        raise ValueError(
            'gossip_every="auto" expects a whole replica on every rank: the shards of a replica '
            "would be mixed in different steps; pass a number of steps, and staleness to let a "
            "round travel under several of them"
        )


def _on_cpu(device: torch.device) -> torch.device:
    """The device on which gloo exchanges tensors of any device."""
    return torch.device("cpu")


def _warn_of_codes(settings: Settings, layout: Layout, session: Session) -> None:
    """Warn where `comm_dtype` saves nothing, or errs more than users may expect."""
    # What holds for all ranks is said by one of them.
    if settings.codec is None or session.transport.initial_rank:
        return
    transport, device = session.transport, session.transport.exchange_device
    widest = max(group.size for group in session.schedule.phases)
    if widest > 2 and not transport.sends_alone(layout.wire_device(device)):
        warn(
            f"comm_dtype={settings.comm_dtype} saves nothing in groups of more than two over NCCL, "
            f"which {session.topology!r} has; take a topology of pairs, such as ring"
        )
    if settings.codec.uses_reference and not session.references.keeps:
        warn(
            f"with comm_dtype={settings.comm_dtype}, {session.topology!r} has more than "
            f"{MOST_REFERENCES} groups per rank, too many to keep a reference for each: the "
            f"parameters themselves are rounded, and replicas stay further apart; take a topology "
            f"of fewer partners, such as ring"
        )


def _warn_of_rare_rounds(settings: Settings, optimizer: Optimizer) -> None:
    """Warn of options with which ranks drift apart."""
    schedule = settings.schedule
    if settings.gradient_tracking and schedule.gossip_every != 1:
        warn(
            f"gradient_tracking gains less with gossip_every={schedule.gossip_every!r}, since the "
            f"estimates are older; mix in every step, and send fewer bytes with comm_dtype"
        )
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("ScheduleFree" in kind for kind in kinds) and "z" not in schedule.average_state:
        warn(
            f"{kinds[0]} keeps an iterate of its own in the state, which drifts apart where only "
            f'parameters are mixed; pass Schedule(average_state=("z",))'
        )
