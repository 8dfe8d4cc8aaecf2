"""The command line: plan a run, test links, start ranks, average models."""

from __future__ import annotations

import argparse
import math
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from decent_optim_wrapper.checkpoint.export import export_average
from decent_optim_wrapper.elastic.launcher.launcher import launch
from decent_optim_wrapper.elastic.launcher.options import add_arguments, read_arguments
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.planning import link_probe
from decent_optim_wrapper.planning.plan import Job, plan

_PROGRAM = "python -m decent_optim_wrapper"
_EXAMPLES = {
    "run": f"{_PROGRAM} run --nproc-per-node 4 train.py",
    "plan": f"{_PROGRAM} plan --parameters 124M --ranks 8 --bandwidth 1gbit --step 0.4",
    "comm": "torchrun --standalone --nproc-per-node 4 -m decent_optim_wrapper comm",
    "average": f"{_PROGRAM} average runs/mine --out model.pt",
}
_PREFIXES = {"k": 1e3, "K": 1e3, "m": 1e6, "M": 1e6, "g": 1e9, "G": 1e9}
_COUNTS = {"": 1.0, **_PREFIXES, "b": 1e9, "B": 1e9}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3}
_BITS = "bit", "Bit", "BIT", "bit/s", "bps", "b/s"
# In bytes per second.
_RATES = {f"{prefix}{unit}": size / 8 for prefix, size in _PREFIXES.items() for unit in _BITS}
_RATES |= {f"{prefix}{unit}": size for prefix, size in _PREFIXES.items() for unit in ("B/s", "Bps")}


def _number(units: Mapping[str, float], expected: str, text: str) -> float:
    """A positive number in one of these units."""
    number = text.rstrip(f"/{string.ascii_letters}")
    try:
        figure = float(number) * units[text[len(number) :]]
    except (ValueError, KeyError):
        figure = 0.0
    if not 0.0 < figure < math.inf:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: as on the command line; None takes `sys.argv`.

    Returns:
        The exit status: 0, 2 for bad arguments, or what `launch` returns.
    """
    args, unknown = _parser().parse_known_args(arguments)
    # The error shows the usage of this command, not of all commands.
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        report: str | int | None = args.run_command(args)
    except (ValueError, ModuleNotFoundError, OSError, NonFiniteError) as error:
        args.parser.error(str(error))
    if isinstance(report, str):
        print(report)
    return report if isinstance(report, int) else 0


def _plan(args: argparse.Namespace) -> str:
    return plan(Job(**{name: getattr(args, name) for name in Job._fields}))


def _average(args: argparse.Namespace) -> str:
    step, size = export_average(args.folder, args.out, args.part)
    return f"{args.out}: the average over {size} ranks of step {step}"


def _parser() -> argparse.ArgumentParser:
    keep_lines: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    examples = "\n  ".join(["examples:", *_EXAMPLES.values()])
    parser = argparse.ArgumentParser(prog=_PROGRAM, epilog=examples, **keep_lines)
    parser.add_argument("--version", action="version", version=version("decent-optim-wrapper"))
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Callable[..., object], about: str) -> argparse.ArgumentParser:
        epilog = f"example:\n  {_EXAMPLES[name]}"
        sub = commands.add_parser(name, help=about, description=about, epilog=epilog, **keep_lines)
        sub.set_defaults(run_command=command, parser=sub)
        return sub

    about = "start the ranks of this node, and start again those that die"
    add_arguments(add("run", lambda args: launch(read_arguments(args)), about))

    job = add("plan", _plan, "settings for a run, and the seconds of a step by method")
    for flag, units, expected in (
        ("--parameters", _COUNTS, "a number such as 124M or 1.3B"),
        ("--bandwidth", _RATES, "a rate such as 400mbit, 1Gbps or 125MB/s"),
        ("--step", _SECONDS, "the time of computing a step, such as 0.4 (seconds) or 400ms"),
    ):
        read = partial(_number, units, expected)
        job.add_argument(flag, type=read, required=True, metavar="N", help=expected)
    job.add_argument("--ranks", type=int, required=True, metavar="N", help="2 or more")
    job.add_argument("--optimizer", choices=("AdamW", "Muon", "SGD"), default="AdamW")
    job.add_argument("--varying", action="store_true", help="if the times of the ranks vary")

    about = "test the links between all pairs of ranks; start it with torchrun or `run`"
    comm = add("comm", lambda args: link_probe.run(args.mib, args.repeats), about)
    comm.add_argument("--mib", type=float, default=8, help="of the large message; 8 by default")
    comm.add_argument("--repeats", type=int, default=5, help="of each measurement; 5 by default")
    average = add("average", _average, "write the averaged model of a checkpoint set")
    average.add_argument("folder", type=Path, help="the folder of Checkpoints, such as runs/mine")
    average.add_argument("--out", type=Path, required=True, help="such as model.pt")
    average.add_argument("--part", default="model", help='of the saved state; "model" by default')
    return parser
