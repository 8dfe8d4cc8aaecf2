"""What stands behind the facade, put together in the order in which the ranks must meet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import index, itemgetter
from typing import Any, NamedTuple

from loguru import logger
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.comm.call_order import Call
from decent_optim_wrapper.comm.state_transfer import receive_state, send_state, sendable
from decent_optim_wrapper.config import Extras, Schedule, Settings, check_mixing_rate
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.average import WorldAverage, consensus_distance
from decent_optim_wrapper.gossip.bucket import Layout, plan_buckets
from decent_optim_wrapper.gossip.identical_ranks import IdenticalRanks
from decent_optim_wrapper.gossip.optimizer_state import StatePolicy
from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.post_mix import PostMixHooks
from decent_optim_wrapper.gossip.round import Rules
from decent_optim_wrapper.gossip.rounds import Gossip, GossipState
from decent_optim_wrapper.gossip.schedule import Kind, RoundSchedule
from decent_optim_wrapper.gossip.step import Step
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.membership.consistency import (
    Agreement,
    Named,
    check_dense,
    check_gradients,
    check_tensors,
    named_buffers,
    named_parameters,
)
from decent_optim_wrapper.membership.start import Start
from decent_optim_wrapper.membership.world import find_world
from decent_optim_wrapper.topo import Topology


class SavedState(NamedTuple):
    """What a state dict holds beside the base's state, checked.

    Args:
        gossip: the counter and the rates.
        kept: whether an average was in place, which the next step keeps.
        outer: the outer optimizer with the state that was saved, if there is one.
    """

    gossip: GossipState
    kept: bool
    outer: Outer | None


class Engine:
    """The parts of one wrapper, and what they do together.

    Args:
        optimizer: the base.
        settings: checked.
        start: the way to the other ranks.
        topology: a name or an instance.
        buffers: what is averaged beside the parameters.
        extras: see there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings,
        start: Start,
        topology: str | Topology,
        buffers: Iterable[Tensor],
        extras: Extras,
    ) -> None:
        self.settings = settings
        self.meter = Meter()
        # How often this rank has taken over the others' state.
        self.takeovers = 0
        # torch.distributed.algorithms.Join's, whether it is entered or not.
        self.join_config: Any = None
        # Whether an average was in place when the state was saved from which this run goes on.
        self._kept = False
        # Of all parameters that the base had when their buckets were planned.
        self._named: dict[int, str] = {}
        self._optimizer = optimizer
        self._extras = extras
        with start.failing_together():
            self._buffers = named_buffers(buffers)
            others = [Named("tensor", str(i), tensor) for i, tensor in enumerate(extras.carried)]
            self._others = [*self._buffers, *others]
            check_dense(self._others)
            parameters = named_parameters(optimizer.param_groups)
            check_tensors(parameters)
            outer = make_outer(settings.schedule, optimizer)

        found = find_world(start, topology, settings)
        self.process_group, self.transport = found.process_group, found.transport
        self._topology, self._recovery = found.topology, found.recovery
        self.layout = Layout(
            settings.bucket_cap_mb,
            self.transport.wire_device,
            settings.comm_dtype,
            settings.param_as_bucket_view,
        )
        with start.failing_together():
            kind = f"optimizer {type(optimizer).__name__}"
            lines = [*settings.lines(), f"outer={outer}", kind]
            if start.place.elastic is not None:
                lines.append(f"stale_after={start.place.elastic.stale_after}")
            # Of all ranks: one that comes back while another is away must find what it says.
            self._agreement = Agreement(self.transport, self._topology, self.layout, lines)
        self._agree([*parameters, *self._others])

        self.gossip = self._make_gossip(outer)
        if isinstance(topology, str):
            # The schedules of all ranks are needed no more; a user's own topology is left alone.
            self._topology.release()
            self.topology.release()
        self._warn_of_wide_groups()
        if settings.sync_at_start and not self._joins:
            self._agreement.synchronize([*parameters, *self._others])
        self.take_in(parameters)
        self.average = WorldAverage(
            self.transport, self.gossip, self._rules, self._plan_extra(parameters)
        )
        if self._recovery:
            self._recovery.begin(self.gossip, self._hand_over, self._mirror)

    @property
    def topology(self) -> Topology:
        """The topology of the ranks that are there."""
        return self._topology if self._recovery is None else self._recovery.topology

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, as numbered at the start."""
        return self.transport.members

    @property
    def differs(self) -> bool:
        """Whether a round is in flight, and the values in place differ by rank."""
        alone = self.transport.world_size == 1
        return self.gossip.state.in_flight and not self.average.revertible and not alone

    def add(self, parameters: list[Named], late: list[Named]) -> None:
        """Gossip the parameters from the next round on, of which `late` are new; collective."""
        check_tensors(parameters)
        self._agree([*parameters, *self._others])
        if self.settings.sync_at_start and late:
            self._agreement.broadcast(late, source=0)
        self.take_in(parameters)

    def know(self, parameters: Iterable[Named]) -> None:
        """Take them for additions, not for others in the place of those that are gossiped."""
        self._named |= {id(each.tensor): each.name for each in parameters}

    def take_in(self, parameters: Iterable[Named]) -> None:
        """Gossip those parameters that want a gradient, beside those that are gossiped already."""
        parameters = list(parameters)
        self.know(parameters)
        known = {id(tensor) for bucket in self.gossip.buckets for tensor in bucket.members}
        tensors = {id(p.tensor): p.tensor for p in parameters}
        live = [t for key, t in tensors.items() if t.requires_grad or key in known]
        ordered = sorted(zip(self._extras.places(live), live, strict=True), key=itemgetter(0))
        wanted = [tensor for _, tensor in ordered]
        if self.layout.as_view:
            # Members stay in the storage that they have.
            fresh = plan_buckets((t for t in wanted if id(t) not in known), self.layout)
            self.gossip.replan([*self.gossip.buckets, *fresh])
        else:
            # The plan of a new wrapper on the same groups: a resumed run sums in the same order.
            self.gossip.replan(plan_buckets(wanted, self.layout))

    def before_step(self) -> None:
        """Notice what was done to parameters, averages and members since the last step."""
        self.transport.check_open()
        self.check_parameters()
        if self.average.revertible or self._kept:
            self.keep_average()
        if self._recovery:
            self._recovery.begin_step()
        self._post_mix.begin(self.gossip.buckets)

    def global_avg(self, may_revert: bool) -> None:
        """Put the average in place; collective."""
        self.check_parameters()
        with self.failing_together():
            self.gossip.arrive()
        self.meet(Call.GLOBAL_AVG, lambda: self.average.apply(may_revert))
        if not may_revert:
            self.keep_average()

    def keep_average(self) -> None:
        """Accept the average in place as the ranks' own parameters; collective."""
        self._kept = False
        self.average.keep()
        with self.failing_together():
            self.gossip.discard()
            if self._recovery and self.settings.schedule.average_state == "average":
                self._recovery.meet(Call.KEEP_AVERAGE, self._keep_state)
            else:
                self._keep_state()

    def synchronize(self) -> None:
        """Finish and mix the round in flight."""
        self.check_parameters()
        with self.failing_together():
            self.gossip.finish()

    def gossip_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the base's state."""
        state = self.gossip.state._asdict()
        if self.average.revertible:
            # What a step() would do with the parameters that are saved now.
            state |= {"in_flight": False, "kept": True}
        return {**state, **self._post_mix.state_dict()}

    def read(self, saved: Any) -> SavedState:
        """Check what `gossip_state()` has returned; None is the start of the training.

        Raises:
            ValueError: it has not returned that, or not for these parameters.
        """
        saved = {"round": 0, "in_flight": False} if saved is None else saved
        try:
            rate = check_mixing_rate(saved.get("mixing_rate", self.settings.schedule.mixing_rate))
            last_rate = check_mixing_rate(saved.get("last_rate", rate))
            state = GossipState(index(saved["round"]), bool(saved["in_flight"]), rate, last_rate)
            if state.round < state.in_flight:
                raise ValueError(f"round must be 0 or more, and 1 in flight, got {state.round}")
            outer = self._post_mix.read(saved)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"rank {self.transport.name}: load_state_dict expects what state_dict() of a "
                f"DecentOptimWrapper around the same parameters has returned, but its key 'gossip' "
                f"holds something else ({type(error).__name__}: {error}); nothing was loaded"
            ) from error
        return SavedState(gossip=state, kept=bool(saved.get("kept", False)), outer=outer)

    def restore(self, saved: SavedState) -> None:
        """Continue from a state that was saved."""
        self.average.keep()
        self._kept = saved.kept
        self._post_mix.restore(saved.outer)
        self.gossip.restore(saved.gossip)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Everything of a step but the local update."""
        self.meter.reset()
        self.before_step()
        with self.failing_together():
            with Step(self.gossip, self.meter) as step:
                yield step
            self.after_launch()

    def idle_step(self) -> None:
        """One round without a local update."""
        with self.step() as step:
            step.advance(step.buckets, lambda: None)
        self.tell_change()

    @contextmanager
    def failing_together(self, *shared: type[Exception]) -> Iterator[None]:
        """Tell the others if the body fails on this rank, since they would wait for it in vain.

        Args:
            shared: further errors that all ranks raise together, and that change nothing.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, (PeerError, CallOrderError, NonFiniteError, *shared)):
                raise
            self.gossip.abandon()
            self.transport.fail(error)
            if self._recovery:
                self._recovery.leave()
            raise

    def after_launch(self) -> None:
        """End the step: with its round, too, where that is not left to overlap."""
        if self._recovery:
            self._recovery.end_step()
        if not self.settings.overlap:
            self.gossip.finish()
        self.meter.close(len(self.gossip.buckets), self.gossip.state.round)

    def meet(self, call: Call, action: Callable[[], Any]) -> Any:
        """Do something in which all ranks take part, again with those that are left if one is lost.

        Args:
            call: the method that this rank is in.
            action: may be repeated.
        """
        self.transport.check_open()
        self.check_parameters()
        with self.failing_together(ValueError):
            if self._recovery:
                result = self._recovery.meet(call, action)
            else:
                self.gossip.announce(call)
                result = action()
        self.tell_change()
        return result

    def tell_change(self) -> None:
        """Tell the user of a change of the members, once this rank has nothing left to do in it."""
        if self._recovery:
            self._recovery.tell_change()

    def check_parameters(self) -> None:
        """Notice what was done to the parameters since the wrapper was built."""
        self._check_identity()
        if relocated := [tensor for bucket in self.gossip.buckets for tensor in bucket.relocated()]:
            raise RuntimeError(
                f"rank {self.transport.name}: expected the parameters as they were when the "
                f"wrapper was built, but the storage of {self._names(relocated)} was replaced or "
                f"converted; move and convert the model before building the wrapper, and change "
                f"values in place"
            )
        if changed := self.gossip.changed_in_flight():
            raise RuntimeError(
                f"rank {self.transport.name}: expected the parameters as the last step() left "
                f"them, but the values of {self._names(changed)} were changed while they were "
                f"being sent to other ranks, which may have received either; call synchronize() "
                f"before changing values by hand, or pass param_as_bucket_view=False. To go on "
                f"from here, load a checkpoint on all ranks"
            )
        check_gradients(self._optimizer.param_groups, self.transport.name)

    def _check_identity(self) -> None:
        """Notice another Parameter in the place of one that is gossiped."""
        here = {id(param) for group in self._optimizer.param_groups for param in group["params"]}
        buckets = self.gossip.buckets
        gone = [tensor for each in buckets for tensor in each.members if id(tensor) not in here]
        # A group that was only taken out is gossiped on, as what is frozen.
        if gone and here - self._named.keys():
            raise RuntimeError(
                f"rank {self.transport.name}: expected in param_groups the parameters that the "
                f"wrapper knows, but {self._names(gone)} was replaced by another Parameter, which "
                f"no other rank would get; change values in place (param.copy_() under "
                f"torch.no_grad()), or build the optimizer and the wrapper again"
            )

    def _names(self, tensors: Iterable[Tensor]) -> str:
        return ", ".join(self._named[id(tensor)] for tensor in tensors)

    def _make_gossip(self, outer: Outer | None) -> Gossip:
        rules = Rules(
            on_nonfinite=self.settings.on_nonfinite,
            topology=repr(self.topology),
            identical=IdenticalRanks(self.transport.name),
        )
        self._rules = rules.for_transport(self.transport)
        policy = StatePolicy(
            averages=self.settings.schedule.average_state == "average",
            optimizer=self._optimizer,
            transport=self.transport,
            layout=self.layout,
            rules=self._rules,
            meter=self.meter,
        )
        heals = self._rules.on_nonfinite == "skip"
        self._post_mix = PostMixHooks(policy, outer, heals)
        return Gossip(
            *(self.transport, self._schedule(), self._rules, self.meter, self._post_mix),
            self.settings.schedule.mixing_rate,
        )

    def _schedule(self) -> RoundSchedule:
        return RoundSchedule(
            self.topology.schedule(self.transport.rank),
            self.transport.rank,
            self.transport.world_size,
            self.settings.schedule.gossip_every,
            self.settings.schedule.global_avg_every,
        )

    def _agree(self, tensors: list[Named]) -> None:
        text = self._agreement.describe(tensors)
        if self._extras.order:
            places = str(self._extras.places(each.tensor for each in tensors)).encode()
            text += f"\nbuckets filled in the order {hashlib.sha256(places).hexdigest()[:8]}"
        if not self._joins:
            self._agreement.check(text)
        if self._recovery:
            self._recovery.agree(text)

    @property
    def _joins(self) -> bool:
        return self._recovery is not None and self._recovery.joins

    def _plan_extra(self, parameters: list[Named]) -> tuple[Any, ...]:
        extra = [b.tensor for b in self._buffers if b.tensor.is_floating_point()]
        if not self.settings.sync_at_start:
            # Frozen parameters are then not the same everywhere.
            extra += [p.tensor for p in parameters if not p.tensor.requires_grad]
        return plan_buckets(extra, self.layout._replace(as_view=False))

    def _keep_state(self) -> None:
        self._post_mix.keep(self.gossip.buckets)

    def _mirror(self, call: Call) -> None:
        """Make a call with ranks that are in it, and take nothing from it; collective.

        Raises:
            CallOrderError: it changes what the ranks train.
        """
        match call:
            case Call.GLOBAL_AVG:
                self.average.apply(may_revert=True)
                self.average.revert()
            case Call.CONSENSUS_DISTANCE:
                consensus_distance(self.gossip.buckets, self.transport)
            case Call.KEEP_AVERAGE:
                self._keep_state()
            case _:
                raise CallOrderError(
                    f"rank {self.transport.name}: a rank comes back while others are in {call}, "
                    f"and cannot make that call with them; restart it"
                )

    def _hand_over(self, donor: int, takes: bool) -> None:
        """Give parameters, buffers and the base's state to those that have none; collective."""
        parameters = named_parameters(self._optimizer.param_groups)
        everything = [*parameters, *self._others]
        self._agreement.broadcast(everything, donor, keep=not takes)
        if self.transport.rank == donor:
            parts = [self._state_of(part) for part in self._extras.parts]
            state = [self._optimizer.state_dict(), self.gossip_state(), parts]
            send_state(state, self.transport)
        else:
            base, saved, parts = receive_state(self.transport, donor)
            if takes:
                self.takeovers += 1
                self._optimizer.load_state_dict(base)
                self.restore(self.read({**saved, "in_flight": False, "kept": False}))
                for part, state in zip(self._extras.parts, parts, strict=True):
                    if state is not None:
                        part.load_state_dict(state)

    def _state_of(self, part: Any) -> Any | None:
        state = part.state_dict()
        if sendable(state):
            return state
        logger.warning(
            "rank {}: the state of {} holds more than tensors, numbers and texts, and is not given "
            "to the rank that comes back, where it begins anew",
            *(self.transport.name, type(part).__name__),
        )
        return None

    def _warn_of_wide_groups(self) -> None:
        if self.settings.comm_dtype is not None and self.gossip.widest_group > 2:
            logger.warning(
                "rank {}: comm_dtype={} saves nothing in groups of more than two, which {!r} has",
                *(self.transport.name, self.settings.comm_dtype, self.topology),
            )


def make_outer(schedule: Schedule, base: Optimizer) -> Outer | None:
    """The outer optimizer of a schedule, if it has one."""
    if schedule.outer is None:
        return None
    kind = Kind.GOSSIP if schedule.global_avg_every is None else Kind.AVERAGE
    return Outer(schedule.outer, base, kind)
