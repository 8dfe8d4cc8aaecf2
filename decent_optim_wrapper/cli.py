"""The command line: plan a run, measure the links, start the ranks, average saved models.

python -m decent_optim_wrapper run --nproc-per-node 4 train.py
python -m decent_optim_wrapper topologies --world-size 12
python -m decent_optim_wrapper show greedy --world-size 7 -o greedy.png
python -m decent_optim_wrapper simulate --world-size 8 64 --parameters 25e6
python -m decent_optim_wrapper simulate --schedule gossip_every=4,staleness=4 gossip_every=auto
torchrun --nproc-per-node 4 -m decent_optim_wrapper comm
torchrun --nproc-per-node 8 -m decent_optim_wrapper comm --mesh data=2,pipe=2,tensor=2
python -m decent_optim_wrapper average runs/mine --out model.pt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.launcher import add_arguments, launch, read_arguments
from decent_optim_wrapper.planning import tables
from decent_optim_wrapper.topo import TopologyFactory


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


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
        report: tables.Report | int | None = args.run_command(args)
    except (ValueError, ModuleNotFoundError, OSError, NonFiniteError) as error:
        parser.error(str(error))
    if isinstance(report, int):
        return report
    if report is not None:
        print(json.dumps(report.data, indent=1, allow_nan=False) if args.json else report.text)
    return 0


def _topologies(args: argparse.Namespace) -> tables.Report:
    return tables.topologies(args.world_size, args.local_world_size, args.topology)


def _show(args: argparse.Namespace) -> tables.Report:
    topology = TopologyFactory.create(args.name, args.world_size, args.local_world_size)
    if args.output is not None:
        from decent_optim_wrapper.planning import plots

        plots.phases(topology, args.name, args.output)
    return tables.phases(topology, args.name)


def _simulate(args: argparse.Namespace) -> tables.Report:
    cluster = {
        "compute_time": args.compute_time,
        "jitter": args.jitter,
        "bandwidth": args.bandwidth,
        "latency": args.latency,
        "parameter_bytes": args.parameters * args.bytes_per_parameter,
        "steps": args.steps,
        "seed": args.seed,
        "slow_share": args.slow_share,
        "slow_factor": args.slow_factor,
        "bucket_cap_mb": args.bucket_cap_mb,
    }
    return tables.simulations(
        args.world_size, args.local_world_size, cluster, args.topology, args.schedule
    )


def _schedule(text: str) -> dict[str, int | str]:
    """Read options of a schedule, such as ``gossip_every=4,staleness=4``."""
    options: dict[str, int | str] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in ("gossip_every", "staleness", "max_staleness") or name in options:
            raise argparse.ArgumentTypeError(
                f"expected gossip_every, staleness and max_staleness, each at most once, "
                f"got {text!r}"
            )
        if not value.isdecimal() and item != "gossip_every=auto":
            raise argparse.ArgumentTypeError(
                f"expected numbers of steps, or gossip_every=auto, got {item!r}"
            )
        options[name] = int(value) if value.isdecimal() else value
    return options


def _comm(args: argparse.Namespace) -> tables.Report | None:
    from decent_optim_wrapper.planning import link_probe

    return link_probe.run(args.mib, args.repeats, args.mesh)


def _average(args: argparse.Namespace) -> tables.Report:
    from decent_optim_wrapper.checkpoint.export import export_average

    done = export_average(args.folder, args.out, args.part)
    text = f"{args.out}: the average over {done.world_size} ranks of step {done.step}"
    return tables.Report(text, {"file": str(args.out), **done._asdict()})


def _run(args: argparse.Namespace) -> int:
    return launch(read_arguments(args))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="decent_optim_wrapper", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, parser_class=_Parser)

    def add(name: str, command: Callable[..., object], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
        sub.set_defaults(run_command=command)
        return sub

    about = "start the ranks of this node, and start again those that die"
    start = commands.add_parser("run", help=about, description=about)
    start.set_defaults(run_command=_run)
    add_arguments(start)

    table = add("topologies", _topologies, "the topologies that fit, and why others do not")
    table.add_argument("--world-size", type=int, default=8, help="8 by default")
    table.add_argument("--local-world-size", type=int, default=1)
    table.add_argument("--topology", nargs="+", metavar="NAME", help="only these")

    show = add("show", _show, "draw the phases of a topology")
    show.add_argument("name")
    show.add_argument("--world-size", type=int, required=True)
    show.add_argument("--local-world-size", type=int, default=1)
    show.add_argument("-o", "--output", type=Path, help="a picture, such as phases.png")

    simulate = add("simulate", _simulate, "step times, and the speed-up over all-reduce (DDP)")
    simulate.add_argument("--world-size", type=int, nargs="+", default=[8])
    simulate.add_argument("--local-world-size", type=int, default=1)
    simulate.add_argument("--topology", nargs="+", metavar="NAME", help="only these")
    simulate.add_argument(
        "--schedule",
        type=_schedule,
        nargs="+",
        default=[{"gossip_every": 1}],
        metavar="OPTION=VALUE,...",
        help="gossip_every=4,staleness=4 or gossip_every=auto,max_staleness=8; a row for each",
    )
    simulate.add_argument("--compute-time", type=float, default=0.3, help="seconds per step")
    simulate.add_argument("--jitter", type=float, default=0.03, help="standard deviation, seconds")
    simulate.add_argument("--slow-share", type=float, default=0, help="share of slow ranks")
    simulate.add_argument(
        "--slow-factor", type=float, default=3, help="how many times as long they compute"
    )
    simulate.add_argument("--bandwidth", type=float, default=125e6, help="bytes per second")
    simulate.add_argument("--latency", type=float, default=1e-4, help="seconds per message")
    simulate.add_argument("--parameters", type=float, default=25e6, help="number of parameters")
    simulate.add_argument("--bytes-per-parameter", type=float, default=4)
    simulate.add_argument(
        "--bucket-cap-mb", type=float, default=25, help="buckets of the all-reduce, in MiB"
    )
    simulate.add_argument("--steps", type=int, default=500)
    simulate.add_argument("--seed", type=int, default=0)

    comm = add("comm", _comm, "measure the links between the ranks; start it with torchrun")
    comm.add_argument("--mib", type=float, default=8, help="size of the large message")
    comm.add_argument("--repeats", type=int, default=5)
    comm.add_argument(
        "--mesh", metavar="NAME=SIZE,...", help="each dimension of this mesh, outermost first"
    )

    average = add("average", _average, "write the averaged model of a checkpoint set")
    average.add_argument("folder", type=Path, help="that of Checkpoints, such as runs/mine")
    average.add_argument("--out", type=Path, required=True, help="model.pt or model.safetensors")
    average.add_argument("--part", default="model", help='of the saved state; "model" by default')
    return parser
