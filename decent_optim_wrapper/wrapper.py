"""A torch optimizer that wraps another one and gossips its parameters."""

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

from decent_optim_wrapper import checks
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.comm.process_groups import CPU, serves
from decent_optim_wrapper.config import OnNonfinite, Overlap, Schedule, Settings, default_overlap
from decent_optim_wrapper.errors import CallOrderError
from decent_optim_wrapper.extensions.arrange import arrange
from decent_optim_wrapper.forward_hooks import ForwardHooks
from decent_optim_wrapper.gossip import saved_state
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.header import CollectiveCall
from decent_optim_wrapper.gossip.local_update import Apply, Scaling
from decent_optim_wrapper.gossip.saved_state import GOSSIP_KEY
from decent_optim_wrapper.gossip.schedule import Pacing
from decent_optim_wrapper.gossip.step import Step
from decent_optim_wrapper.gossip.timing import KEPT_STEPS, StepStats
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.optim.delegating import DelegatingOptimizer
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.report import Report, diagnose, measure
from decent_optim_wrapper.start.build import Builder
from decent_optim_wrapper.start.error_sharing import ErrorSharing
from decent_optim_wrapper.start.meeting import Meeting
from decent_optim_wrapper.start.membership import Elasticity, Membership
from decent_optim_wrapper.start.summary import log_summary, log_waits
from decent_optim_wrapper.start.tensors import ModuleExtras
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.parameters import Named, named_parameters


class DecentOptimWrapper(DelegatingOptimizer, Joinable):
    """Wraps an optimizer so that every `step()` also averages parameters with other ranks.

    Let x_i be the parameters of rank i, W_t the mixing matrix of round t, and u(x) the local update
    that the base optimizer computes from the gradient at x. One `step()` then computes

    - ``overlap=True``: ``x <- W_t x - u(x)`` (D-PSGD, Lian et al. 2017, with one step of delay).
      Round t starts at the end of one `step()` and ends at the start of the next one. It is
      transferred while the whole forward and backward pass runs.
    - ``overlap=False``: ``x <- W_t (x - u(x))`` (adapt then combine). The round is transferred
      inside `step()`.
    - ``overlap="forward"``: the same trajectory as without overlap. The round is transferred while
      the next forward pass runs. The pass waits for each bucket just before a module reads its
      parameters.

    - ``overlap=Late(steps)`` and ``overlap=AsItArrives()``: a round has more time. With s the
      parameters at its launch, a later step computes ``x <- x + (W s - s) - u(x)``.

    The wrapper is a `torch.optim.Optimizer` with the `param_groups`, `state` and `defaults` of the
    base, so schedulers, GradScaler, clipping and checkpoints work as usual. All ranks must call the
    constructor, `step` and every method that is marked *collective*, in the same order. With
    `AsItArrives` ranks may make different numbers of steps in between. A collective
    method then mixes rounds until all ranks have called it, so it changes the parameters.

    Args:
        optimizer: the base optimizer.
        rank: this rank; None takes the rank in the process group.
        world_size: number of ranks; None takes the size of the process group.
        local_world_size: ranks per node; None or 0 reads LOCAL_WORLD_SIZE. If nodes have
            different numbers of ranks, or ranks that are not consecutive, every rank counts as a
            node.
        topology: a name known to `TopologyFactory`, or an instance. None is "complete" with `model`
            on at most 16 ranks, except with `mesh` or `AsItArrives`. Otherwise it is pairs:
            "one-peer-exp" for powers of two, "greedy" or, for more than 256 ranks, "base-2".
        bucket_cap_mb: upper bound of the size of a bucket, in MiB; None chooses it from the size of
            the model.
        overlap: when a round is transferred: True, False, "forward" or a `Pacing`, as above. None
            is "forward" with `model`, and True without it, with `mesh`, or with `StateAverage` or
            another extension that is collective. See `synchronize` for code that reads or changes
            parameters between two steps. `state_dict()` of the model and of the wrapper mix the
            round in flight.
        process_group: the ranks that gossip; None takes the default group.
        buffers: tensors of which `global_avg` also averages the floating-point ones, in the shapes
            that they have then, unless only some ranks have this shape, or all have a vector of
            length 1. None takes the buffers of `model`, or none without it. A buffer that a forward
            pass replaces by another tensor is found by its name in `model`; without `model` it is
            left out.
        sync_at_start: broadcast parameters and buffers from rank 0, and all else that `model`
            contains. Weights that only another rank has loaded are lost, with a warning.
        comm_dtype: the format in which parameters are sent: torch.bfloat16 or torch.float16 (2
            bytes per parameter), torch.int8 (1.016), torch.int4 (0.516), torch.int3 (0.344),
            torch.int2 (0.213), or a `Codec` such as ``TopKCodec(16)`` (0.086). With q the rounding,
            a rank in a pair computes x_i + (1 - w) (q(x_j) - q(x_i)), so its own parameters are not
            rounded, and rounding never moves the mean over the ranks. The difference to a reference
            is rounded, which costs a copy of the parameters for each group of the rank. With more
            than 4 groups, the parameters themselves are rounded. Exact averages are not rounded.
            torch.float32 sends parameters of any dtype as they are. None is torch.int3 with
            `model` and at most 4 groups (torch.int4 if an extension sends something, such as
            estimates), except with `mesh` or `AsItArrives`, and otherwise torch.float32. Over NCCL
            groups of more than two ranks send whole values.
        param_as_bucket_view: make the parameters views of the buckets, which saves a copy in time
            and memory. Do not replace their storage afterwards, and see `synchronize` before you
            change their values by hand. Tensors that were taken from parameters before, such as a
            transposed weight in a buffer, keep the old memory. Not for an RNN on a GPU: its
            flatten_parameters() replaces the storage.
        timeout: how long to wait for a peer, as a timedelta or in seconds; None takes the timeout
            of the process group, or torch's 30 minutes if there is only a store.
        on_nonfinite: what to do if parameters contain NaN or infinity before they are mixed:
            "raise" a `NonFiniteError` on all ranks of the group, "skip" them in this round (the
            rank takes the mean of the other ranks of its group), or "ignore", which does not check.
            A step checks each shard by itself. If a replica is spread over a mesh, the ranks of
            other shards do not raise this error. They end with torch's own error once the ranks of
            this shard have ended. An average checks the whole replica.
        schedule: how often the ranks mix and average, and how far; see `Schedule`.
        elastic: None raises a `PeerError` if a rank is lost. An `Elastic` continues without it,
            over gloo, whatever the backend of the process group.
        mesh: all ranks and their arrangement, if a replica is spread over several of them
            (FSDP2, tensor or pipeline parallelism); None means that each rank is a replica.
        gossip_dim: the name of the mesh dimension along which replicas gossip.
        model: the model that the parameters belong to. It is needed if parameters are sharded, with
            ``overlap="forward"``, and for `gossip_state_dict()` with an outer optimizer. What else
            it contains starts as on rank 0, except for tensors that other ranks have in another
            shape or not at all; pass the part that the ranks share if another part is personal. Its
            frozen parameters are averaged as `buffers` are. With ``overlap="forward"`` a module
            outside of it that shares a parameter may read that before it is mixed.
        extensions: instances of `Extension`, which take part in the rounds, in any order:
            `GradientTracking`, `OuterOptimizer`, `StateAverage` and `StateGossip`, which are
            copied, and your own.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument contradicts the process group, or does not fit the topology or the
            base optimizer; the ranks' parameters differ; or another rank raised any of these
            errors.
        RuntimeError: there is more than one rank and no process group.
    """

    # GradScaler then always calls step() and sets `grad_scale` and `found_inf`. Otherwise it would
    # skip step(), including the round, on only the rank whose gradients overflowed.
    _step_supports_amp_scaling = True

    @checks.known_options
    def __init__(
        self,
        optimizer: Optimizer,
        rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        topology: str | Topology | None = None,
        bucket_cap_mb: float | None = None,
        *,
        overlap: Overlap | None = None,
        process_group: dist.ProcessGroup | None = None,
        buffers: Iterable[Tensor] | None = None,
        sync_at_start: bool = True,
        comm_dtype: torch.dtype | Codec | None = None,
        param_as_bucket_view: bool = False,
        timeout: timedelta | float | None = None,
        on_nonfinite: OnNonfinite = "raise",
        schedule: Schedule = Schedule(),
        elastic: Elasticity | None = None,
        mesh: DeviceMesh | None = None,
        gossip_dim: str | None = None,
        model: nn.Module | None = None,
        extensions: Sequence[Extension] = (),
        _extras: ModuleExtras = ModuleExtras(),
        _sharing: ErrorSharing | None = None,
    ) -> None:
        # Not checked yet: by it, an error in all that follows is sent to the other ranks.
        meeting = Meeting(
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            process_group=process_group,
            mesh=mesh,
            gossip_dim=gossip_dim,
            elastic=elastic,
            timeout=timeout,
        )
        sharing = _sharing or ErrorSharing(meeting)
        with sharing.propagating_errors():
            checks.check_base(optimizer)
            super().__init__(optimizer)
            arranged = arrange(extensions, optimizer)
            announces = mesh is None or _extras.in_backward
            default = default_overlap(optimizer, model, arranged, announces)
            self._settings = settings = Settings(
                bucket_cap_mb=bucket_cap_mb,
                overlap=default if overlap is None else overlap,
                sync_at_start=sync_at_start,
                comm_dtype=comm_dtype,
                param_as_bucket_view=param_as_bucket_view,
                on_nonfinite=on_nonfinite,
                schedule=schedule,
            )
        builder = Builder(sharing, settings, optimizer, arranged, topology, model, buffers, _extras)
        self._builder, coordinator = builder, builder.build()
        self._coordinator, self._rounds = coordinator, coordinator.rounds
        self._local_update = coordinator.local_update
        self._forward_hooks: ForwardHooks | None = None
        if model is not None and settings.pacing.mixes_early:
            settle = coordinator.commit_or_roll_back
            self._forward_hooks = ForwardHooks(model, coordinator.mix_early, settle)
        self._after_step: list[Callable[[], object]] = []
        # A dict, not attributes: Join sets its own on the object that it is given, and Fabric's
        # proxy of the wrapper has copies of the attributes; steps read this one.
        leads = self.rank == 0 and (mesh is None or dist.get_rank() == 0)
        self._shared: Any = {"average_contexts": 0, "logs_waits": leads and self.world_size > 1}
        Joinable.__init__(self)
        if leads:
            log_summary(self._rounds, settings.schedule.gossip_every)
        logger.info("{!r}", self)

    @property
    def topology(self) -> Topology:
        """The topology over the `members`."""
        return self._rounds.session.topology

    @property
    def schedule(self) -> Schedule:
        """How often the ranks mix and average, and how far."""
        return self._settings.schedule

    @property
    def pacing(self) -> Pacing:
        """When a round is mixed."""
        return self._settings.pacing

    @property
    def round(self) -> int:
        """Number of steps so far; with `AsItArrives`, number of rounds launched."""
        return self._rounds.count

    @property
    def is_averaged(self) -> bool:
        """True if an average is in place that `revert_global_avg()` can revert."""
        return self._coordinator.average.snapshot is not None

    @property
    def mixing_rate(self) -> float:
        """The mixing rate of the next rounds; set the same value on all ranks.

        With `AsItArrives` ranks may be at different steps and have different rates. A group then
        mixes with the lowest rate of its ranks.
        """
        return self._rounds.mixing_rate

    @mixing_rate.setter
    def mixing_rate(self, rate: float) -> None:
        self._rounds.set_mixing_rate(checks.check_mixing_rate(rate))

    @property
    def rank(self) -> int:
        """The rank of this process, as numbered at the start."""
        return self._rounds.session.transport.initial_rank

    @property
    def world_size(self) -> int:
        """Number of ranks that take part now."""
        return self._rounds.session.transport.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part now, as numbered at the start."""
        return self._rounds.session.transport.members

    @property
    def recovery(self) -> Membership | None:
        """Continues without lost ranks; None without `elastic`."""
        return self._builder.sharing.membership

    @property
    def replica(self) -> Replica:
        """The ranks of a mesh that share one copy of the model."""
        return self._builder.replica

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of the parameters, in the order in which they are exchanged."""
        return self._rounds.buckets

    @property
    def extensions(self) -> Sequence[Extension]:
        """The extensions that take part in the rounds."""
        return self._rounds.extensions.all

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one local update and one round of gossip; collective.

        Args:
            closure: evaluates the model again and returns the loss. It is always evaluated at the
                parameters before the mixing.

        Returns:
            The result of the closure; None without a closure.

        Raises:
            PeerError: a peer was lost. No bucket of the round was mixed.
            CallOrderError: a peer is in another method or round, or this is the body of
                `averaged()`.
            NonFiniteError: a rank of the group has NaN or infinity in its parameters. No bucket of
                the round was mixed, and the round is dropped.
            RuntimeError: a parameter that is not gossiped has a gradient; see `rebuild_buckets()`.
        """
        splits, loss = self._local_update.splits, None
        if closure is not None and (splits or self._evaluates_first):
            try:
                with torch.enable_grad():
                    loss, closure = closure(), None
            except BaseException as error:
                # The others wait for this rank in their rounds.
                self._coordinator.report_and_close(error)
                raise
        # GradScaler sets the two attributes here around its call of step().
        scaling = Scaling(vars(self).get("found_inf"), vars(self).get("grad_scale"))
        if splits:
            with self._in_parts(scaling) as advance:
                for bucket in self._rounds.buckets:
                    advance(bucket)
            return loss
        with self._step() as step:
            result = step.advance(step.buckets, self._local_update.whole, closure, scaling)
        return result if loss is None else loss

    @property
    def _evaluates_first(self) -> bool:
        """True if a closure is evaluated before the base's step."""
        rounds = self._rounds
        in_step = rounds.policy.pacing.mixes_in_step(rounds.count)
        return not in_step or rounds.extensions.corrects_gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base and gossip it from the next round on; collective.

        On a mesh all ranks call it. A pipeline stage without new parameters adds an empty group.

        Args:
            param_group: as in `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError: a parameter cannot be exchanged. No rank has added its group.
            ValueError: a parameter cannot be exchanged, the ranks' groups differ, the base raised
                an error of another kind, or another rank raised any of these errors. No rank has
                added its group. With `elastic` the other ranks are not told of an error, and wait
                for `timeout`.
        """
        groups, known = len(self.param_groups), len(named_parameters(self.param_groups))

        def find() -> list[Named]:
            # Once, also if a rank is lost meanwhile and the others meet again.
            if len(self.param_groups) == groups:
                try:
                    self._base.add_param_group(param_group)
                except (TypeError, ValueError):
                    raise
                except Exception as error:
                    # An error of another kind would close the connections.
                    raise ValueError(f"{type(error).__name__}: {error}") from error
                self._local_update.register(named_parameters(self.param_groups)[known:])
            return named_parameters(self.param_groups)

        try:
            self._regroup(find, known)
        except (TypeError, ValueError):
            del self.param_groups[groups:]
            raise

    def drop_extension(self, kind: type[Extension]) -> None:
        """Stop calling the `extensions` of a class, and free their memory; collective.

        The round in flight is mixed first, with what they have sent.

        Args:
            kind: the class, such as `GradientTracking`.

        Raises:
            RuntimeError: an average is in place that may be reverted, and mixing would change it.
            NonFiniteError: the round has NaN or infinity, and is dropped; the extensions are, too.
        """
        self._coordinator.average.refuse("drop_extension()")
        for each in [each for each in self.extensions if isinstance(each, kind)]:
            self._coordinator.drop_extension(each)
        self._notify()

    def rebuild_buckets(self) -> None:
        """Gossip all parameters of the base that require a gradient; collective.

        Call it after parameters were unfrozen, or added to the base without `add_param_group()`. A
        step in which such a parameter has a gradient raises an error otherwise. The ranks' own
        values are mixed from the next round on. Freezing parameters later changes nothing.
        """
        parameters = named_parameters(self.param_groups)
        self._regroup(lambda: parameters, len(parameters))
        self._local_update.register(parameters)

    def global_avg(self, may_revert: bool = True) -> None:
        """Replace the parameters by their average over all ranks; collective.

        The floating-point tensors in `buffers` and frozen parameters are averaged, too, if they
        differ between ranks. If no `revert_global_avg()` comes before the next `step()`, that step
        keeps the average and drops the snapshot and the round in flight.

        Args:
            may_revert: keep a snapshot for `revert_global_avg()`, which is one copy of the
                parameters. With ``elastic`` there is one during the call in any case.

        Raises:
            NonFiniteError: a rank has NaN or infinity in its parameters, or in a buffer where
                others have other values; nothing was averaged. If the round in flight contains
                them, the next `step()` raises, too, unless `load_state_dict()` drops that round.
                With ``may_revert=False`` the error is also raised if momenta that should be
                averaged are not finite; the parameters are then averaged, the momenta are not.
            PeerError: a rank was lost.
            CallOrderError: a rank is in another method.
        """
        self._coordinator.global_avg(may_revert)
        self._notify()

    def revert_global_avg(self) -> None:
        """Restore the values before `global_avg()`, bit for bit, and free the snapshot.

        Raises:
            RuntimeError: there is no snapshot, or the parameters are no longer the average.
        """
        self._coordinator.average.check()
        self._coordinator.average.revert()

    @contextmanager
    def averaged(
        self, recalibrate: tuple[nn.Module, Iterable[Any]] | None = None
    ) -> Iterator[None]:
        """Context manager in which the parameters are the average over all ranks; collective.

        Use it as ``with optimizer.averaged(): validate()``. The rank's own values are restored at
        the end.
        Inside another average the parameters do not change. A `step()` in the body raises a
        `CallOrderError`.

        Args:
            recalibrate: a model and batches on which this rank estimates the statistics of the
                model's batch norms again, in training mode, because the average of the running
                statistics does not fit the averaged model. If the model is in training mode, norms
                in evaluation mode do not change. The statistics are restored with the parameters.
        """
        # Most runs average no batch norms.
        from decent_optim_wrapper.optim.batch_norms import recalibrated

        nested = self.is_averaged
        self._shared["average_contexts"] += 1
        try:
            # Inside the try: the average is in place even if the callback for new members raises.
            if not nested:
                self.global_avg()
            with recalibrated(recalibrate, lambda: self.is_averaged):
                yield
        finally:
            self._shared["average_contexts"] -= 1
            if self.is_averaged and not nested:
                self._coordinator.average.revert()

    def synchronize(self) -> None:
        """Wait for the round in flight and mix it.

        Call it at the end of training, and before your own code reads or changes parameters between
        two steps. Otherwise, with "forward", parameters that are not read through a module are not
        mixed yet, and a change raises an error in the next forward pass; with views a change raises
        an error in the next step. With ``overlap=True`` and copies a change is kept. A change
        through ``.data`` alone is not noticed. With `AsItArrives` it is collective and brings all
        ranks to the same round.

        Raises:
            RuntimeError: an average is in place that may be reverted, and mixing would change it.
        """
        self._coordinator.average.refuse("synchronize()")
        self._coordinator.synchronize()

    def consensus_distance(self) -> float:
        """Compute how far the ranks are apart; collective.

        Returns:
            sqrt(1/n * sum over i of ||x_i - mean(x)||_2^2), the same on all ranks.
        """
        distance = self._coordinator.meet(
            CollectiveCall.CONSENSUS_DISTANCE, self._coordinator.average.consensus_distance
        )
        self._notify()
        return distance

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients by the norm of all of them together; collective over a replica.

        Like `torch.nn.utils.clip_grad_norm_`, but also for replicas that are spread over a mesh:
        all shards and stages count, and values that several ranks have count once.

        Args:
            max_norm: upper bound of the norm.
            norm_type: p of the p-norm; infinity for the largest absolute value.
            error_if_nonfinite: raise an error if the norm is not finite.

        Returns:
            The norm before clipping, a tensor of shape (), the same on all ranks of the replica.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is True.
        """
        params = params_of(self)
        if not self._coordinator.replica.transports:
            return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        # All ranks of the replica raise this error, and no other rank waits for them.
        with self._coordinator.propagating(RuntimeError):
            return self.replica.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def all_gather(self, tensor: Tensor, same_round: bool = False) -> Tensor:
        """Stack a small tensor from each of the `members`; collective.

        Args:
            tensor: a tensor of the same shape and dtype on all ranks.
            same_round: whether no rank has made a step or loaded a state since the last collective
                call between steps. Then no parameters change, also with `AsItArrives`.

        Returns:
            Tensor of shape ``(world_size, *tensor.shape)`` on the CPU, in the order of `members`.
            On a mesh the shape is ``(world_size * ranks of a replica, *tensor.shape)``, one replica
            after the other.

        Raises:
            PeerError: a rank did not answer, or comes back with `elastic`.
        """
        return self._coordinator.all_gather(tensor, same_round)

    def after_step(self, call: Callable[[], object]) -> None:
        """Register a function that is called after each step of this rank.

        Steps inside a backward pass call it, too. Unlike torch's step hooks it does not change how
        the step is made. Steps without a batch, as in `torch.distributed.algorithms.Join`, do not
        call it.

        Args:
            call: the function, without arguments.
        """
        self._after_step.append(call)

    def stats(self) -> StepStats:
        """Bytes, seconds and counts of the last `step()` on this rank; does not communicate."""
        # Waits for the GPU if the overflow is a tensor on it.
        return self._rounds.policy.meter.last._replace(skipped=bool(self._local_update.skipped))

    def report(self) -> Report:
        """Find the slow rank and the slow link of the last 100 steps; collective.

        ``print(optimizer.report())`` shows a table, and `dataclasses.asdict` returns plain values.

        Returns:
            The times and bytes of all ranks, and what to change.

        Raises:
            PeerError: a rank did not answer, or comes back with `elastic`.
        """
        rows = self._coordinator.all_gather(measure(self._rounds))
        # The shards of a replica have waited for each other, so the first one is enough.
        return diagnose(rows[:: self.replica.size], self.members)

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state dict with one more key for the gossip; does not communicate.

        Every rank must save its own state dict together with its own parameters. With
        `AsItArrives` call `synchronize()` on all ranks first: the state dict has no round in
        flight, and without one the mean over the ranks would move.
        """
        self._coordinator.commit_or_roll_back()
        return {**self._base.state_dict(), GOSSIP_KEY: saved_state.gossip_state(self._coordinator)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; does not communicate.

        If a round was in flight when the state was saved, the next `step()` launches it again, so
        model and optimizer may be loaded in any order. A round that is in flight now is dropped.

        Load on all ranks or on none. If only some ranks load, with gradient tracking or
        `AsItArrives`, all ranks raise a `CallOrderError` in a later round. If the base was given
        the names of its parameters, they are found by name, in whatever order they are now.

        Args:
            state_dict: the result of `state_dict()`, or the state dict of the bare base optimizer,
                with which training continues at round 0.

        Raises:
            RuntimeError: with `AsItArrives`, a round is in flight that other ranks may not have
                launched yet.
            ValueError: the state dict does not fit this wrapper. Nothing was loaded.
        """
        rate = self._settings.schedule.mixing_rate
        state_dict = saved_state.renumbered(state_dict, self.param_groups)
        load = saved_state.prepare_load(self._coordinator, state_dict.get(GOSSIP_KEY), rate)
        before = self.state, self.param_groups
        try:
            base = {key: value for key, value in state_dict.items() if key != GOSSIP_KEY}
            self._base.load_state_dict(base)
        except BaseException:
            self.state, self.param_groups = before
            raise
        load()

    def gossip_state_dict(self) -> dict[str, Any]:
        """Return the state of the gossip, without the base's state; does not communicate.

        It is the same on all ranks of a replica, and keyed by the names of the parameters. So
        torch.distributed.checkpoint can store it in one layout of the replica and load it in
        another one, under a key for each replica. The state of an outer optimizer is sharded like
        the parameters.

        Raises:
            ValueError: there is an outer optimizer, and the wrapper was built without the model.
        """
        return saved_state.named_state(self._coordinator)

    def load_gossip_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `gossip_state_dict()`; does not communicate.

        Load the model and the base's state separately, before or after. If a round was in flight
        when the state was saved, the next `step()` launches it again. A round that is in flight now
        is dropped.

        Args:
            state_dict: the result of `gossip_state_dict()`.

        Raises:
            ValueError: the state dict does not fit this wrapper. Nothing was loaded.
        """
        rate = self._settings.schedule.mixing_rate
        saved_state.prepare_load(self._coordinator, state_dict, rate, by_name=True)()

    def __repr__(self) -> str:
        return (
            f"DecentOptimWrapper({type(self._base).__name__}, {self.topology!r}, "
            f"rank {self.rank} of {self.world_size}, overlap={self._settings.overlap!r})"
        )

    def join_hook(self, **kwargs: Any) -> IdleRounds:
        """Return the hook that `torch.distributed.algorithms.Join` runs on a rank without data.

        Raises:
            ValueError: with `AsItArrives`, which needs no Join.
        """
        if not self._rounds.policy.pacing.synchronous:
            raise ValueError(
                f"overlap={self.pacing!r} does not go with Join, in which ranks wait for each "
                f"other in every step; ranks may make different numbers of steps without it: call "
                f"synchronize() at the end on all of them"
            )
        return IdleRounds(self._coordinator, self._notify)

    @property
    def _join_config(self) -> Any:
        return self._shared["join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._shared["join_config"] = config

    @property
    def join_device(self) -> torch.device:
        """The device on which Join counts the ranks that still have data."""
        group = self._builder.sharing.process_group
        if group is None or serves(group, CPU):
            return CPU
        return next(param.device for param in self._coordinator.params if param.is_cuda)

    @property
    def join_process_group(self) -> Any:
        """The process group in which Join counts."""
        return self._builder.sharing.process_group

    @contextmanager
    def _step(self, in_backward: bool = False) -> Iterator[Step]:
        if self._shared["join_config"].enable:
            Join.notify_join_context(self)
        if self._shared["average_contexts"] and self.is_averaged:
            raise CallOrderError(
                f"rank {self.rank}: step() expects the rank's own parameters, but the average is "
                f"in place until `with optimizer.averaged():` ends; step after it, or keep an "
                f"average with global_avg(may_revert=False)"
            )
        if self._forward_hooks is not None and not self._forward_hooks.were_called:
            _check_forward_pass(self._coordinator)
        with Step(self._coordinator, in_backward) as step:
            yield step
        if self._forward_hooks is not None:
            self._forward_hooks.end_step()
        if self._shared["join_config"].enable and any(e.collective for e in self.extensions):
            # Another rank without data would be in Join's all-reduce during the forward pass.
            self._coordinator.mix_early()
        if self._shared["logs_waits"] and len(self._rounds.policy.meter.history) == KEPT_STEPS:
            self._shared["logs_waits"] = False
            log_waits(self._rounds)
        self._notify(self._after_step)

    @contextmanager
    def _in_parts(
        self, scaling: Scaling, apply: Apply | None = None, in_backward: bool = False
    ) -> Iterator[Callable[[Bucket], None]]:
        """Make a step in parts: yields a function that mixes, updates and launches one bucket."""
        by_bucket = self._local_update.by_bucket
        with self._step(in_backward) as step, by_bucket(scaling, step.buckets, apply) as update:
            yield lambda bucket: step.advance([bucket], update, bucket)

    def _regroup(self, find: Callable[[], list[Named]], known: int) -> None:
        """Gossip these parameters from the next round on; collective; see `Builder.add`."""
        add = partial(self._builder.add, self._rounds, find, known)
        self._coordinator.meet(CollectiveCall.REGROUP, add)
        if self._forward_hooks is not None:
            self._forward_hooks.watch()
        self._notify()

    def _notify(self, calls: Iterable[Callable[[], object]] = ()) -> None:
        """Call functions of the user, and the callback for changes if the members have changed.

        Whatever belongs to the step or the call is done by then: the user's functions may raise.

        Args:
            calls: the functions, without arguments; they come before the callback.
        """
        for each in calls:
            each()
        if self._coordinator.members:
            self._coordinator.members.notify_change()


def _check_forward_pass(coordinator: Coordinator) -> None:
    """Check that there are no gradients, since no forward pass has mixed the parameters."""
    if coordinator.rounds.in_flight and any(param.grad is not None for param in coordinator.params):
        error = CallOrderError(
            f"rank {coordinator.rounds.session.transport.initial_rank}: step() expects a forward "
            f"pass of the model since the last step, which mixes the parameters, but no module was "
            f"called: the gradients belong to other parameters. Call the model or its modules, or "
            f"synchronize() before other reads; without a batch, set gradients to None"
        )
        coordinator.report_and_close(error)
        raise error


class IdleRounds(JoinHook):
    """Takes part in the rounds of other ranks without local updates.

    Args:
        coordinator: coordinates the rounds of this rank.
        notify: called after each round.
    """

    def __init__(self, coordinator: Coordinator, notify: Callable[[], None]) -> None:
        self._coordinator = coordinator
        self._notify = notify

    def main_hook(self) -> None:
        """Make one round for a step that another rank still makes."""
        with Step(self._coordinator, in_backward=False) as step:
            step.advance(step.buckets, lambda: None)
        # In a forward pass, which this rank does not make, the others may have mixed by now.
        self._coordinator.mix_early()
        self._notify()
