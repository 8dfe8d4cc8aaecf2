"""The interface of what takes part in rounds besides the parameters: the seam for features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.replica import Replica
from decent_optim_wrapper.gossip.schedule import Intervals, RoundKind
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket, Layout
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.storage import Flat


class ExtensionContext(NamedTuple):
    """What an extension may use from its `attach` on.

    Args:
        rank: this rank, as numbered at the start.
        optimizer: the base optimizer.
        layout: how tensors are put into buckets.
        intervals: how often rounds are launched.
        pacing: when they are mixed.
        nonfinite: what happens to values that are not finite.
        replica: the ranks that hold one copy of the model together.
        meter: counts the bytes sent.
        detach: removes the extension from this rank; nothing of it may have been sent.
    """

    rank: int
    optimizer: Optimizer
    layout: Layout
    intervals: Intervals
    pacing: Pacing
    nonfinite: NonFinitePolicy
    replica: Replica
    meter: Meter
    detach: Callable[[], None]


class ReceivedBucket(NamedTuple):
    """A bucket of parameters that is about to be mixed.

    Args:
        kind: the kind of the round.
        bucket: its members are changed in place by the mixing.
        snapshot: returns the values of the launch; None if they cannot have changed since.
        compare: returns whether this rank has what has arrived, of shape (), and what it has sent;
            None if that cannot be told.
    """

    kind: RoundKind
    bucket: Bucket
    snapshot: Callable[[], Flat | None]
    compare: Callable[[], tuple[Tensor, Tensor] | None]


class Extension:
    """Takes part in the rounds of a wrapper; every method does nothing by default.

    The same extensions are passed on all ranks, in the same order. A step calls, in this order,
    `begin_step`, `received`, `arrived` if a round is mixed now, and for each bucket `mixing`,
    `updating` and `launch`; after the last bucket of a round is mixed, `end_round`.

    Attributes:
        name: the key of its state in checkpoints, different for each extension of a wrapper.
        sends: whether `launch` returns buckets.
        corrects_gradients: whether `updating` changes gradients. A closure is then evaluated
            before, and scaled gradients are unscaled before.
        belongs_to_rank: whether the state is of use to this rank only, and only as long as the
            members stay. A rank that comes back receives none, and all ranks restart unless all
            have loaded their own.
        collective: whether `kept` communicates.
    """

    name: ClassVar[str] = ""
    sends: ClassVar[bool] = False
    corrects_gradients: ClassVar[bool] = False
    belongs_to_rank: ClassVar[bool] = False
    collective: ClassVar[bool] = False

    def attach(self, context: ExtensionContext) -> None:
        """Run once, when the ranks have met and before anything is sent.

        Raises:
            TypeError: an argument of the extension has the wrong type; raised on all ranks.
            ValueError: the extension does not fit the wrapper; raised on all ranks.
        """

    def describe(self) -> str:
        """A line that must be the same on all ranks."""
        return type(self).__name__

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Run when buckets were made, in which members may have moved."""

    def begin_step(self, buckets: Sequence[Bucket]) -> None:
        """Run at the beginning of a step, with the buckets of the parameters."""

    def received(self, in_flight: bool) -> None:
        """Run when a step has received its round.

        Args:
            in_flight: whether a round is in flight that this step does not mix.
        """

    def arrived(self, kind: RoundKind, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Run when a round has arrived, before its mixing; collective for exact averages."""

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        """A context around the mixing of a bucket, also in a group of one rank."""
        return nullcontext()

    def end_round(self, kind: RoundKind) -> None:
        """Run when all buckets of a round are mixed."""

    def updating(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context around the base optimizer's update of these parameters.

        Args:
            params: those of one bucket or of several, or parameters that are in no bucket.
        """
        return nullcontext()

    def launch(self, bucket: Bucket) -> Sequence[Bucket]:
        """The buckets to send behind a bucket of parameters, with their present values."""
        return ()

    def kept(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Run when an exact average has become the ranks' own parameters."""

    def restart(self) -> None:
        """Start again, as all ranks do when the members have changed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; communicates nothing.

        The key "params", if there is one, holds a dict for each parameter of the base, in the order
        of its groups. `gossip_state_dict` stores them by name.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a state; from the start if it is None. Must not communicate."""

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state without any change, and return the function that loads it.

        Raises:
            ValueError: the state belongs to something else.
        """
        return partial(self.load_state_dict, state)


class Extensions:
    """The extensions of one wrapper.

    Args:
        extensions: in the order in which they are called.

    Raises:
        ValueError: two of them have the same name.
    """

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        # An attribute: a step without extensions makes no call for them.
        self.all = tuple(extensions)
        names = [each.name for each in self.all if each.name]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"extensions expects different names, got several of {sorted(twice)}")

    def drop(self, extension: Extension) -> None:
        """Call an extension no longer."""
        self.all = tuple(each for each in self.all if each is not extension)

    @property
    def corrects_gradients(self) -> bool:
        """Whether any of them changes gradients."""
        return any(each.corrects_gradients for each in self.all)

    @contextmanager
    def mixing(self, received: ReceivedBucket) -> Iterator[None]:
        """The contexts of all of them around the mixing of a bucket."""
        with ExitStack() as stack:
            for each in self.all:
                stack.enter_context(each.mixing(received))
            yield

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """The contexts of all of them around an update."""
        with ExitStack() as stack:
            for each in self.all:
                stack.enter_context(each.updating(params))
            yield
