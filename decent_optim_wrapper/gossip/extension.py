"""The interface of extensions, through which features take part in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.schedule import Intervals, Pacing, RoundKind
from decent_optim_wrapper.gossip.session import Replica
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.storage import Flat


class ExtensionContext(NamedTuple):
    """The objects that an extension may use from the call of `attach` on.

    Args:
        rank: this rank, as numbered at the start.
        optimizer: the base optimizer.
        layout: how tensors are put into buckets.
        intervals: how often rounds are launched.
        pacing: when rounds are mixed.
        nonfinite: what happens to values that are not finite.
        replica: the ranks that share one copy of the model.
        meter: counts the bytes sent.
        detach: function that removes the extension, which must not have sent anything.
    """

    rank: int
    optimizer: Optimizer
    layout: Layout
    intervals: Intervals
    pacing: Pacing
    nonfinite: NonFinitePolicy
    replica: Replica
    meter: Meter
    detach: Callable[[], None] = lambda: None


class ReceivedBucket(NamedTuple):
    """A bucket of parameters that is about to be mixed.

    Args:
        kind: the kind of the round.
        bucket: the bucket, whose members the mixing changes in place.
        snapshot: function that returns the values at the launch; it returns None if they cannot
            have changed since.
    """

    kind: RoundKind
    bucket: Bucket
    snapshot: Callable[[], Flat | None]


class Extension:
    """Takes part in the rounds of a wrapper; by default every method does nothing.

    Pass the same extensions on all ranks, in the same order. The library calls its own extensions
    before yours, wherever they are in the list. A step calls, in this order,
    `begin_step`, `received`, `arrived` if it mixes a round, and for each bucket `mixing`,
    `updating` and `launch`. It calls `end_round` after the last bucket of a round is mixed. Without
    overlap, and if a round is mixed before the next forward pass, `arrived`, `mixing` and
    `end_round` come after the last `launch`.

    Attributes:
        name: the key of its state in checkpoints, different for each extension of a wrapper.
        corrects_gradients: whether `updating` changes gradients. Closures are then evaluated, and
            scaled gradients unscaled, before `updating`.
        belongs_to_rank: whether the state is valid only for this rank, and only while the members
            stay the same. A rank that comes back then receives no state, and all ranks restart
            unless all of them have loaded their own state. A state that does not belong to a rank
            is averaged if another number of ranks resumes: its floating-point tensors are averaged,
            and everything else is taken from one rank.
        collective: whether `arrived` and `kept` communicate. The default of `overlap` is then True.
    """

    name: ClassVar[str] = ""
    corrects_gradients: ClassVar[bool] = False
    belongs_to_rank: ClassVar[bool] = False
    collective: ClassVar[bool] = False

    @property
    def sends(self) -> bool:
        """True if it may send buckets, that is, if its class defines `launch`."""
        return type(self).launch is not Extension.launch

    def attach(self, context: ExtensionContext) -> None:
        """Called once, after the ranks have met and before anything is sent.

        Args:
            context: what the extension may use from now on.

        Raises:
            TypeError: an argument of the extension has the wrong type; raised on all ranks.
            ValueError: the extension does not fit the wrapper; raised on all ranks.
        """

    def describe(self) -> str:
        """Return a line of text that must be the same on all ranks."""
        return type(self).__name__

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Called when buckets were made; parameters may have moved to other buckets."""

    def begin_step(self, buckets: Sequence[Bucket]) -> None:
        """Called at the beginning of a step, with the buckets of the parameters."""

    def received(self, in_flight: bool) -> None:
        """Called when a step has received the round that it mixes, if there is one.

        Args:
            in_flight: whether a round stays in flight that this step does not mix.
        """

    def arrived(self, kind: RoundKind, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Called when a round has arrived, before it is mixed; collective for exact averages."""

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        """Return a context around the mixing of a bucket, also in a group of one rank."""
        return nullcontext()

    def end_round(self, kind: RoundKind) -> None:
        """Called when all buckets of a round are mixed."""

    def updating(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context around the base optimizer's update of these parameters.

        Args:
            params: the parameters of one bucket or of several, or parameters in no bucket.
        """
        return nullcontext()

    def launch(self, bucket: Bucket) -> Sequence[Bucket]:
        """Return the buckets to send after a bucket of parameters, with their present values."""
        return ()

    def kept(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Called when an exact average has become the ranks' own parameters."""

    def restart(self) -> None:
        """Reset the state; called on all ranks when the members have changed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; must not communicate.

        The key "params", if there is one, has a list with a dict for each parameter of the base,
        in the order of its groups. `gossip_state_dict` stores them by name.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a state, or reset it if `state` is None; must not communicate."""

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state without loading it, and return the function that loads it.

        Raises:
            ValueError: the state does not fit this extension.
        """
        return partial(self.load_state_dict, state)


class Extensions:
    """The extensions of one wrapper.

    Args:
        extensions: in the order in which they are called.

    Raises:
        ValueError: two of them have the same name.
    """

    def __init__(self, extensions: Sequence[Extension]) -> None:
        # An attribute, so that a step without extensions makes no call for them.
        self.all = tuple(extensions)
        names = [each.name for each in self.all if each.name]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"extensions expects different names, got several of {sorted(twice)}")

    def attach(self, context: ExtensionContext) -> None:
        """Attach each extension; `detach` of the context is replaced."""
        for each in self.all:
            each.attach(context._replace(detach=partial(self.drop, each)))

    def drop(self, extension: Extension) -> None:
        """Stop calling an extension."""
        self.all = tuple(each for each in self.all if each is not extension)

    @property
    def corrects_gradients(self) -> bool:
        """True if any of them changes gradients."""
        return any(each.corrects_gradients for each in self.all)

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        """Enter the contexts of all extensions around the mixing of a bucket."""
        return entered(each.mixing(received) for each in self.all)

    def updating(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Enter the contexts of all extensions around an update."""
        return entered(each.updating(params) for each in self.all)


@contextmanager
def entered(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter several contexts, each of which is made once those before it are entered."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
