"""How fast vectors are coded on one core, and how many bytes their messages take.

python examples/benchmark/codec_speed.py    # 25 MiB of float32

The bytes include the scales; the speed is counted in bytes of float32, before coding and after
decoding. It took 29 s on 2 busy cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from decent_optim_wrapper.codecs import INT4, codec_of
from decent_optim_wrapper.wire.layout import MIB

COMM_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "int4": INT4}


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    """The fastest of several runs, after one more."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def row(name: str, mib: float, repeats: int) -> str:
    """The speed of coding a bucket, and of mixing one message with another, in GB/s of float32."""
    codec, numel = codec_of(COMM_DTYPES[name]), int(mib * MIB) // 4
    generator = torch.Generator().manual_seed(0)
    values, theirs, reference = (torch.randn(numel, generator=generator) for _ in range(3))
    shared = reference if codec.uses_reference else None
    outgoing = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    incoming = outgoing.clone()
    codec.encode(theirs, incoming, shared)

    def mix() -> None:
        messages = codec.decode(incoming, outgoing, numel=numel, dtype=values.dtype)
        for place, (arrived, sent) in messages:
            if shared is not None:
                shared[place].add_(torch.add(arrived, sent), alpha=0.5)
            values[place].add_(arrived.sub_(sent), alpha=0.5)

    coding = seconds_of(lambda: codec.encode(values, outgoing, shared), repeats)
    mixing = seconds_of(mix, repeats)
    speeds = (values.nbytes / seconds / 1e9 for seconds in (coding, mixing))
    columns = [f"{speed:.2f}" for speed in speeds]
    return f"| {name} | {outgoing.numel() / numel:.3f} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=25)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| comm_dtype | bytes per element | code, GB/s of float32 | mix, GB/s of float32 |")
    print("|---|---|---|---|")
    for name in COMM_DTYPES:
        print(row(name, args.mib, args.repeats), flush=True)


if __name__ == "__main__":
    main()
