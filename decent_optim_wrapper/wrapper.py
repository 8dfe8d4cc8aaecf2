"""A torch optimizer that gossips the parameters of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from decent_optim_wrapper.checks import take_fields
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.comm.process_groups import CPU, serves
from decent_optim_wrapper.config import (
    Elastic,
    OnNonfinite,
    Schedule,
    Settings,
    build_extensions,
    check_base,
)
from decent_optim_wrapper.extensions import GradientTracking
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.header import CollectiveCall
from decent_optim_wrapper.gossip.local_update import Apply, LocalUpdate, Scaling, apply_update
from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.saved_state import (
    gossip_state,
    named_state,
    read_named_state,
    read_state,
    restore,
)
from decent_optim_wrapper.gossip.step import Step
from decent_optim_wrapper.gossip.timing import StepStats
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.optim.batch_norms import recalibrated
from decent_optim_wrapper.optim.delegating import DelegatingOptimizer, check_state_dict
from decent_optim_wrapper.optim.mixing_rate import check_mixing_rate
from decent_optim_wrapper.start.arguments import Arguments
from decent_optim_wrapper.start.dcp_warning import warn_of_checkpoints
from decent_optim_wrapper.start.session import Inputs, ModuleExtras, open_session
from decent_optim_wrapper.start.start import Start
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.bucket import MIB, Bucket
from decent_optim_wrapper.wire.parameters import Named, named_parameters

_STATE_KEY = "gossip"


class DecentOptimWrapper(DelegatingOptimizer, Joinable):
    """Wraps an optimizer so that every `step()` also averages parameters with a few neighbours.

    With n ranks, x_i the parameters of rank i, W_t the mixing matrix of round t and u_i the base
    optimizer's local update from the gradient at x_i, one `step()` does

    - ``overlap=True``: ``x <- W_t x - u(x)`` (D-PSGD, Lian et al. 2017, with one step of delay).
      Round t is launched at the end of one `step()` and finished at the start of the next: its
      bytes travel under the whole forward and backward pass.
    - ``overlap=False``: ``x <- W_t (x - u(x))`` (adapt then combine). The bytes travel inside
      `step()`.

    A `Schedule` with `staleness` or ``gossip_every="auto"`` gives a round more time: with s the
    parameters of its launch, ``x <- x + (W s - s) - u(x)`` some steps later.

    It is a `torch.optim.Optimizer` whose `param_groups`, `state` and `defaults` are the base's, so
    schedulers, GradScaler, clipping and checkpoints work with it as usual. All ranks must call the
    constructor, `step` and every method that is marked *collective*, in the same order. With
    ``gossip_every="auto"`` they may make different numbers of steps in between, and a collective
    method mixes rounds until all ranks have come, so it changes the parameters.

    Args:
        optimizer: the base optimizer.
        rank: this rank; None takes that of the process group.
        world_size: number of ranks; None takes that of the process group.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE. If nodes have different
            numbers of ranks, or ranks that are not consecutive, every rank counts as a node.
        topology: a name known to `TopologyFactory`, or an instance.
        bucket_cap_mb: upper bound of a bucket in MiB.
        overlap: exchange during the next forward and backward pass, as above; or a `Pacing` of your
            own, with the defaults of `staleness` and a number for `gossip_every`.
        process_group: the ranks that gossip; None means the default group.
        buffers: tensors such as ``model.buffers()``; `global_avg` also averages the floating-point
            ones.
        sync_at_start: broadcast parameters and buffers from rank 0; weights that only another rank
            has loaded are lost, with a warning.
        comm_dtype: bytes per parameter: 2 with torch.bfloat16 or torch.float16, 1.016 with
            torch.int8 or torch.float8_e4m3fn, 0.516 with torch.int4; or a `Codec`, such as
            ``TopKCodec(16)`` with 0.313. A rank's own parameters are not rounded: in a pair
            x_i + (1 - w) (q(x_j) - q(x_i)), with q the rounding, and no rounding moves the mean.
            What is rounded is the difference to a reference, which costs a copy of the parameters
            for each group of the rank; with more than 4 groups, the parameters themselves. Exact
            averages are not rounded.
        param_as_bucket_view: make the parameters views of the buckets, which saves a copy in time
            and memory. Do not replace their storage afterwards, and call `synchronize()` before
            changing their values by hand, or the next call raises (changes through ``.data`` are
            not noticed). Not for an RNN on a GPU: its flatten_parameters() replaces the storage.
        gradient_tracking: correct the gradients towards the mean of all ranks, for shards that
            differ between ranks: with m a running mean of the rank's gradients g,
            ``y = m + c``, ``c <- c + 0.3 (W_t y - y)``, and the base reads g + c (after DSGT, Pu
            and Nedic 2018, and Momentum Tracking, Takezawa et al. 2022); Adam and its like take y
            for their first moment. It doubles the bytes sent and costs two copies of the
            parameters, and the buffers of y. Clip before `step()`.
        timeout: how long to wait for a peer, a timedelta or seconds; None takes the timeout of the
            process group.
        on_nonfinite: what happens if parameters contain NaN or infinity before they are mixed:
            "raise" a `NonFiniteError` on all ranks of the group, "skip" them in this round (the
            rank takes the mean of the others of its group), or "ignore", which does not check.
            A step checks each shard by itself: if a replica is spread over a mesh, the ranks of
            other shards do not raise, and end with torch's own error once this shard's have ended.
            An average checks the whole replica.
        schedule: when the ranks mix and average, and how; see `Schedule`.
        elastic: None raises a `PeerError` if a rank is lost; an `Elastic` continues without it,
            over gloo, whatever the backend of the process group.
        mesh: all ranks and how they are arranged, if a replica is spread over several of them
            (FSDP2, tensor or pipeline parallelism); None means that each rank is a replica.
        gossip_dim: the name of the mesh's dimension along which replicas gossip.
        model: that of the parameters, needed where they are sharded, and by
            `gossip_state_dict()` of an outer optimizer.
        extensions: instances of `Extension`, which take part in the rounds.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument contradicts the process group, does not fit the topology or the
            base optimizer, or the ranks' parameters differ; and on all other ranks, if a rank
            raises any of these errors.
        RuntimeError: there is more than one rank and no process group.
    """

    # GradScaler then always calls step() and sets `grad_scale` and `found_inf`. Otherwise it would
    # skip step(), including the round, on only the rank whose gradients overflowed.
    _step_supports_amp_scaling = True

    # Set by a module that steps in its backward pass; empty without one.
    _extras = ModuleExtras()

    def __init__(
        self,
        optimizer: Optimizer,
        rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        topology: str | Topology = "complete",
        bucket_cap_mb: float = 25,
        *,
        overlap: bool | Pacing = True,
        process_group: dist.ProcessGroup | None = None,
        buffers: Iterable[Tensor] = (),
        sync_at_start: bool = True,
        comm_dtype: torch.dtype | Codec | None = None,
        param_as_bucket_view: bool = False,
        gradient_tracking: bool = False,
        timeout: timedelta | float | None = None,
        on_nonfinite: OnNonfinite = "raise",
        schedule: Schedule = Schedule(),
        elastic: Elastic | None = None,
        mesh: DeviceMesh | None = None,
        gossip_dim: str | None = None,
        model: nn.Module | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        # By name: each record takes those that are its fields.
        options = dict(locals())
        start = Start(take_fields(Arguments, options))
        with start.failing_together():
            settings = take_fields(Settings, options)
            check_base(optimizer, settings.pacing)
            super().__init__(optimizer)
            parts = build_extensions(settings, extensions)
            self._local_update = LocalUpdate(optimizer, parts)
        self._settings = settings
        self._gossip, self._setup, self._hand_over = open_session(
            start,
            Inputs(
                optimizer=optimizer,
                local_update=self._local_update,
                extensions=parts,
                settings=settings,
                topology=topology,
                buffers=buffers,
                model=model,
                extras=self._extras,
            ),
        )
        self._pipeline = self._gossip.pipeline
        # Not an attribute of its own: Join sets it on whatever it is given, such as Fabric's proxy
        # of the wrapper, which has copies of the attributes, but steps read it here.
        self._join: dict[str, Any] = {}
        Joinable.__init__(self)
        warn_of_checkpoints(self, self._gossip)
        logger.info("{!r}", self)

    @property
    def topology(self) -> Topology:
        """The topology of the gossip, among `members`."""
        return self._pipeline.session.topology

    @property
    def round(self) -> int:
        """Number of steps made so far; with ``gossip_every="auto"``, of rounds launched."""
        return self._pipeline.round

    @property
    def is_averaged(self) -> bool:
        """Whether an average is in place that `revert_global_avg()` can revert."""
        return self._gossip.average.snapshot is not None

    @property
    def mixing_rate(self) -> float:
        """The mixing rate of the rounds launched from now on; set the same on all ranks.

        With ``gossip_every="auto"`` ranks may be at different steps, and so have different rates:
        a group mixes with the lowest of its ranks.
        """
        return self._pipeline.mixing_rate

    @mixing_rate.setter
    def mixing_rate(self, rate: float) -> None:
        self._pipeline.mix_with(check_mixing_rate(rate))

    @property
    def gradient_tracking(self) -> bool:
        """Whether gradients are tracked.

        Setting it to False is collective, and frees what it costs; it cannot be set to True again.
        """
        return self._tracking is not None

    @gradient_tracking.setter
    def gradient_tracking(self, tracks: bool) -> None:
        if tracks and not self.gradient_tracking:
            raise ValueError(
                f"rank {self.rank}: gradient_tracking expects False during the training, got "
                f"{tracks}; pass gradient_tracking=True to the constructor"
            )
        if not tracks and self._tracking is not None:
            # A round in flight still mixes what was tracked.
            drop = partial(self._pipeline.extensions.drop, self._tracking)
            self._gossip.meet(CollectiveCall.DROP_EXTENSION, drop)
            self._notify_change()

    @property
    def _tracking(self) -> GradientTracking | None:
        found = (e for e in self._pipeline.extensions.all if isinstance(e, GradientTracking))
        return next(found, None)

    @property
    def rank(self) -> int:
        """This rank, as numbered at the start."""
        return self._pipeline.session.transport.initial_rank

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return self._pipeline.session.transport.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, as numbered at the start."""
        return self._pipeline.session.transport.members

    @property
    def replica(self) -> Replica:
        """The ranks of a mesh that hold one copy of the model together."""
        return self._setup.replica

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of the parameters, in the order in which they are exchanged."""
        return self._pipeline.buckets

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One local update and one round of gossip; collective.

        Args:
            closure: re-evaluates the model and returns the loss; always evaluated at the
                parameters before the mixing.

        Returns:
            The result of the closure; None without one.

        Raises:
            PeerError: a peer was lost; nothing of the round was mixed.
            CallOrderError: a peer is in another method or round.
            NonFiniteError: a rank of the group has NaN or infinity in its parameters. Nothing of
                the round was mixed, and the round is dropped.
        """
        splits = self._local_update.splits
        loss = None
        if closure is not None and (splits or self._evaluates_first):
            try:
                with torch.enable_grad():
                    loss, closure = closure(), None
            except BaseException as error:
                # The others wait for this rank in their rounds.
                self._gossip.failures.close(error)
                raise
        # Not earlier: the closure may have gathered the parameters.
        if self._gossip.replica.may_gather:
            self._gossip.replica.reshard()
        if splits:
            with self._in_parts(self._scaling()) as advance:
                for bucket in self._pipeline.buckets:
                    advance(bucket)
            return loss
        with self._step() as step:
            update = partial(self._local_update.whole, closure, self._scaling())
            result = step.advance(step.buckets, update)
        return result if loss is None else loss

    @property
    def _evaluates_first(self) -> bool:
        """Whether a closure is evaluated before the base's step."""
        pipeline = self._pipeline
        in_step = pipeline.policy.pacing.mixes_in_step(pipeline.round)
        return not in_step or pipeline.extensions.corrects_gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base and gossip its parameters from the next round on.

        Collective, over all of a mesh: a stage without new parameters adds an empty group.

        Raises:
            TypeError: a parameter cannot be exchanged. Then no rank has added its group.
            ValueError: the same, or the ranks differ, or another rank raised any of these errors.
        """
        before = len(named_parameters(self.param_groups))
        self._base.add_param_group(param_group)
        parameters = named_parameters(self.param_groups)
        self._local_update.know(parameters[before:])
        try:
            self._regroup(parameters, parameters[before:])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def rebuild_buckets(self) -> None:
        """Also gossip unfrozen parameters, from the next round on; collective."""
        self._regroup(named_parameters(self.param_groups), [])

    def global_avg(self, may_revert: bool = True) -> None:
        """Replace parameters (and floating-point buffers) by their world average; collective.

        A `step()` without `revert_global_avg()` before keeps the average and drops the snapshot and
        the round in flight.

        Args:
            may_revert: keep a snapshot for `revert_global_avg()`, one copy of the parameters.

        Raises:
            NonFiniteError: a rank has NaN or infinity in its parameters; nothing was averaged. A
                round in flight that contains them makes the next `step()` raise, too, unless
                `load_state_dict()` drops it. With ``may_revert=False``, also if momenta that are to
                be averaged contain them; the parameters are then averaged, the momenta are not.
        """
        self._gossip.global_avg(may_revert)
        self._notify_change()

    def revert_global_avg(self) -> None:
        """Restore the values before `global_avg()`, bit for bit, and free the snapshot.

        Raises:
            RuntimeError: there is no snapshot.
        """
        self._gossip.revert_average()

    @contextmanager
    def averaged(
        self, recalibrate: tuple[nn.Module, Iterable[Any]] | None = None
    ) -> Iterator[None]:
        """Run the body on the average, ``with optimizer.averaged(): validate()``; collective.

        Inside another average the parameters do not change. A `step()` in the body keeps the
        average.

        Args:
            recalibrate: a model and batches on which this rank estimates the statistics of the
                model's batch norms again, for the averaged model and in training mode: the average
                of the running statistics is not right for it. Norms in evaluation mode in a model
                in training mode do not change. All buffers are restored with the parameters.
        """
        nested = self.is_averaged
        try:
            # Inside the try: the average is in place even if the callback for new members raises.
            if not nested:
                self.global_avg()
            with recalibrated(recalibrate, lambda: self.is_averaged):
                yield
        finally:
            if self.is_averaged and not nested:
                self.revert_global_avg()

    def synchronize(self) -> None:
        """Finish and mix the round in flight, at the end or before changing parameters by hand.

        With ``gossip_every="auto"`` it is collective, and brings all ranks to the same round.

        Raises:
            RuntimeError: a revertible average is in place, which the mixing would change.
        """
        if self.is_averaged:
            raise RuntimeError(
                f"rank {self.rank}: synchronize() expects the rank's own parameters, but an "
                f"average is in place; call revert_global_avg() first, or keep the average with "
                f"global_avg(may_revert=False)"
            )
        self._gossip.synchronize()

    def consensus_distance(self) -> float:
        """Root mean square over the ranks of ||x_i - mean(x)||_2; collective."""
        distance = self._gossip.meet(
            CollectiveCall.CONSENSUS_DISTANCE, self._gossip.consensus_distance
        )
        self._notify_change()
        return distance

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients by the norm of all of them together; collective over a replica.

        As `torch.nn.utils.clip_grad_norm_`, for replicas that are spread over a mesh, too: shards
        and stages count together, and what several ranks hold counts once.

        Args:
            max_norm: bound of the norm.
            norm_type: p of the p-norm; infinity for the largest absolute value.
            error_if_nonfinite: raise where the norm is not finite.

        Returns:
            The norm before clipping, the same on all ranks of the replica.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if not self._gossip.replica.transports:
            return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        # The error is that of all ranks of the replica, and nobody else waits for them.
        with self._gossip.failures.propagating(RuntimeError):
            return self.replica.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack a small tensor of every rank that takes part; collective.

        Args:
            tensor: of the same shape and dtype on all ranks.

        Returns:
            shape (world_size, *tensor.shape), on the CPU, in the order of `members`; on a mesh
            shape (world_size * ranks of a replica, *tensor.shape), one replica after the other.

        Raises:
            PeerError: not every rank answers.
        """
        return self._gossip.all_gather(tensor)

    def stats(self) -> StepStats:
        """Bytes, seconds and counts of the last `step()` on this rank; communicates nothing."""
        return self._pipeline.policy.meter.last

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict and one key for the round; communicates nothing.

        Every rank must save its own state dict, with its own parameters. With
        ``gossip_every="auto"`` call `synchronize()` on all ranks before: it holds no round in
        flight, and without that the mean over the ranks would move.
        """
        return {**self._base.state_dict(), _STATE_KEY: gossip_state(self._gossip)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, or at round 0 with the bare base's state dict.

        If a round was in flight then, the next `step()` launches it again: the order in which model
        and optimizer are loaded does not matter, and nothing is communicated here. A round that is
        in flight now is dropped.

        Load on all ranks or on none. If only some have loaded, with gradient tracking or
        ``gossip_every="auto"``, all ranks raise a `CallOrderError`: each in its next round with a
        rank of the other kind.

        Raises:
            RuntimeError: with ``gossip_every="auto"``, a round is in flight that other ranks may
                not have launched yet; call `synchronize()` on all ranks before.
            TypeError: `state_dict` is no dict; nothing was loaded.
            ValueError: the state dict is that of something else; nothing of it was loaded.
        """
        check_state_dict(state_dict, type(self).__name__, self.rank)
        rate = self._settings.schedule.mixing_rate
        saved = read_state(self._gossip, state_dict.get(_STATE_KEY), rate)
        before = self.state, self.param_groups
        try:
            base = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
            self._base.load_state_dict(base)
        except BaseException:
            self.state, self.param_groups = before
            raise
        restore(self._gossip, saved)

    def gossip_state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the gossip, beside the model and the base's state.

        The same on all ranks of a replica and by the names of the parameters, so that
        torch.distributed.checkpoint stores it in one layout of the replica and loads it in another,
        under a key for each replica. What an outer optimizer has is sharded as its parameters are.
        Communicates nothing.

        Raises:
            ValueError: there is an outer optimizer, and the wrapper was built without the model.
        """
        return named_state(self._gossip)

    def load_gossip_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `gossip_state_dict()` was taken; communicates nothing.

        The model and the base's state are loaded apart, before or after. A round that was in flight
        then is launched again by the next `step()`; one that is in flight now is dropped.

        Raises:
            ValueError: a state dict of something else. Then nothing of it was loaded.
        """
        rate = self._settings.schedule.mixing_rate
        restore(self._gossip, read_named_state(self._gossip, state_dict, rate))

    def __repr__(self) -> str:
        size = sum(bucket.nbytes for bucket in self.buckets) / MIB
        cap = self._settings.bucket_cap_mb
        return (
            f"DecentOptimWrapper(\n"
            f"  base: {type(self._base).__name__}\n"
            f"  topology: {self.topology!r}, period {self.topology.period}\n"
            f"  rank: {self.rank} of {self.world_size}\n"
            f"  buckets: {len(self.buckets)}, {size:.2f} MiB, cap {cap} MiB\n"
            f"  overlap: {self._settings.overlap}\n"
            f")"
        )

    def join_hook(self, **kwargs: Any) -> IdleRounds:
        """The hook that torch.distributed.algorithms.Join runs on a rank whose data has ended.

        Raises:
            ValueError: with ``gossip_every="auto"``, which needs no Join.
        """
        if not self._pipeline.policy.pacing.synchronous:
            raise ValueError(
                'gossip_every="auto" does not go with Join, in which ranks wait for each other in '
                "every step and take no part in rounds meanwhile; ranks may make different numbers "
                "of steps without it: call synchronize() at the end on all of them"
            )
        return IdleRounds(self._idle_step)

    @property
    def _join_config(self) -> Any:
        return self._join["config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._join["config"] = config

    @property
    def join_device(self) -> torch.device:
        """The device on which Join counts the ranks that still have data."""
        group = self._setup.process_group
        if group is None or serves(group, CPU):
            return CPU
        return next(param.device for param in self._gossip.params if param.is_cuda)

    @property
    def join_process_group(self) -> Any:
        """The process group in which Join counts."""
        return self._setup.process_group

    @contextmanager
    def _step(self, in_backward: bool = False) -> Iterator[Step]:
        if self._join_config.enable:
            Join.notify_join_context(self)
        with Step(self._gossip, in_backward) as step:
            yield step
            self._pipeline.policy.meter.note_skipped(self._local_update.skipped)
        self._notify_change()

    def _idle_step(self) -> None:
        """One round without a local update."""
        if self._gossip.replica.may_gather:
            self._gossip.replica.reshard()
        with Step(self._gossip) as step:
            step.advance(step.buckets, lambda: None)
        self._notify_change()

    def _regroup(self, parameters: list[Named], late: list[Named]) -> None:
        """Gossip these parameters, of which `late` are new, from the next round on; collective."""
        add = partial(self._setup.add, self._pipeline, parameters, late)
        self._gossip.meet(CollectiveCall.REGROUP, add)
        self._notify_change()

    def _notify_change(self) -> None:
        """Call the user's callback if the members have changed, when all else is done."""
        if self._gossip.members:
            self._gossip.members.notify_change()

    @contextmanager
    def _in_parts(
        self, scaling: Scaling, apply: Apply = apply_update, in_backward: bool = False
    ) -> Iterator[Callable[[Bucket], None]]:
        """A step in parts: yields a function that mixes, updates and launches one bucket."""
        with (
            self._step(in_backward) as step,
            self._local_update.by_bucket(scaling, self._pipeline.buckets, apply) as update,
        ):
            yield lambda bucket: step.advance([bucket], partial(update, bucket))

    def _scaling(self) -> Scaling:
        # GradScaler sets the two attributes here around its call of step().
        return Scaling(vars(self).get("found_inf"), vars(self).get("grad_scale"))


class IdleRounds(JoinHook):
    """Takes part in the rounds of the others without local updates.

    Args:
        idle_step: one round without an update.
    """

    def __init__(self, idle_step: Callable[[], None]) -> None:
        self._idle_step = idle_step

    def main_hook(self) -> None:
        """Run once for every step that another rank still makes."""
        self._idle_step()
