"""What a model contains besides the parameters that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.comm.state_transfer import share_text
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.wire.broadcast import digest
from decent_optim_wrapper.wire.bucket import Bucket, as_real
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.parameters import Named
from decent_optim_wrapper.wire.plan import plan_buckets

# In place of a number of a tensor on this rank, which is not negative.
_LEFT_OUT = -1
# What `_mark` says of a tensor without infinities.
_IS_DIRECTION, _HAS_NAN = 1, 2


class Averaged(NamedTuple):
    """Tensors that are averaged together with the parameters.

    Args:
        buckets: their buckets, each with the ranks that count; if none do, it is not averaged, and
            restored with the others.
        put_back: function that puts these tensors back into the model, in their shapes.
    """

    buckets: Sequence[tuple[Bucket, Sequence[bool]]] = ()
    put_back: Callable[[], None] = lambda: None


class ModelState:
    """The tensors of a model: those at the start, or what has replaced them since.

    A forward pass may replace a buffer by another tensor, or change its shape.

    Args:
        named: the tensors at the start; those that are not in the model stay the same.
        model: the model; None if it is not known.
    """

    def __init__(self, named: Sequence[Named], model: nn.Module | None) -> None:
        modules = [] if model is None else [*model.modules()]
        places = {
            id(tensor): (module, kind, key)
            for module, kind in product(modules, ("_parameters", "_buffers"))
            for key, tensor in getattr(module, kind).items()
        }
        # By the attribute of the module: `ForwardHooks` puts another dict there.
        self._rows: list[tuple[Named, Any, str, str]] = [
            (n, *places.get(id(n.tensor), (SimpleNamespace(own={"": n.tensor}), "own", "")))
            for n in named
        ]

    def on_all_ranks(self, transport: Transport, source: int = 0) -> list[Named]:
        """The tensors that all ranks have, by name, shape and dtype, in the order of `source`.

        Collective.
        """
        return [named for named, _ in _agree(self._now(), transport, lambda _: 0, source)]

    @torch.no_grad()
    def to_average(
        self, layout: Layout, nonfinite: NonFinitePolicy, replica: Replica, transport: Transport
    ) -> Averaged:
        """The tensors whose values differ between ranks; collective.

        Parameters that require a gradient now are left out. Buffers that are the same on all ranks
        are only restored afterwards.

        Args:
            layout: how tensors are put into buckets.
            nonfinite: what happens to values that are not finite on some ranks.
            replica: the ranks of a replica, which raise an error together.
            transport: connects the ranks.

        Raises:
            NonFiniteError: a tensor is not finite on some ranks, and the policy does not allow it.
        """
        now = self._now()
        compared = _agree(now, transport, _digest)
        differing = [named for named, digests in compared if len({*digests}) > 1]
        rows = _counting(differing, transport, nonfinite, replica)
        known = {id(each.tensor) for each in differing}
        rows += [(n, ()) for n in now if n.kind == "buffer" and id(n.tensor) not in known]
        groups: dict[tuple[bool, ...], list[Tensor]] = {}
        for named, ranks in rows:
            groups.setdefault(ranks, []).append(named.tensor)
        planned = [(b, ranks) for ranks, each in groups.items() for b in plan_buckets(each, layout)]
        found = [(getattr(module, kind), key) for _, module, kind, key in self._rows]
        present = [(registry, key, registry.get(key)) for registry, key in found]
        places = [(*each, each[-1].shape) for each in present if each[-1] is not None]

        def put_back() -> None:
            for registry, key, tensor, shape in places:
                if tensor.shape != shape:
                    tensor.resize_(shape)
                registry[key] = tensor

        return Averaged(planned, put_back)

    def _now(self) -> list[Named]:
        found = []
        for named, module, kind, key in self._rows:
            if (tensor := (registry := getattr(module, kind)).get(key)) is None:
                continue
            if tensor.is_inference():
                # It could not be changed outside of inference mode.
                with torch.inference_mode(False):
                    tensor = registry[key] = tensor.clone()
            found.append(named._replace(tensor=_without_repeats(tensor)))
        return found


def is_direction(tensor: Tensor) -> bool:
    """Return whether this is a vector of length 1, such as the vectors of spectral norms.

    The mean of several directions is shorter, and may point anywhere.
    """
    values = as_real(tensor)
    is_vector = 2 <= values.numel() == max(values.shape, default=1)
    tolerance = max(torch.finfo(values.dtype).eps, 1e-6)
    return is_vector and abs(float(values.double().norm()) - 1) <= tolerance


def _without_repeats(tensor: Tensor) -> Tensor:
    """A view with each element once: torch writes nothing into a tensor made by `expand`."""
    if isinstance(tensor, DTensor) or 0 not in tensor.stride():
        return tensor
    steps = tensor.stride()
    sizes = [min(n, 1) if step == 0 else n for n, step in zip(tensor.shape, steps, strict=True)]
    return tensor.detach().as_strided(sizes, steps)


def _agree(
    tensors: Sequence[Named], transport: Transport, number: Callable[[Named], int], source: int = 0
) -> list[tuple[Named, list[int]]]:
    """Find the tensors that all ranks have, whatever their order; collective.

    Args:
        tensors: the tensors of this rank.
        transport: connects the ranks.
        number: function that returns a number of a tensor; a negative one leaves it out.
        source: the rank whose order all take.

    Returns:
        The tensors, each with its numbers on all ranks.
    """
    own = {each.describe(): each for each in tensors}
    lines = share_text("\n".join(own), transport, source).split("\n")
    numbers = [number(own[line]) if line in own else _LEFT_OUT for line in lines]
    rows = gather_numbers(numbers, transport)
    return [(own[line], row) for line, row in zip(lines, rows, strict=True) if min(row) >= 0]


def gather_numbers(numbers: Sequence[int], transport: Transport) -> list[list[int]]:
    """The number of each rank in place of each number; collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    rows: list[list[int]] = transport.all_gather(own).T.tolist()
    return rows


def _digest(named: Named) -> int:
    is_trained = named.kind == "parameter" and named.tensor.requires_grad
    return _LEFT_OUT if is_trained else digest(named.tensor)


def _mark(named: Named) -> int:
    """A number that says where a tensor is infinite; 0 if it is finite."""
    values = as_real(named.tensor)
    if values.isnan().any():
        return _HAS_NAN
    return _IS_DIRECTION if is_direction(values) else digest(values.where(values.isinf(), 0.0))


def _counting(
    tensors: Sequence[Named], transport: Transport, nonfinite: NonFinitePolicy, replica: Replica
) -> list[tuple[Named, tuple[bool, ...]]]:
    """The tensors, each with the ranks that count in its average, or none; collective."""
    rows, refused = list[tuple[Named, tuple[bool, ...]]](), list[tuple[str, list[int]]]()
    marked = gather_numbers([_mark(each) for each in tensors], transport) if tensors else []
    for named, marks in zip(tensors, marked, strict=True):
        alike = len({*marks}) == 1 and _HAS_NAN not in marks
        ranks = tuple(alike or not nonfinite.checks or mark <= _IS_DIRECTION for mark in marks)
        if not all(ranks):
            bad = [transport.members[place] for place, counts in enumerate(ranks) if not counts]
            refused.append((f"{named.kind} {named.name}", bad))
        only_directions = {*marks} & {0, _IS_DIRECTION} == {_IS_DIRECTION}
        rows.append((named, () if only_directions or not any(ranks) else ranks))
    count = torch.tensor(len(refused), device="cpu")
    replica.sum_(count)
    if count and nonfinite.on_nonfinite == "raise":
        what, bad = refused[0] if refused else ("buffers of the other shards", [])
        raise NonFiniteError(
            f"rank {transport.initial_rank}: expected in global_avg() finite values, or infinities "
            f"in the same places on all ranks, but {what} has others on ranks {bad}; nothing was "
            f"averaged. Run a forward pass on ranks that have seen no batch, pass buffers= without "
            f'it, or take the mean of the other ranks with on_nonfinite="skip"',
            bad,
        )
    return rows
