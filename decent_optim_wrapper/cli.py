"""The command line: compare topologies, plan a run, test links, start ranks, average models.

python -m decent_optim_wrapper run --nproc-per-node 4 train.py
python -m decent_optim_wrapper topologies --world-size 12
python -m decent_optim_wrapper plan --parameters 124M --ranks 8 --bandwidth 1gbit --step 0.4
torchrun --nproc-per-node 4 -m decent_optim_wrapper comm
python -m decent_optim_wrapper average runs/mine --out model.pt
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from decent_optim_wrapper.checkpoint.export import export_average
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.launcher import add_arguments, launch, read_arguments
from decent_optim_wrapper.planning import link_probe, tables
from decent_optim_wrapper.planning.plan import Job, plan


def count(text: str) -> float:
    """A number such as 124e6, 124M or 1.3B."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9}.get(text[-1:].lower())
    return float(text[:-1]) * factor if factor else float(text)


def bandwidth(text: str) -> float:
    """Bytes per second of a rate such as 400mbit or 1gbit."""
    number, unit = text[:-4], text[-4:].lower()
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}.get(unit, math.nan) / 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: as on the command line; None takes `sys.argv`.

    Returns:
        The exit status: 0, 2 for bad arguments, or what `launch` returns.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        report: str | int | None = args.run_command(args)
    except (ValueError, ModuleNotFoundError, OSError, NonFiniteError) as error:
        parser.error(str(error))
    if isinstance(report, int):
        return report
    if report is not None:
        print(report)
    return 0


def _topologies(args: argparse.Namespace) -> str:
    return tables.topologies(args.world_size, args.local_world_size, args.topology)


def _plan(args: argparse.Namespace) -> str:
    return plan(Job(args.parameters, args.ranks, args.bandwidth, args.step))


def _comm(args: argparse.Namespace) -> str | None:
    return link_probe.run(args.mib, args.repeats)


def _average(args: argparse.Namespace) -> str:
    step, size = export_average(args.folder, args.out, args.part)
    return f"{args.out}: the average over {size} ranks of step {step}"


def _parser() -> argparse.ArgumentParser:
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="decent_optim_wrapper", description=description)
    commands = parser.add_subparsers(required=True)

    def add(name: str, command: Callable[..., object], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run_command=command)
        return sub

    about = "start the ranks of this node, and start again those that die"
    add_arguments(add("run", lambda args: launch(read_arguments(args)), about))

    table = add("topologies", _topologies, "the topologies that fit, and why others do not")
    table.add_argument("--world-size", type=int, default=8, help="8 by default")
    table.add_argument("--local-world-size", type=int, default=1)
    table.add_argument("--topology", nargs="+", metavar="NAME", help="only these")

    job = add("plan", _plan, "settings for a run, and the seconds of a step by method")
    job.add_argument("--parameters", type=count, required=True, help="such as 124M")
    job.add_argument("--ranks", type=int, required=True)
    job.add_argument("--bandwidth", type=bandwidth, required=True, help="such as 400mbit")
    job.add_argument("--step", type=float, required=True, help="seconds of computing of a step")

    comm = add("comm", _comm, "test the links between all pairs of ranks; start it with torchrun")
    comm.add_argument("--mib", type=float, default=8, help="size of the large message")
    comm.add_argument("--repeats", type=int, default=5)
    average = add("average", _average, "write the averaged model of a checkpoint set")
    average.add_argument("folder", type=Path, help="the folder of Checkpoints, such as runs/mine")
    average.add_argument("--out", type=Path, required=True, help="such as model.pt")
    average.add_argument("--part", default="model", help='of the saved state; "model" by default')
    return parser
