"""The facade: a torch optimizer that gossips its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from decent_optim_wrapper import metrics
from decent_optim_wrapper._agreement import (
    Agreement,
    Named,
    check_gradients,
    check_tensors,
    named_parameters,
)
from decent_optim_wrapper._average import WorldAverage
from decent_optim_wrapper._bucket import MIB, Bucket, Layout, plan_buckets
from decent_optim_wrapper._facade import OptimizerFacade
from decent_optim_wrapper._gossip import Gossip, GossipState
from decent_optim_wrapper._header import Call
from decent_optim_wrapper._join import IdleRounds
from decent_optim_wrapper._meter import Meter, StepStats
from decent_optim_wrapper._round import Rules
from decent_optim_wrapper._settings import Settings, check_base
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper._update import LocalUpdate, Scaling
from decent_optim_wrapper._world import resolve_process_group, resolve_topology
from decent_optim_wrapper.topo import Topology

_STATE_KEY = "gossip"


class DecentOptimWrapper(OptimizerFacade, Joinable):
    """Wraps an optimizer so that every `step()` also averages parameters with a few neighbours.

    With n ranks, x_i the parameters of rank i, W_t the mixing matrix of round t and u_i the base
    optimizer's local update from the gradient at x_i, one `step()` does

    - ``overlap=True``: ``x <- W_t x - u(x)`` (D-PSGD, Lian et al. 2017, with one step of delay).
      Round t is launched at the end of one `step()` and finished at the start of the next: its
      bytes travel under the whole forward and backward pass.
    - ``overlap=False``: ``x <- W_t (x - u(x))`` (adapt then combine). The bytes travel inside
      `step()`.

    It is a `torch.optim.Optimizer` whose `param_groups`, `state` and `defaults` are the base's, so
    schedulers, GradScaler, clipping and checkpoints take it as one. All ranks call the
    constructor, `step` and every method whose text says *collective* alike and in the same order.

    Args:
        optimizer: the base optimizer.
        rank: this rank in the process group; None asks the process group.
        world_size: its number of ranks; None asks the process group.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE.
        topology: a name known to `TopologyFactory`, or an instance.
        bucket_cap_mb: upper bound of a bucket in MiB.
        overlap: exchange under the next forward and backward pass, see above.
        process_group: gossip among its ranks only; None means the default group.
        buffers: tensors of which `global_avg` averages the floating-point ones, too
            (``model.buffers()``).
        sync_at_start: broadcast parameters and buffers from rank 0.
        comm_dtype: torch.bfloat16 or torch.float16 halves the bytes between pairs; own parameters
            stay as they are: x_i + (1 - w) (q(x_j) - q(x_i)), q the rounding. Groups of more than
            two sum in the parameters' own dtype and save nothing, which the log says.
        param_as_bucket_view: make the parameters views of the buckets: a copy less in time and
            memory. Their storage must not be replaced afterwards, nor their values changed by
            hand without `synchronize()` before.
        split_update: update bucket by bucket, each as soon as it has arrived; None does so for
            those optimizers of torch for which it is the same computation. A base with step hooks
            or a replaced `step` is always updated in one call.

        timeout: how long to wait for a peer, a timedelta or seconds; None takes the process
            group's.
        on_nonfinite: what becomes of parameters that hold NaN or infinity, before they are mixed:
            "raise" a `NonFiniteError` on all ranks of the group, "skip" them in this round (the
            rank takes over what the others of its group have), or "ignore", which does not look.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument contradicts the process group, does not fit the topology or the
            base optimizer, or the ranks' parameters differ.
        RuntimeError: a world of more than one rank and no process group.
    """

    # GradScaler then always calls step() and hands over `grad_scale` and `found_inf`. Otherwise it
    # would skip step(), round included, on just the rank whose gradients overflowed.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        topology: str | Topology = "complete",
        bucket_cap_mb: float = 25,
        *,
        overlap: bool = True,
        process_group: dist.ProcessGroup | None = None,
        buffers: Iterable[Tensor] = (),
        sync_at_start: bool = True,
        comm_dtype: torch.dtype | None = None,
        param_as_bucket_view: bool = False,
        split_update: bool | None = None,
        timeout: timedelta | float | None = None,
        on_nonfinite: str = "raise",
    ) -> None:
        settings = Settings(
            *(bucket_cap_mb, overlap, sync_at_start, comm_dtype, param_as_bucket_view),
            *(timeout, on_nonfinite),
        ).check()
        check_base(optimizer, overlap)
        super().__init__(optimizer)
        Joinable.__init__(self)
        self._settings = settings
        self._local_update = LocalUpdate(optimizer, split_update)
        self._meter = Meter()

        self._process_group = resolve_process_group(process_group, rank, world_size)
        self._transport = Transport(self._process_group, settings.patience)
        self._topology = resolve_topology(topology, self.world_size, local_world_size)
        self._layout = Layout(
            settings.bucket_cap_mb, self._transport.wire_device, comm_dtype, param_as_bucket_view
        )
        lines = [*settings.lines(), f"optimizer {type(optimizer).__name__}"]
        self._agreement = Agreement(self._transport, self._topology, self._layout, lines)
        named_buffers = [Named("buffer", str(i), tensor) for i, tensor in enumerate(buffers)]
        parameters = named_parameters(optimizer.param_groups)
        check_tensors(parameters)
        self._agreement.check([*parameters, *named_buffers])
        schedule = self._topology.schedule(self.rank)
        if isinstance(topology, str):
            # The schedules of all ranks are needed no more; a user's own topology is left alone.
            self._topology.release()
        rules = Rules(on_nonfinite, repr(self._topology)).for_transport(self._transport)
        self._gossip = Gossip(self._transport, schedule, rules, self._meter)
        if comm_dtype is not None and any(group.size > 2 for group in schedule):
            logger.warning(
                "rank {}: comm_dtype={} saves nothing in groups of more than two, which {!r} has",
                *(self.rank, comm_dtype, self._topology),
            )
        if sync_at_start:
            self._agreement.broadcast([*parameters, *named_buffers])
        self._take_in(parameters)
        extra = [b.tensor for b in named_buffers if b.tensor.is_floating_point()]
        if not sync_at_start:
            # Frozen parameters are then not the same everywhere.
            extra += [p.tensor for p in parameters if not p.tensor.requires_grad]
        extra_buckets = plan_buckets(extra, self._layout._replace(as_view=False))
        self._average = WorldAverage(self._transport, self._gossip, rules, extra_buckets)
        logger.info("{!r}", self)

    @property
    def topology(self) -> Topology:
        """The topology of the gossip."""
        return self._topology

    @property
    def round(self) -> int:
        """Number of rounds launched so far; the same on every rank."""
        return self._gossip.state.round

    @property
    def rank(self) -> int:
        """This rank in the process group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group."""
        return self._transport.world_size

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One local update and one round of gossip; collective.

        Args:
            closure: re-evaluates the model and returns the loss; always evaluated at the
                parameters as they were before the mixing.

        Returns:
            What the closure returned.

        Raises:
            PeerError: a peer was lost; nothing of the round was mixed.
            CallOrderError: a peer is in another method or round.
            NonFiniteError: a rank of the group has NaN or infinity in its parameters.
        """
        Join.notify_join_context(self)
        self._meter.reset()
        splits = self._local_update.splits
        loss = None
        if closure is not None and (self._settings.overlap or splits):
            with torch.enable_grad():
                loss, closure = closure(), None
        self._check_parameters()
        self._drop_what_an_average_replaced()
        if splits:
            self._step_by_bucket()
        else:
            self._gossip.finish()
            with self._meter.update:
                result = self._local_update.whole(closure, self._scaling())
            loss = result if loss is None else loss
            self._gossip.launch()
        if not self._settings.overlap:
            self._gossip.finish()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base and gossip its parameters from the next round on; collective."""
        self._gossip.announce(Call.REGROUP)
        before = len(named_parameters(self.param_groups))
        self._optimizer.add_param_group(param_group)
        parameters = named_parameters(self.param_groups)
        try:
            check_tensors(parameters)
            self._agreement.check(parameters)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._settings.sync_at_start:
            self._agreement.broadcast(parameters[before:])
        self._take_in(parameters)

    def rebuild_buckets(self) -> None:
        """Gossip what was unfrozen since, too, from the next round on; collective."""
        self._gossip.announce(Call.REGROUP)
        parameters = named_parameters(self.param_groups)
        self._agreement.check(parameters)
        self._take_in(parameters)

    def global_avg(self, may_revert: bool = True) -> None:
        """Put the world average of parameters (and floating-point buffers) in place; collective.

        A `step()` that follows without `revert_global_avg()` keeps the average and drops the
        snapshot and the round in flight.

        Args:
            may_revert: keep a snapshot for `revert_global_avg()`, one copy of the parameters.
        """
        self._average.apply(may_revert)
        if not may_revert:
            self._gossip.discard()

    def revert_global_avg(self) -> None:
        """Restore what was before `global_avg()`, bit for bit, and free the snapshot.

        Raises:
            RuntimeError: there is no snapshot.
        """
        self._average.revert()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Run the body on the average, ``with optimizer.averaged(): validate()``; collective.

        Inside another average it changes nothing; a `step()` in the body keeps the average.
        """
        if self._average.revertible:
            yield
            return
        self.global_avg()
        try:
            yield
        finally:
            if self._average.revertible:
                self.revert_global_avg()

    def synchronize(self) -> None:
        """Finish and mix the round in flight now, at the end or before changing parameters by hand.

        Raises:
            RuntimeError: a revertible average is in place, which the mixing would pull apart.
        """
        if self._average.revertible:
            raise RuntimeError(
                f"rank {self.rank}: synchronize() expects the rank's own parameters, but an "
                f"average is in place; call revert_global_avg() first, or keep the average with "
                f"global_avg(may_revert=False)"
            )
        self._gossip.finish()

    def consensus_distance(self) -> float:
        """Root mean square over the ranks of ||x_i - mean(x)||_2; collective."""
        self._gossip.announce(Call.CONSENSUS_DISTANCE)
        return metrics.consensus_distance(self._gossip.buckets, self._transport)

    def stats(self) -> StepStats:
        """Bytes, seconds and counts of the last `step()` on this rank; communicates nothing."""
        return self._meter.read(len(self._gossip.buckets), self.round)

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict and one key for the round; communicates nothing.

        Each rank saves its own, with its own parameters.
        """
        state = self._gossip.state
        if self._average.revertible:
            # What a step() would do with the parameters that are saved now.
            state = state._replace(in_flight=False)
        return {**self._optimizer.state_dict(), _STATE_KEY: state._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, or at round 0 with the bare base's state dict.

        A round that was in flight then is launched again by the next `step()`: the order in which
        model and optimizer are loaded does not matter, and nothing is communicated here.
        """
        base = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
        saved = state_dict.get(_STATE_KEY, GossipState(0, False)._asdict())
        state = GossipState(int(saved["round"]), bool(saved["in_flight"]))
        self._optimizer.load_state_dict(base)
        self._gossip.restore(state)
        self._average.keep()

    def __repr__(self) -> str:
        buckets = self._gossip.buckets
        size = sum(bucket.nbytes for bucket in buckets) / MIB
        return (
            f"DecentOptimWrapper(\n"
            f"  base: {type(self._optimizer).__name__}\n"
            f"  topology: {self._topology!r}, period {self._topology.period}\n"
            f"  rank: {self.rank} of {self.world_size}\n"
            f"  buckets: {len(buckets)}, {size:.2f} MiB, cap {self._layout.cap_mb} MiB\n"
            f"  overlap: {self._settings.overlap}\n"
            f")"
        )

    def _take_in(self, parameters: Iterable[Named]) -> None:
        """Gossip those parameters that want a gradient, beside those that are gossiped already."""
        known = {id(tensor) for bucket in self._gossip.buckets for tensor in bucket.members}
        tensors = {id(p.tensor): p.tensor for p in parameters}
        wanted = {key: t for key, t in tensors.items() if t.requires_grad or key in known}
        if self._layout.as_view:
            # Members stay in the storage that they have.
            fresh = plan_buckets((t for k, t in wanted.items() if k not in known), self._layout)
            self._gossip.replan([*self._gossip.buckets, *fresh])
        else:
            # The plan of a new wrapper on the same groups: a resumed run sums in the same order.
            self._gossip.replan(plan_buckets(wanted.values(), self._layout))

    def join_hook(self, **kwargs: Any) -> IdleRounds:
        """What torch.distributed.algorithms.Join runs on a rank whose data has ended."""
        return IdleRounds(self._idle_step)

    @property
    def join_device(self) -> torch.device:
        """Where Join counts the ranks that still have data."""
        return self._transport.control_device

    @property
    def join_process_group(self) -> Any:
        """The ranks among which Join counts."""
        return self._process_group

    def _idle_step(self) -> None:
        """One round without a local update."""
        self._drop_what_an_average_replaced()
        self._gossip.finish()
        self._gossip.launch()
        if not self._settings.overlap:
            self._gossip.finish()

    def _check_parameters(self) -> None:
        """Notice what was done to parameters since the wrapper was built."""
        strays = {id(tensor) for bucket in self._gossip.buckets for tensor in bucket.strays()}
        if strays:
            names = [p.name for p in named_parameters(self.param_groups) if id(p.tensor) in strays]
            raise RuntimeError(
                f"rank {self.rank}: expected the parameters as they were when the wrapper was "
                f"built, but the storage of {', '.join(names)} was replaced or converted; move and "
                f"convert the model before building the wrapper, and change values in place"
            )
        check_gradients(self.param_groups, self.rank)

    def _drop_what_an_average_replaced(self) -> None:
        if self._average.revertible:
            self._average.keep()
            self._gossip.discard()

    def _step_by_bucket(self) -> None:
        with self._local_update.by_bucket(self._scaling(), self._gossip.buckets) as update:

            def timed_update(bucket: Bucket) -> None:
                with self._meter.update:
                    update(bucket)

            self._gossip.relay(timed_update)

    def _scaling(self) -> Scaling:
        # GradScaler sets the two attributes around its call of step().
        return Scaling(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
