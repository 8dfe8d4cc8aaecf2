"""Builds the parts of a wrapper together with the other ranks, and compares what they train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from operator import ne
from types import NoneType

from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.checks import check_closures, instance_of
from decent_optim_wrapper.comm.process_groups import CPU
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Settings, default_comm_dtype, mixes_all
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.extension import ExtensionContext, Extensions
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.round import RoundPolicy
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.schedule import WithinStep
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.start.error_sharing import ErrorSharing, check_same, exchange
from decent_optim_wrapper.start.meeting import check_meeting, local_world_size_of, resolve_topology
from decent_optim_wrapper.start.membership import Trained
from decent_optim_wrapper.start.owners import add_owner, settle_owners
from decent_optim_wrapper.start.summary import warn_of_rounding
from decent_optim_wrapper.start.tensors import ModuleExtras, Tensors, check_parameters, find_tensors
from decent_optim_wrapper.topo import Topology, default_name
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast, digest
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.model_state import ModelState, gather_numbers
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.parameters import Named
from decent_optim_wrapper.wire.plan import bucket_bytes, extend_plan, in_agreed_order

# Read once: it takes a third of a millisecond.
__version__ = version("decent-optim-wrapper")


@dataclass(eq=False)
class Builder:
    """Builds the coordinator of a wrapper together with the other ranks, and adds parameters later.

    Received data is never unpickled: descriptions are sent as UTF-8 bytes in tensors.
    """

    sharing: ErrorSharing
    """Reaches the other ranks if this one fails, including the ranks of a mesh."""
    settings: Settings
    """How the ranks gossip."""
    optimizer: Optimizer
    """The base."""
    extensions: Extensions
    """The extensions that take part in rounds."""
    topology: str | Topology | None
    """A name or an instance; None for the default."""
    model: nn.Module | None
    """The model of the parameters, needed if they are sharded."""
    buffers: Iterable[Tensor] | None
    """Tensors to average in addition to the parameters; None takes the model's."""
    extras: ModuleExtras
    """What a module that contains the wrapper adds."""
    # What all ranks must have in common, which is known once they have met.
    _common: Sequence[str] = field(default=(), init=False)

    @cached_property
    def replica(self) -> Replica:
        """The ranks that share one copy of the model."""
        return self.sharing.replica(self.model)

    @cached_property
    def _tensors(self) -> Tensors:
        options = self.replica, self.settings, self.extras
        return find_tensors(self.sharing, self.optimizer, self.buffers, *options)

    @cached_property
    def _in_backward(self) -> bool:
        """True if buckets are filled in the order of a backward pass."""
        waits_for_each = self.settings.pacing.mixes_early and self.extras.steps_at_end
        return self.extras.in_backward and not waits_for_each

    @cached_property
    def _layout(self) -> Layout:
        settings, sharing = self.settings, self.sharing
        ordered = self.model if self._in_backward or settings.pacing.mixes_early else None
        # The parameters that the model has now, from the first to the last or backwards.
        step = -1 if self._in_backward else 1
        return Layout(
            cap_mb=settings.bucket_cap_mb,
            # Members that may change exchange tensors of any device over gloo.
            wire_device=(lambda _: CPU) if sharing.membership else sharing.transport.wire_device,
            codec=settings.codec,
            as_view=settings.param_as_bucket_view,
            order=lambda: [*ordered.parameters()][::step] if ordered is not None else (),
            copies=self.replica.copies,
        )

    @cached_property
    def _trained(self) -> Trained:
        """What a rank that comes back receives; the membership does not keep it."""
        state, parts = ModelState(self._tensors.state, self.model), self.extras.stateful
        return Trained(optimizer=self.optimizer, state=state, parts=parts, layout=self._layout)

    def build(self) -> Coordinator:
        """Meet the other ranks, compare what they train, and start from equal values; collective.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument contradicts another one or does not fit, or the ranks differ.
        """
        sharing, intervals = self.sharing, self.settings.schedule.intervals
        with sharing.propagating_errors():
            check_meeting(sharing.meeting)
            in_step = isinstance(self.settings.pacing, WithinStep)
            check_closures(self.optimizer, self.extras.in_backward or not in_step)
            instance_of("a torch.nn.Module or None", nn.Module, NoneType)("model", self.model)
            whole = None if sharing.meeting.mesh else self.model
            known = [] if whole is None else [*whole.parameters()]
            trains = any(param.requires_grad for param in known)
            if trains and {*params_of(self.optimizer)}.isdisjoint(known):
                raise ValueError(
                    f"rank {sharing.world.rank}: model expects the module that the optimizer "
                    f"trains, got one with none of its parameters; build it from model.parameters()"
                )
            self.replica.reshard()
            settle_owners(each.tensor for each in (*self._tensors.parameters, *self._tensors.state))
        with sharing.naming_late_ranks():
            transport, topology = self._find_ranks()
        sharing.meet(topology, intervals)
        if membership := sharing.membership:
            transport = membership.transport
        with sharing.propagating_errors():
            policy = self._attach(transport.initial_rank)
            self._common = self._describe(topology)
        parameters = self._tensors.parameters
        compare(sharing, transport, self._common, self._lines_of(parameters))
        self.replica.connect(named.tensor for named in parameters)
        if membership:
            session = membership.open_session()
        else:
            session = Session.connect(transport, topology, intervals)
        coordinator = self._connect(session, policy)
        self._start_from_same_values(coordinator)
        add_owner(coordinator)
        if membership:
            membership.begin(coordinator, self._trained)
        return coordinator

    def _find_ranks(self) -> tuple[Transport, Topology]:
        """Find the ranks, and agree on their topology; collective over a process group."""
        sharing, meeting, settings = self.sharing, self.sharing.meeting, self.settings
        if meeting.mesh is not None:
            # Ranks that gossip along different dimensions would not find each other.
            check_same(f"gossip_dim={meeting.gossip_dim!r}, {meeting.mesh}", sharing.transports)
        with sharing.propagating_errors():
            # All ranks make the same connections, in the same order, also if one fails later.
            transport, found = sharing.transport, sharing.world
            own = local_world_size_of(meeting, found.launched_as or range(found.world_size))
        # In a store the ranks cannot agree yet: each takes the size of its own node for all.
        if not sharing.elasticity and (exchange(sharing.transports, [own])[..., 0] != own).any():
            own = 1
        with sharing.propagating_errors():
            size, of_all = found.world_size, mixes_all(self.model, meeting.mesh, settings.pacing)
            given = default_name(size, own, of_all) if self.topology is None else self.topology
            topology = resolve_topology(given, size, meeting, own)
        if settings.comm_dtype is None:
            sends_more = any(each.sends for each in self.extensions.all)
            chosen = default_comm_dtype(topology, of_all, sends_more)
            self.settings = replace(settings, comm_dtype=chosen)
        return transport, topology

    def _attach(self, rank: int) -> RoundPolicy:
        """Attach the extensions; return what all rounds share."""
        pacing = self.settings.pacing
        policy = RoundPolicy(
            pacing=pacing,
            nonfinite=NonFinitePolicy.of(self.settings.on_nonfinite),
            meter=Meter(),
            extensions=self.extensions,
            in_backward_order=self._in_backward and pacing.mixes_early,
        )
        self.extensions.attach(
            ExtensionContext(
                rank=rank,
                optimizer=self.optimizer,
                layout=self._layout,
                intervals=self.settings.schedule.intervals,
                pacing=pacing,
                nonfinite=policy.nonfinite,
                replica=self.replica,
                meter=policy.meter,
            )
        )
        return policy

    def _describe(self, topology: Topology) -> list[str]:
        """What must be the same on all ranks, also on ranks with other parts of the model."""
        extensions = (e for e in self.extensions.all if e.name or e.sends or e.collective)
        described = (self.sharing.elasticity, *extensions)
        return [
            f"decent_optim_wrapper {__version__}, headers of {RoundHeader._fields}",
            f"topology {type(topology).__name__} with schedule {topology.digest}",
            f"timeout={self.sharing.meeting.timeout!r}",
            *self.settings.lines(),
            f"optimizer {type(self.optimizer).__name__}",
            *(each.describe() for each in described if each is not None),
        ]

    def _lines_of(self, parameters: Sequence[Named]) -> list[str]:
        """What must be the same of each tensor on the ranks that gossip with each other."""
        named = in_agreed_order([*parameters, *self._tensors.compared], self._layout)
        if not self._layout.as_view:
            return [each.describe() for each in named]
        # Views exchange their storage in memory order.
        return [f"{each.describe()}, strides {each.tensor.stride()}" for each in named]

    def add(self, rounds: Rounds, find: Callable[[], list[Named]], known: int) -> None:
        """Gossip these parameters from the next round on.

        It is collective over all ranks of a mesh.

        Args:
            rounds: the rounds.
            find: function that returns all parameters; the ranks share its errors.
            known: number of those that are not new, which come first.

        Raises:
            TypeError: a parameter cannot be exchanged.
            ValueError: a parameter cannot be exchanged, the ranks differ, or another rank raised
                any of these errors.
        """
        transport = rounds.session.transport
        with self.sharing.propagating_errors():
            parameters = find()
            check_parameters(parameters, (), self.replica, self.settings)
        compare(self.sharing, transport, self._common, self._lines_of(parameters))
        self.replica.connect(named.tensor for named in parameters)
        transport.begin_on(bucket_bytes((each.tensor for each in parameters), self._layout))
        if self.settings.sync_at_start and (late := parameters[known:]):
            self._broadcast(in_agreed_order(late, self._layout), transport)
        self._plan(rounds, parameters)

    def _plan(self, rounds: Rounds, named: Sequence[Named]) -> None:
        rounds.set_buckets(extend_plan(rounds.buckets, (n.tensor for n in named), self._layout))

    def _connect(self, session: Session, policy: RoundPolicy) -> Coordinator:
        """Build the coordinator, and make the first exchange in each group; collective."""
        settings, found, replica = self.settings, self._tensors, self.replica
        tensors = [named.tensor for named in (*found.parameters, *found.averaged)]
        session.transport.extend_watchdog(settings.pacing.longest_flight)
        session.transport.begin_on(bucket_bytes(tensors, self._layout))
        warn_of_rounding(settings, session)
        local = LocalUpdate(self.optimizer, self.extensions, session.transport.initial_rank)
        local.set_members(session.transport.world_size)
        rounds = Rounds(session, policy, settings.schedule.mixing_rate)
        averaged = ModelState(found.averaged, self.model)
        extra = partial(averaged.to_average, self._layout.plain, policy.nonfinite, replica)
        average = WorldAverage(rounds, replica, extra)
        return Coordinator(rounds, local, average, replica, members=self.sharing.membership)

    def _start_from_same_values(self, coordinator: Coordinator) -> None:
        """Take the values of rank 0, unless each rank keeps its own, and plan the buckets."""
        parameters, members = self._tensors.parameters, self.sharing.membership
        rounds, transport = coordinator.rounds, coordinator.rounds.session.transport
        takes = self.settings.sync_at_start and not (members and members.joins)
        if takes:
            others = self._trained.state.on_all_ranks(transport)
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
        has_names = all("param_names" in group for group in self.optimizer.param_groups)
        moved = [rank for rank, row in by_rank.items() if sorted(row) == sorted(first)]
        if moved and not has_names:
            raise ValueError(
                f"rank {transport.initial_rank}: expected parameters in one order on all ranks, "
                f"but ranks {moved} have the values of rank 0 in another order, at {some}; build "
                f"the optimizer from a list, not a set, or from model.named_parameters()"
            )
        broadcast((each.tensor for each in differing), transport, self._layout)
        if differing and transport.rank == 0:
            counts = {rank: sum(map(ne, row, first)) for rank, row in by_rank.items()}
            warn(
                f"the values of rank 0 have replaced others, tensors by rank: {counts} (of "
                f"{len(named)}), such as {some}. Load weights on rank 0 or on all ranks before the "
                f"wrapper is built; sync_at_start=False lets every rank keep its own. If they were "
                f"random, nothing is lost: call torch.manual_seed(0) before building the model"
            )


def compare(
    sharing: ErrorSharing, transport: Transport, common: Sequence[str], own: Sequence[str]
) -> None:
    """Compare what must be the same on all ranks; collective.

    Args:
        sharing: reaches all ranks, including the ranks of a mesh.
        transport: connects the ranks that gossip.
        common: what must be the same also on ranks with other parts of the model.
        own: what must be the same on the ranks that gossip with each other.

    Raises:
        ValueError: on every rank; names a rank that differs from rank 0, and the first difference.
    """
    membership, text = sharing.membership, "\n".join([*common, *own])
    if sharing.meeting.mesh is not None:
        check_same("\n".join(common), sharing.transports)
        with sharing.propagating_errors():
            check_same(text, [transport])
        exchange(sharing.transports, ())
    elif membership is None or not membership.joins:
        check_same(text, [transport])
    if membership:
        membership.agree(text)
