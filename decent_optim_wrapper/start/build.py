"""Builds the parts of a wrapper from the constructor's arguments, together with the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import ne
from types import NoneType

from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.checks import instance_of
from decent_optim_wrapper.comm.process_groups import CPU
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Settings
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.extension import ExtensionContext, Extensions
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.round import RoundPolicy
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.start.error_sharing import ErrorSharing, check_same, exchange
from decent_optim_wrapper.start.meeting import check_meeting, local_world_size_of, resolve_topology
from decent_optim_wrapper.start.membership import Trained
from decent_optim_wrapper.start.owners import add_owner, settle_owners
from decent_optim_wrapper.start.summary import warn_of_rounding
from decent_optim_wrapper.start.tensors import ModuleExtras, Tensors, check_parameters, find_tensors
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast, digest
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.model_state import ModelState, gather_numbers
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.parameters import Named
from decent_optim_wrapper.wire.plan import bucket_bytes, extend_plan, in_agreed_order

# Read once: it takes a third of a millisecond.
__version__ = version("decent-optim-wrapper")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a wrapper.

    Args:
        optimizer: the base.
        extensions: the extensions that take part in rounds.
        settings: the checked settings.
        topology: a name or an instance; None for the default.
        buffers: tensors to average in addition to the parameters; None takes the model's.
        model: the model of the parameters, needed if they are sharded.
        extras: the additions of a module that contains the wrapper.
    """

    optimizer: Optimizer
    extensions: Extensions
    settings: Settings
    topology: str | Topology | None
    buffers: Iterable[Tensor] | None
    model: nn.Module | None
    extras: ModuleExtras


def build(sharing: ErrorSharing, inputs: Inputs) -> tuple[Coordinator, Builder]:
    """Meet the other ranks, compare what they train, and start from the same values; collective.

    Args:
        sharing: reaches the other ranks.
        inputs: the inputs of the wrapper.

    Returns:
        The coordinator, and the object that adds later parameters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument contradicts another one or does not fit, or the ranks differ.
    """
    with sharing.failing_together():
        check_meeting(sharing.meeting)
        instance_of("a torch.nn.Module or None", nn.Module, NoneType)("model", inputs.model)
        replica = sharing.replica(inputs.model)
        replica.reshard()
        settings, extras = inputs.settings, inputs.extras
        tensors = find_tensors(sharing, inputs.optimizer, inputs.buffers, replica, settings, extras)
        settle_owners(each.tensor for each in (*tensors.parameters, *tensors.held))
    with sharing.naming_late_ranks():
        if (mesh := sharing.meeting.mesh) is not None:
            # Ranks that gossip along different dimensions would not find each other.
            check_same(f"gossip_dim={sharing.meeting.gossip_dim!r}, {mesh}", sharing.transports)
        transport, topology = _find_ranks(sharing, inputs)
    sharing.meet(topology, settings.schedule.intervals)
    if membership := sharing.membership:
        transport = membership.transport
    with sharing.failing_together():
        builder = Builder(sharing, inputs, tensors, replica, topology, transport)
    builder.check(tensors.parameters, transport)
    replica.connect(named.tensor for named in tensors.parameters)
    if membership:
        session = membership.open_session()
    else:
        session = Session.connect(transport, topology, settings.schedule.intervals)
    coordinator = builder.build_coordinator(session)
    coordinator.local_update.set_members(session.transport.world_size)
    builder.start_from_same_values(coordinator)
    add_owner(coordinator)
    if membership:
        membership.begin(coordinator, builder.trained)
    return coordinator, builder


def _params_of(model: nn.Module, backwards: bool) -> list[Tensor]:
    """The parameters that a model has now, from the first to the last or backwards."""
    params: list[Tensor] = [*model.parameters()]
    return params[::-1] if backwards else params


def _find_ranks(sharing: ErrorSharing, inputs: Inputs) -> tuple[Transport, Topology]:
    """Find the ranks, and agree on their topology; collective over a process group.

    Args:
        sharing: reaches the other ranks.
        inputs: with the topology.
    """
    with sharing.failing_together():
        # All ranks make the same connections, in the same order, also if one of them fails later.
        transport, found = sharing.transport, sharing.world
        own = local_world_size_of(sharing.meeting, found.launched_as or range(found.world_size))
    # In a store the ranks cannot agree yet: each takes the size of its own node for all.
    if not sharing.elasticity and (exchange(sharing.transports, [own])[..., 0] != own).any():
        own = 1
    with sharing.failing_together():
        return transport, resolve_topology(inputs.topology, found.world_size, sharing.meeting, own)


class Builder:
    """Builds the coordinator of ranks that have met, and checks that they train the same model.

    Received data is never unpickled: descriptions are sent as UTF-8 bytes in tensors.

    Args:
        sharing: reaches the other ranks if this one fails, including the ranks of a mesh.
        inputs: the inputs of the wrapper.
        tensors: the tensors of this rank.
        replica: the ranks that share one copy of the model.
        topology: the topology of all ranks.
        transport: connects the ranks that gossip.
    """

    def __init__(
        self,
        sharing: ErrorSharing,
        inputs: Inputs,
        tensors: Tensors,
        replica: Replica,
        topology: Topology,
        transport: Transport,
    ) -> None:
        self._sharing = sharing
        self._inputs = inputs
        self._settings = settings = inputs.settings
        self._tensors = tensors
        # The user's group; None if the ranks meet in a store.
        self.process_group = sharing.process_group
        self.replica = replica
        self.membership = membership = sharing.membership
        state = ModelState(tensors.held, inputs.model)
        extras, mixes_early = inputs.extras, settings.pacing.mixes_early
        in_backward = extras.in_backward and not (mixes_early and extras.steps_at_end)
        self._policy = policy = RoundPolicy(
            pacing=settings.pacing,
            nonfinite=NonFinitePolicy.of(settings.on_nonfinite),
            meter=Meter(),
            extensions=inputs.extensions,
            in_backward_order=in_backward and mixes_early,
        )
        ordered = inputs.model if in_backward or mixes_early else None
        self._layout = Layout(
            cap_mb=settings.bucket_cap_mb,
            # Members that may change exchange tensors of any device over gloo.
            wire_device=transport.wire_device if membership is None else lambda _: CPU,
            codec=settings.codec,
            as_view=settings.param_as_bucket_view,
            order=tuple if ordered is None else partial(_params_of, ordered, in_backward),
            copies=replica.copies,
        )
        # What a rank that comes back receives; the membership needs it.
        self.trained = Trained(
            optimizer=inputs.optimizer, state=state, parts=extras.stateful, layout=self._layout
        )
        inputs.extensions.attach(
            ExtensionContext(
                rank=transport.initial_rank,
                optimizer=inputs.optimizer,
                layout=self._layout,
                intervals=settings.schedule.intervals,
                pacing=policy.pacing,
                nonfinite=policy.nonfinite,
                replica=self.replica,
                meter=policy.meter,
            )
        )
        extensions = (e for e in inputs.extensions.all if e.name or e.sends or e.collective)
        # What must be the same on all ranks, also on ranks with other parts of the model.
        self._common = [
            f"decent_optim_wrapper {__version__}, headers of {RoundHeader._fields}",
            f"topology {type(topology).__name__} with schedule {topology.digest}",
            *settings.lines(),
            f"optimizer {type(inputs.optimizer).__name__}",
            *(each.describe() for each in (sharing.elasticity, *extensions) if each is not None),
        ]

    def check(self, parameters: Sequence[Named], transport: Transport) -> None:
        """Compare the settings and all tensors with the other ranks; collective.

        Raises:
            ValueError: on every rank; names a rank that differs from rank 0, and the first
                difference.
        """
        lines = [*self._common]
        for each in in_agreed_order([*parameters, *self._tensors.compared], self._layout):
            # Views exchange their storage in memory order.
            strides = f", strides {each.tensor.stride()}" if self._layout.as_view else ""
            lines.append(f"{each.describe()}{strides}")
        text, sharing, membership = "\n".join(lines), self._sharing, self.membership
        if sharing.meeting.mesh is not None:
            check_same("\n".join(self._common), sharing.transports)
            with sharing.failing_together():
                check_same(text, [transport])
            exchange(sharing.transports, ())
        elif membership is None or not membership.joins:
            check_same(text, [transport])
        if membership:
            membership.agree(text)

    def add(self, rounds: Rounds, parameters: Sequence[Named], late: Sequence[Named]) -> None:
        """Gossip these parameters from the next round on; `late` are the new ones.

        It is collective over all ranks of a mesh.

        Raises:
            TypeError: a parameter cannot be exchanged.
            ValueError: a parameter cannot be exchanged, the ranks differ, or another rank raised
                any of these errors.
        """
        transport, replica = rounds.session.transport, self.replica
        with self._sharing.failing_together():
            check_parameters(parameters, (), replica, self._settings)
        self.check(parameters, transport)
        replica.connect(named.tensor for named in parameters)
        transport.begin_on(bucket_bytes((each.tensor for each in parameters), self._layout))
        if self._settings.sync_at_start and late:
            self._broadcast(in_agreed_order(late, self._layout), transport)
        self._plan(rounds, parameters)

    def _plan(self, rounds: Rounds, named: Sequence[Named]) -> None:
        rounds.set_buckets(extend_plan(rounds.buckets, (n.tensor for n in named), self._layout))

    def build_coordinator(self, session: Session) -> Coordinator:
        """Build the coordinator, and make the first exchange in each group; collective."""
        inputs, settings, found = self._inputs, self._settings, self._tensors
        tensors = [named.tensor for named in (*found.parameters, *found.averaged)]
        session.transport.extend_watchdog(settings.pacing.longest_flight)
        session.transport.begin_on(bucket_bytes(tensors, self._layout))
        warn_of_rounding(settings, session)
        local = LocalUpdate(inputs.optimizer, inputs.extensions, session.transport.initial_rank)
        rounds = Rounds(session, self._policy, settings.schedule.mixing_rate)
        options = (self._layout.plain, self._policy.nonfinite, self.replica)
        extra = partial(ModelState(found.averaged, inputs.model).to_average, *options)
        average = WorldAverage(rounds, self.replica, extra)
        return Coordinator(rounds, local, average, self.replica, members=self.membership)

    def start_from_same_values(self, coordinator: Coordinator) -> None:
        """Take the values of rank 0, unless each rank keeps its own, and plan the buckets."""
        parameters, members, rounds = self._tensors.parameters, self.membership, coordinator.rounds
        takes = self._settings.sync_at_start and not (members and members.joins)
        if takes:
            transport = rounds.session.transport
            others = self.trained.state.on_all_ranks(transport)
            self._broadcast([*in_agreed_order(parameters, self._layout), *others], transport)
        coordinator.local_update.register(parameters)
        self._plan(rounds, parameters)
        if takes:
            rounds.session.references.begin(rounds.buckets)

    def _broadcast(self, named: Sequence[Named], transport: Transport) -> None:
        """Take the values of rank 0 where other ranks have different ones, and warn; collective.

        Raises:
            ValueError: without names, a rank has the values of rank 0 in another order; raised on
                all ranks, of which none has changed its values.
        """
        rows = gather_numbers([digest(each.tensor) for each in named], transport)
        differing = [each for each, row in zip(named, rows, strict=True) if len({*row}) > 1]
        some = ", ".join(each.name for each in differing[:5])
        first, *others = zip(*rows, strict=True)
        ranks = zip(transport.members[1:], others, strict=True)
        by_rank = {rank: row for rank, row in ranks if row != first}
        has_names = all("param_names" in group for group in self._inputs.optimizer.param_groups)
        moved = [rank for rank, row in by_rank.items() if sorted(row) == sorted(first)]
        if moved and not has_names:
            raise ValueError(
                f"rank {transport.initial_rank}: expected parameters in one order on all ranks, "
                f"but ranks {moved} have the values of rank 0 in another order, at {some}; build "
                f"the optimizer from a list in the same order on every rank, not from a set, or "
                f"with names, as in SGD(model.named_parameters())"
            )
        broadcast((each.tensor for each in differing), transport, self._layout)
        if differing and transport.rank == 0:
            counts = {rank: sum(map(ne, row, first)) for rank, row in by_rank.items()}
            warn(
                f"the values of rank 0 have replaced others, tensors by rank: {counts} (of "
                f"{len(named)}), such as {some}. Load weights on rank 0 or on all ranks before the "
                f"wrapper is built; sync_at_start=False lets every rank keep its own. If they were "
                f"random, nothing is lost: call torch.manual_seed(0) on all ranks before the model "
                f"is built"
            )
