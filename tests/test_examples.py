"""The examples run and print what they promise, and the benchmarks their tables."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# Runs a command line, and returns what it prints.
Run = Callable[[str], str]


@pytest.fixture
def on_ranks(tmp_path: Path) -> Run:
    """Runs an example on four ranks."""

    def run(command: str) -> str:
        script, *options = shlex.split(command)
        return run_script_on_ranks(4, EXAMPLES / script, *options, cwd=tmp_path)

    return run


# Runs a script, whose processes do not import torch again.
FORKING = """
import multiprocessing, sys
from pathlib import Path

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork
sys.argv.pop(0)
__file__ = sys.argv[0]
sys.path.insert(0, str(Path(__file__).parent))
exec(compile(Path(__file__).read_text(), __file__, "exec"))
"""


@pytest.fixture
def in_a_process(tmp_path: Path) -> Run:
    """Runs an example as ``python`` does."""
    (tmp_path / "forking.py").write_text(FORKING)

    def run(command: str) -> str:
        script, *options = shlex.split(command)
        return run_script("forking.py", EXAMPLES / script, *options, cwd=tmp_path)

    return run


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_four_ranks_learn_the_digits_and_print_what_they_send(
    on_ranks: Run, tmp_path: Path
) -> None:
    options = "--gossip-every 1 4 --ddp --epochs 3 --lr 0.1"
    line = re.compile(r"^(.*): test accuracy (.*)%, (.*) MiB sent$", re.MULTILINE)
    runs = line.findall(on_ranks(f"train_digits.py {options}"))
    assert [run[0] for run in runs] == ["ring, gossip_every=1", "ring, gossip_every=4", "DDP"]
    assert all(float(run[1]) > 85 for run in runs)
    always, rarely, reduced = (float(run[2]) for run in runs)
    assert 0.2 * always < rarely < 0.3 * always
    # In pairs gossip sends the parameters once.
    assert reduced == pytest.approx(1.5 * always, rel=0.02)
    assert is_png(tmp_path / "runs" / "digits.png")


def test_the_statistics_that_are_logged_are_drawn(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks("integrations/log_digits.py --steps 12 --width 32")
    assert is_png(tmp_path / "runs" / "stats.png")


def survive(_: int, *arguments: Any) -> str:
    """Runs survive_digits.py as a rank of a launcher that starts none again."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return run_example(EXAMPLES / "survive_digits.py", *arguments)


def test_the_digits_are_learnt_though_ranks_are_killed(tmp_path: Path) -> None:
    options = ("--epochs", "8", "--lr", "0.04", "--pause", "0")
    out, nothing = run_processes(4, survive, tmp_path, *options, lost=(0, 2))
    # Only the first member prints: rank 0, and after its death rank 1.
    steps = re.findall(r"^step (\d+) of 184: ranks (.*)$", out, re.MULTILINE)
    members = {int(step): text for step, text in steps}
    assert list(dict.fromkeys(members.values())) == ["(1, 2, 3)", "(1, 3)"]
    assert min(members) > 55
    (accuracy,) = re.findall(r"ranks \(1, 3\) are left: averaged model (.*)%", out)
    assert float(accuracy) >= 90
    assert nothing == "rank 3 starts at step 0\n"


def gossip_in_both_ways(rank: int) -> list[list[float]]:
    """Parameters before training, after it with the library, and with the minimal example."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        minimal = importlib.import_module("minimal_gossip").MinimalGossip
    found: list[list[float]] = []
    for wrapped in (True, False):
        # Rank 0's values are in place of the others' when training begins.
        params = make_params(seed=rank, dtype=torch.float32)
        base = adamw(params)
        options: dict[str, Any] = {
            "topology": "one-peer-exp",
            "overlap": False,
            "bucket_cap_mb": TINY_CAP_MB,
        }
        gossip = DecentOptimWrapper(base, **options) if wrapped else minimal(base)
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


def test_the_minimal_example_learns(on_ranks: Run) -> None:
    out = on_ranks("minimal_gossip.py")
    assert "largest error of a weight of the averaged model: 0.0000" in out


def test_a_custom_topology_is_trained_on(on_ranks: Run) -> None:
    assert "largest error of a weight 0.0" in on_ranks("custom_topology.py")


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        # In pairs each step sends what of the model of 0.45 MiB is on this rank.
        ("--inner fsdp --forward", {"ring, float32, forward": 1.35}),
        ("--inner tp --no-overlap", {"ring, float32, no overlap": 1.55}),
        # Parameters and estimates, as against 1.5 copies of the gradients.
        (
            "--shards topics --gradient-tracking --comm-dtype int8 --ddp",
            {"ring, int8, tracking": 1.37, "DDP": 4.03},
        ),
    ],
)
def test_a_gpt_learns_and_prints_what_it_sends(
    on_ranks: Run, options: str, sent: dict[str, float], tmp_path: Path
) -> None:
    out = on_ranks(f"train_gpt.py {options} --width 64 --depth 2 --steps 6 --lr 0.03")
    line = r"^(.*), step \d+: validation loss (.*), (.*) MiB sent$"
    points = re.findall(line, out, re.MULTILINE)
    assert len(points) == 6 * len(sent)
    ends = points[5::6]
    assert {name: float(mib) for name, _, mib in ends} == pytest.approx(sent, rel=0.05)
    # Before training it is that of all 103 characters being as likely, 4.6, or above.
    assert all(float(loss) < 3.5 for _, loss, _ in ends)
    assert is_png(tmp_path / "runs" / "gpt.png")


# Lines that examples print, by the command line; "*" is any text. Behaviour only: tests time
# nothing. Where two learning rates are tried, nothing is learnt with the smaller one.
PRINTED = {
    "custom_topology.py": ["star: consensus rate*"],
    "train_digits.py --epochs 1 --non-iid": ["ring, gossip_every=1: test accuracy *, 0.0 MiB sent"],
    "benchmark/overhead.py --parameters 1e6 --repeats 1 --training 1": [
        *("| decent-dp | * | 1.00 |", "| the wrapper, int8 |*", "| the module |*")
    ],
    "benchmark/overhead.py --parameters 1e6 --small 1": ["| tracking | *|", "| pack | *|"],
    "benchmark/step_time.py --sizes 1 --steps 2 --warmup 1 --rates '' --ranks 2 "
    "--methods DDP 'PostLocalSGD 8' 'the wrapper' --jitter 0.3 --slow-factor 1.5": [
        *("| DDP |*", "| the wrapper |*", "| all-reduce / computing |*")
    ],
    "benchmark/control.py --ratios 4 --ranks 2 --part 0.002 --methods DDP 'the module, pairs'": [
        *("| 4 | DDP | 1 | * | 1.00 | * |", "| 4 | the module, pairs | 2 | * |")
    ],
    "benchmark/mesh_bytes.py --measured 2 --computed 2": [
        "| HSDP, float32 | 1.000 | 1.000 |",
        "| HSDP, bf16 | 0.500 | 0.500 |",
        "| gossip in pairs, float32 | 1.000 | 1.000 |",
        "| gossip in pairs, bf16 | 0.500 | 0.500 |",
        "| gossip in pairs, bf16, every 4 steps | 0.125 | 0.125 |",
    ],
    "benchmark/schedules.py --world-size 2 --epochs 1 --seeds 0 --lrs 0.1 "
    "--rows DDP mixing_rate=lr/lr_max 'QGSGD, gossip_every=4'": [
        *(f"| {row} | 0.1 |*" for row in ("DDP", "mixing_rate=lr/lr_max", "QGSGD, gossip_every=4"))
    ],
    "benchmark/staleness.py --world-size 2 --epochs 1 --seeds 0 --lrs 1e-6 0.005 "
    "--shards shuffled --bases Adam --rows DDP 'every 8 steps, 8 late' auto": [
        "| a round | mean staleness | shuffled, Adam |",
        "| DDP | 0.0 | *, lr 0.005 |",
        "| every 8 steps, 8 late | 8.0 | *, lr 0.005 |",
        "| auto | * | *, lr 0.005 |",
    ],
    # Tracking sends the estimates of the gradients, too, and with Schedule-Free its iterate.
    "benchmark/tracking.py --world-sizes 4 --topologies ring --epochs 1 --seeds 0 --lrs 0.01 "
    "--bases AdamW Schedule-Free --methods 'plain gossip' 'tracking, int8'": [
        "| AdamW | 4 | ring | plain gossip |*| 1.75 |",
        "| AdamW | 4 | ring | tracking, int8 |*| 0.89 |",
        "| Schedule-Free | 4 | ring | tracking, int8 |*| 1.77 |",
    ],
    "benchmark/codes.py --world-sizes 2 --seeds 0 --epochs 1 --codes 'TopKCodec(16)'": [
        "| `TopKCodec(16)` | 0.1 | * %*| * %*|"
    ],
    "benchmark/lossy_link.py --mib 0.1 --rounds 2 --connections 1 4": ["| 1 *", "| 4 *"],
    # A run that goes on with other numbers of ranks learns as one that does not.
    "benchmark/resize.py --bases SGD --seeds 0 --epochs 4": ["| SGD | [89]*% * | [89]*% * |"],
}


@pytest.mark.parametrize("command", PRINTED)
def test_an_example_prints_what_it_promises(in_a_process: Run, command: str) -> None:
    out = in_a_process(command)
    lines = out.splitlines()
    assert [text for text in PRINTED[command] if not fnmatch.filter(lines, text)] == [], out
