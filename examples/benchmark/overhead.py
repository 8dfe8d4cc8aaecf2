"""The cost of the wrapper if the network costs nothing.

    python examples/benchmark/overhead.py           # 2 ranks on loopback, 100 M float32 parameters
    python examples/benchmark/overhead.py --cuda    # copy and mix against a fused AdamW step

The first command compares one round (pack, send and receive, mix) with one bare send and receive
of the same bytes. The second needs a GPU and no peer: it compares the packing and the mixing of a
round with a fused AdamW step on the same parameters, by CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.gossip.bucket import Layout, plan_buckets

TENSORS = 400


class Overhead(NamedTuple):
    """Median seconds on the slower rank."""

    bare: float
    copies: float
    views: float


def make_params(count: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (count // TENSORS,)
    return [
        torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(TENSORS)
    ]


def median_seconds(action: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure(count: int, repeats: int) -> Overhead:
    dist.init_process_group("gloo")
    peer = 1 - dist.get_rank()
    outgoing, incoming = torch.zeros(count), torch.empty(count)

    def send_and_receive() -> None:
        works = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
        for work in works:
            work.wait()

    bare = median_seconds(send_and_receive, repeats)
    rounds = []
    for views in (False, True):
        # Without gradients the local update is empty: a step is the round and nothing else.
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(make_params(count, "cpu", torch.float32), lr=0.1),
            topology="ring",
            overlap=False,
            param_as_bucket_view=views,
        )
        rounds.append(median_seconds(lambda optimizer=optimizer: optimizer.step(), repeats))
    return Overhead(bare, *rounds)


def cuda_seconds(action: Callable[[], None], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(repeats + 2):
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return statistics.median(seconds[2:])


def compare_on_cuda(count: int, dtype: torch.dtype, repeats: int) -> None:
    params = make_params(count, "cuda", dtype)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)
    adamw = cuda_seconds(lambda: optimizer.step(), repeats)
    for views in (False, True):
        buckets = plan_buckets(params, Layout(25, as_view=views))

        def copy_and_mix(buckets: tuple = buckets) -> None:
            for bucket in buckets:
                bucket.pack(bucket.pair().outgoing)
                bucket.mix_(bucket.pair().incoming, 0.5)

        seconds = cuda_seconds(copy_and_mix, repeats)
        kind = "views" if views else "copies"
        print(
            f"{count / 1e6:g} M {dtype}, {kind}: copy and mix {1000 * seconds:.2f} ms, fused AdamW "
            f"{1000 * adamw:.2f} ms, ratio {seconds / adamw:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, help="default 100e6, or 1e9 with --cuda")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    if args.cuda:
        if not torch.cuda.is_available():
            parser.error("--cuda needs a CUDA device, and torch finds none")
        for dtype in (torch.float32, torch.bfloat16):
            compare_on_cuda(int(args.parameters or 1e9), dtype, args.repeats)
        return
    count = int(args.parameters or 100e6)
    with netlab.lab(2, rate="") as where:
        ranks = netlab.run(where, 2, measure, count, args.repeats, timeout=300)
    bare, copies, views = (max(column) for column in zip(*ranks, strict=True))
    print(f"{count / 1e6:g} M float32 parameters in {TENSORS} tensors, 2 ranks on loopback")
    print(f"one send and receive: {1000 * bare:.0f} ms")
    print(f"one round:            {1000 * copies:.0f} ms, ratio {copies / bare:.2f}")
    print(f"one round, views:     {1000 * views:.0f} ms, ratio {views / bare:.2f}")


if __name__ == "__main__":
    main()
