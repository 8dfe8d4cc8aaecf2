"""The time of a step by method, from the size of the model, the network and the time of computing.

With c the seconds of computing of a step, a third of it in the forward pass, and w the seconds in
which a rank sends its parameters once, in k buckets,

    DDP                            max(c + a / k', c / 3 + 2 c / (3 k') + a),  a = 2 (n - 1) / n w
    mixed before the forward pass  c + max(w / k, w - (k - 1) / k * c / 3), sent after the step
                                   max(c + w / k, w + c / k), sent during the backward pass
    as it arrives                  c

with k' the buckets of DDP. The time to DDP's loss is the time of the steps that were measured with
a small GPT on 4 ranks (`examples/benchmark/time_to_loss.py`). Coding takes no time here, and all
ranks compute equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from decent_optim_wrapper.report import table
from decent_optim_wrapper.topo import Group

_FORWARD = 1 / 3
# The share of the headers of TCP, IP and Ethernet.
_HEADERS = 1.04
_BUCKETS = 16
_BUCKET_OF_DDP = 25 << 20
# A byte for each float32, and a scale for each 256.
_INT8 = 0.254
_HEAD = "settings", "s/step", "speed-up to DDP's loss"
# A method is fast enough if it takes at most this many times as long as the fastest.
_FAST = 1.1


class Job(NamedTuple):
    """The model, the ranks and the network of a run.

    Args:
        parameters: number of float32 parameters.
        ranks: number of ranks.
        bandwidth: bytes per second that a rank sends, and receives at the same time.
        compute: seconds of the forward and backward pass and the update of a step.
    """

    parameters: float
    ranks: int
    bandwidth: float
    compute: float

    def wire(self, share: float = 1.0) -> float:
        """The seconds in which a rank sends a share of the bytes of its parameters."""
        return share * 4 * self.parameters * _HEADERS / self.bandwidth

    def all_reduce(self, share: float = 1.0) -> float:
        """The seconds of an all-reduce of a share of the bytes of its parameters."""
        return Group(range(self.ranks)).copies_sent * self.wire(share)


def _all_reduced(job: Job, share: float) -> float:
    buckets = -(-4 * job.parameters // _BUCKET_OF_DDP)
    summed, c = job.all_reduce(share), job.compute
    return max(c + summed / buckets, c * (_FORWARD + (1 - _FORWARD) / buckets) + summed)


def _before_forward(job: Job, share: float) -> float:
    w, hidden = job.wire(share), (_BUCKETS - 1) / _BUCKETS * _FORWARD * job.compute
    return job.compute + max(w / _BUCKETS, w - hidden)


def _in_backward(job: Job, share: float) -> float:
    w, c = job.wire(share), job.compute
    return max(c + w / _BUCKETS, w + c / _BUCKETS)


def _as_it_arrives(job: Job, share: float) -> float:
    return job.compute


class _Method(NamedTuple):
    settings: str
    step_seconds: Callable[[Job, float], float]
    share: float = 1.0
    # Steps to DDP's loss, relative to DDP's steps.
    steps: float = 1.06

    def gain(self, job: Job) -> float:
        """DDP's time to its loss, relative to the time that this method takes."""
        seconds = self.step_seconds(job, self.share)
        # How many steps late a round arrives.
        late = max(0, math.ceil(job.wire(self.share) / seconds) - 1)
        return _all_reduced(job, 1.0) / (seconds * (self.steps + 0.16 * late))


# Methods with lower losses come first.
_METHODS = (
    _Method("DDP", _all_reduced, steps=1.0),
    _Method("DDP, bf16 hook", _all_reduced, 0.5, 1.02),
    _Method("DecentOptimWrapper(base, model=model)", _before_forward),
    _Method('DecentralizedDataParallel(..., topology="one-peer-exp")', _in_backward),
    _Method("DecentOptimWrapper(..., model=model, int8)", _before_forward, _INT8),
    _Method('DecentralizedDataParallel(..., topology="one-peer-exp", int8)', _in_backward, _INT8),
    _Method("DecentOptimWrapper(..., overlap=AsItArrives(), int8)", _as_it_arrives, _INT8, 1.09),
)


def plan(job: Job) -> str:
    """The seconds of a step by method, and which to take.

    Args:
        job: the model, the ranks and the network.

    Raises:
        ValueError: a figure is not positive, or there is only one rank.
    """
    if job.ranks < 2 or not all(figure > 0 for figure in job):
        raise ValueError(f"expected positive figures and 2 ranks or more, got {job}")
    rows = [(m.settings, m.step_seconds(job, m.share), m.gain(job)) for m in _METHODS]
    ratio, fast = job.all_reduce() / job.compute, max(gain for *_, gain in rows) / _FAST
    taken = next(settings for settings, _, gain in rows if gain >= fast)
    methods = [dict(zip(_HEAD, row, strict=True)) for row in rows]
    lines = [
        table(methods),
        f"an all-reduce takes {ratio:.2f} times as long as computing a step",
        f"learning rate over DDP's: AdamW, Muon x {1.5 if job.ranks < 8 else 2.25}, SGD x 0.67",
        f"take {taken}; int8 is comm_dtype=torch.int8",
    ]
    return "\n".join(lines)
