"""The examples run and print what they promise, and the benchmarks their tables."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from framework_ranks import run_example
from problem import TINY_CAP_MB, adamw, backward, flatten, make_params
from ranks import run_processes, run_script, run_script_on_ranks

from decent_optim_wrapper import DecentOptimWrapper

EXAMPLES = Path(__file__).parent.parent / "examples"
# Looked for and not imported, which every worker would wait for.
missing = [name for name in ("sklearn", "torchvision") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"the examples need {missing}"),
]


def fork_from_here() -> None:
    """Import once what draws, and make scripts fork, whose processes would import torch again."""
    importlib.import_module("matplotlib.pyplot")
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    forked.PROCESSES = fork  # type: ignore[assignment]
    forked.start_server = lambda: None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def host() -> Iterator[Executor]:
    """The process from which the examples are forked."""
    with ProcessPoolExecutor(1, forked.PROCESSES, fork_from_here) as executor:
        yield executor


def survive(rank: int, *arguments: Any) -> str:
    """Runs survive_digits.py as a rank of a launcher that starts none again."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    sys.path.insert(0, str(EXAMPLES))
    return run_example(rank, EXAMPLES / "survive_digits.py", *arguments)


def test_the_digits_are_learnt_though_ranks_are_killed(tmp_path: Path) -> None:
    options = ("--epochs", "8", "--batch-size", "32", "--lr", "0.08", "--pause", "0")
    out, nothing = run_processes(4, survive, tmp_path, *options, lost=(0, 2))
    # Only the first member prints: rank 0, and after its death rank 1.
    steps = re.findall(r"^step (\d+) of 96: ranks (.*)$", out, re.MULTILINE)
    members = {int(step): text for step, text in steps}
    assert list(dict.fromkeys(members.values())) == ["(1, 2, 3)", "(1, 3)"]
    assert min(members) > 28
    (accuracy,) = re.findall(r"ranks \(1, 3\) are left: averaged model (.*)%", out)
    assert float(accuracy) >= 90
    assert nothing == "rank 3 starts at step 0\n"


def gossip_in_both_ways(rank: int) -> list[list[float]]:
    """Parameters before training, after it with the library, and with the minimal example."""
    dist.init_process_group("gloo")
    sys.path.insert(0, str(EXAMPLES))
    minimal = importlib.import_module("minimal_gossip").MinimalGossip
    ours = partial(
        DecentOptimWrapper, topology="one-peer-exp", overlap=False, bucket_cap_mb=TINY_CAP_MB
    )
    found: list[list[float]] = []
    for wrap in (ours, minimal):
        # Rank 0's values are in place of the others' when training begins.
        params = make_params(seed=rank, dtype=torch.float32)
        gossip = wrap(adamw(params))
        first = flatten(params).tolist()
        for step in range(7):
            backward(params, rank, step)
            gossip.step()
        found.append(flatten(params).tolist())
    dist.destroy_process_group()
    return [first, *found]


def test_the_library_does_bit_for_bit_what_the_minimal_example_does() -> None:
    ranks = run_processes(4, gossip_in_both_ways)
    for first, library, minimal in ranks:
        assert library == minimal != first
    assert ranks[0][1] != ranks[1][1]


# Lines that examples print, and pictures that they draw, by the command line; "*" is any text.
# Behaviour only: tests time nothing. Where two learning rates are tried, nothing is learnt with the
# smaller one.
PRINTED = {
    "torchrun minimal_gossip.py": ["largest error of a weight of the averaged model: 0.0000"],
    "python custom_topology.py": ["star: consensus rate*"],
    "torchrun custom_topology.py": ["largest error of a weight 0.0*"],
    "torchrun integrations/log_digits.py --steps 12 --width 32": ["stats.png"],
    # All ranks in int3, a twelfth of DDP's bytes, in every fourth step.
    "torchrun train_digits.py --gossip-every 4 --ddp --epochs 3 --lr 0.1": [
        *("gossip_every=4: test accuracy 9?.?%, 0.3 MiB sent", "digits.png"),
        "DDP: test accuracy 9?.?%, 15.1 MiB sent",
    ],
    "python train_digits.py --topology ring --epochs 1 --non-iid --gossip-every 1 4": [
        *("ring, gossip_every=1: test accuracy *, 0.0 MiB sent", "ring, gossip_every=4:*"),
    ],
    # Before training all 103 characters are equally likely: the loss is 4.6 or above. In
    # pairs each step sends what of the model of 0.26 MiB is on this rank.
    "torchrun train_gpt.py --inner fsdp --forward --width 64 --depth 1 --steps 3 --lr 0.03": [
        *("ring, float32, forward, step 3: validation loss 3.[0-4]*, 0.39 MiB sent", "gpt.png"),
    ],
    "torchrun train_gpt.py --inner tp --no-overlap --width 64 --depth 1 --steps 3 --lr 0.03": [
        "ring, float32, no overlap, step 3: validation loss 3.[0-4]*, 0.49 MiB sent"
    ],
    # Parameters and estimates, as against 1.5 copies of the gradients.
    "torchrun train_gpt.py --shards topics --gradient-tracking --comm-dtype int8 --ddp "
    "--width 64 --depth 1 --steps 3 --lr 0.03": [
        "ring, int8, tracking, step 3: validation loss 3.[0-4]*, 0.39 MiB sent",
        "DDP, step 3: validation loss 3.[0-4]*, 1.16 MiB sent",
    ],
    "python benchmark/overhead.py --parameters 1e6 --repeats 1 --training 1": [
        *("| decent-dp | * | 1.00 |", "| the wrapper, float32 |*", "| the module |*")
    ],
    "python benchmark/overhead.py --parameters 1e6 --repeats 1": [
        *("| SGD alone | * | 1.00 |", "| the wrapper | * | ?.?? |", "| one round, views |*")
    ],
    "python benchmark/overhead.py --parameters 1e6 --small 1": [
        *("| and one message | * | 1.00 |", "| tracking | *|", "| pack | *|")
    ],
    "python benchmark/step_time.py --sizes 1 --steps 2 --warmup 1 --ratios 0 --ranks 2 "
    "--methods DDP 'the wrapper' --jitter 0.3 --slow-factor 1.5 --slow-motion 2 --csv a.csv": [
        *("| ms per step | 0 |", "| DDP |*", "| the wrapper |*")
    ],
    "python benchmark/control.py --ratios 4 --ranks 2 --part 0.002 --methods 'the wrapper'": [
        "| 4 | the wrapper | 1 | * | 1.00 | * |"
    ],
    "python benchmark/regroup.py --ranks 3 --times 2": [
        *("| 3 | new | * | * | * |", "| 3 | reconfigured | * | * | * |")
    ],
    "python benchmark/mesh_bytes.py --measured 2 --computed 2": [
        "| HSDP, float32 | 1.000 | 1.000 |",
        "| HSDP, bf16 | 0.500 | 0.500 |",
        "| gossip in pairs, float32 | 1.000 | 1.000 |",
        "| gossip in pairs, bf16 | 0.500 | 0.500 |",
        "| gossip in pairs, bf16, every 4 steps | 0.125 | 0.125 |",
    ],
    "python benchmark/schedules.py --world-size 2 --epochs 1 --seeds 0 --lrs 0.1 "
    "--rows DDP mixing_rate=lr/lr_max gossip_every=4": [
        *(f"| {row} | 0.1 |*" for row in ("DDP", "mixing_rate=lr/lr_max", "gossip_every=4"))
    ],
    "python benchmark/staleness.py --world-size 2 --epochs 1 --seeds 0 --lrs 1e-6 0.005 "
    "--shards shuffled --bases Adam --rows 'every 8 steps, 8 late' auto": [
        "| a round | mean staleness | shuffled, Adam |",
        "| every 8 steps, 8 late | 8.0 | *, lr 0.005 |",
        "| auto | * | *, lr 0.005 |",
    ],
    # Tracking sends the estimates of the gradients, too, and with Schedule-Free its iterate.
    "python benchmark/tracking.py --world-sizes 2 --topologies ring --epochs 1 --seeds 0 "
    "--lrs 0.01 --bases AdamW Schedule-Free --methods 'tracking, int8'": [
        "| AdamW | 2 | ring | tracking, int8 |*| 0.89 |",
        "| Schedule-Free | 2 | ring | tracking, int8 |*| 1.77 |",
    ],
    "python benchmark/codes.py --world-sizes 2 --seeds 0 --epochs 1 --codes 'TopKCodec(16)'": [
        "| `TopKCodec(16)` | 0.1 | * %*| * %*|"
    ],
    # A run that goes on with other numbers of ranks learns as one that does not.
    "python benchmark/resize.py --bases SGD --seeds 0 --epochs 4": [
        "| SGD | [89]*% * | [89]*% * |"
    ],
}


@pytest.mark.parametrize("command", PRINTED)
def test_an_example_prints_what_it_promises(host: Executor, command: str, tmp_path: Path) -> None:
    program, script, *options = shlex.split(command)
    run: Callable[..., str] = run_script
    if program == "torchrun":
        run = partial(run_script_on_ranks, 4)
    out = host.submit(run, EXAMPLES / script, *options, cwd=tmp_path).result()
    pictures = [path for path in tmp_path.rglob("*.png") if path.read_bytes()[:4] == b"\x89PNG"]
    found = [*out.splitlines(), *(path.name for path in pictures)]
    assert [text for text in PRINTED[command] if not fnmatch.filter(found, text)] == [], out
