"""What the tests catch: change the package in many small ways, and count what a test notices.

    python tests/mutants.py map lines.json           # which tests run each line, in a whole run
    python tests/mutants.py run lines.json --seed 1  # draws 300 mutants, and tries each
    python tests/mutants.py run lines.json --rooms   # of the whole package; or name some rooms

The map needs pytest-cov. A mutant is one changed operator, constant, condition, result or call. It
is killed if one of the tests that run its line fails or hangs. As many of these run as take
`--seconds` together, from as many files as possible. If none of them notices, or if no thread of
the tests runs the line, those run that start processes for the room.

A hang is printed, too: on a busy machine a test that only takes long would count as one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "decent_optim_wrapper"
ROOMS = ("gossip", "comm", "wire", "codecs", "topo", "elastic", "checkpoint", "extensions")
# The modules that are in no folder.
TOP = "top"
EVERY_ROOM = (*sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")), TOP)
# Tests that run a room's lines in processes, which the map does not see.
BY_PROCESSES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("tests/test_checkpoint.py", "tests/test_mesh_checkpoint.py"),
    "elastic": ("tests/test_recovery.py", "tests/test_losses.py", "tests/test_store.py"),
    "comm": ("tests/test_processes.py", "tests/test_faults.py", "tests/test_recovery.py"),
    "gossip": (
        *("tests/test_processes.py", "tests/test_recovery.py", "tests/test_mesh.py"),
        *("tests/test_mesh_checkpoint.py", "tests/test_mesh_faults.py"),
    ),
    "integrations": ("tests/test_frameworks.py",),
    "launcher": ("tests/test_launcher.py", "tests/test_launcher_store.py"),
    "mesh": ("tests/test_mesh.py", "tests/test_mesh_faults.py"),
    "start": ("tests/test_processes.py", "tests/test_mesh.py"),
}
assert all((ROOT / test).is_file() for tests in BY_PROCESSES.values() for test in tests)
# Each changes into the other.
COMPARISONS: list[tuple[type[ast.cmpop], type[ast.cmpop]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
]
OTHER_COMPARISON = dict([*COMPARISONS, *((new, old) for old, new in COMPARISONS)])
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add},
    **{ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}


class Mutant(NamedTuple):
    """One change of the package.

    Args:
        path: the file, relative to the package.
        line: its line.
        what: the change, in words.
        source: the changed file.
    """

    path: str
    line: int
    what: str
    source: str

    @property
    def room(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else TOP


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The changed forms of a node, each with what has changed."""
    new: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER_COMPARISON:
            new.ops = [OTHER_COMPARISON[type(op)]()]
            yield "another comparison", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and for or", new
        case ast.UnaryOp(op=ast.Not()):
            yield "no not", new.operand
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHER_OPERATOR:
            new.op = OTHER_OPERATOR[type(op)]()
            yield "another operator", new
        case ast.Constant(value=bool()):
            yield "the other constant", ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield "another number", ast.Constant(new.value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "the other branch", new
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            new.value = ast.Constant(None)
            yield "no result", new
        case ast.Expr(value=ast.Call()):
            yield "no call", ast.Pass()


def is_text(node: ast.AST) -> bool:
    """Whether a node only says something: types, logs, errors."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return True
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "warn("))


def sites(tree: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Every place of a node below this one: a list or the fields of a node, and the key there."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        container: Any = value if isinstance(value, list) else vars(tree)
        for key in range(len(value)) if container is value else [field]:
            if isinstance(container[key], ast.AST) and not is_text(container[key]):
                yield container, key
                yield from sites(container[key])


def changed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Change a tree in place in one way after another: yields the line, and what has changed."""
    for container, key in list(sites(tree)):
        node = container[key]
        for what, new in changes(node):
            container[key] = ast.fix_missing_locations(ast.copy_location(new, node))
            yield node.lineno, what
        container[key] = node


def draw(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """So many mutants, the same number of each room."""
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    for number, room in enumerate(rooms):
        paths = PACKAGE.glob("*.py") if room == TOP else (PACKAGE / room).rglob("*.py")
        trees = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(paths)]
        total = sum(1 for _, tree in trees for _ in changed(tree))
        share = count * (number + 1) // len(rooms) - count * number // len(rooms)
        wanted, place = set(generator.sample(range(total), min(share, total))), 0
        for path, tree in trees:
            for line, what in changed(tree):
                if place in wanted:
                    name = str(path.relative_to(PACKAGE))
                    drawn.append(Mutant(path=name, line=line, what=what, source=ast.unparse(tree)))
                place += 1
    return drawn


def make_map(target: Path, tests: Sequence[str]) -> None:
    """Run all tests, and note which of them run each line, for how long, and which are slow."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "data", Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--cov={PACKAGE.name}", "--cov-context=test"]
        command += ["--cov-report=", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(data)})
        known = {"lines": dict(_lines(data)), "seconds": dict(_seconds(report))}
    target.write_text(json.dumps({**known, "slow": collected("-m", "slow", *tests)}))


def collected(*options: str) -> list[str]:
    """The tests that there are."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *options]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


def _lines(path: Path) -> Iterator[tuple[str, dict[int, list[str]]]]:
    # Not among the packages of the tests, and by name so that mypy does without it.
    data = importlib.import_module("coverage").CoverageData(str(path))
    data.read()
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        yield (
            str(Path(file).relative_to(PACKAGE)),
            {
                line: [each.removesuffix("|run") for each in of_line if each.endswith("|run")]
                for line, of_line in contexts.items()
            },
        )


def _seconds(report: Path) -> Iterator[tuple[str, float]]:
    """How long each test has taken that has passed."""
    from xml.etree import ElementTree

    for case in ElementTree.parse(report).iter("testcase"):
        if not len(case):
            module = case.attrib["classname"].replace(".", "/") + ".py"
            yield f"{module}::{case.attrib['name']}", float(case.attrib["time"])


class Verdict(Enum):
    """What the tests say of a mutant."""

    KILLED = "killed"
    HANGS = "hangs"
    SURVIVES = "survives"
    NO_TEST = "no test"


class Runner:
    """Runs tests against mutants, each in a process that has imported torch already.

    Args:
        known: what `make_map` has written.
        seconds: how long the tests of a mutant may take that is not noticed.
    """

    def __init__(self, known: dict[str, Any], seconds: float) -> None:
        self._lines, self._durations = known["lines"], known["seconds"]
        self._slow = set(known["slow"])
        self._seconds = seconds
        self._collected = collected()
        # Of those that are no longer there, or failed without a mutant, each would seem to notice.
        self._passing = [each for each in self._collected if each in self._durations]

    def tests_of(self, mutant: Mutant) -> Iterator[list[str]]:
        """Some tests that run its line, and some that may run it in processes."""
        lines = {int(line): set(found) for line, found in self._lines.get(mutant.path, {}).items()}
        found = lines.get(mutant.line, set())
        if mutant.line in lines and not found:
            # It runs at the import.
            found = set().union(*lines.values())
        near = [lines.get(mutant.line + away, set()) for away in range(-3, 9)]
        yield self._choose([each for each in self._passing if each in found], near)
        files = BY_PROCESSES.get(mutant.room, ())
        yield self._choose([each for each in self._collected if each.startswith(files)])

    def _choose(self, found: Sequence[str], near: Sequence[set[str]] = ()) -> list[str]:
        """As many tests as there is time for, as different ones as possible first.

        The cases of one function, and the functions of one file, mostly notice the same. Two tests
        of each line near to the mutant come before all others, so that both branches are taken.
        """
        cases: Counter[str] = Counter()
        functions: Counter[str] = Counter()
        order: dict[str, tuple[int, int]] = {}
        for test in sorted(found, key=self._seconds_of):
            function, file = test.partition("[")[0], test.partition("::")[0]
            functions[file] += not cases[function]
            cases[function] += 1
            order[test] = (cases[function] + (test in self._slow), functions[file])
        spread = sorted(order, key=order.__getitem__)
        first = [test for line in near for test in [each for each in spread if each in line][:2]]
        chosen: list[str] = []
        left = self._seconds
        for test in dict.fromkeys([*first, *spread]):
            if self._seconds_of(test) <= left or not chosen:
                chosen.append(test)
                left -= self._seconds_of(test)
        return chosen

    def _seconds_of(self, test: str) -> float:
        return float(self._durations.get(test, 1.0))

    def verdict(self, mutant: Mutant) -> Verdict:
        """Whether a test notices it."""
        verdict = Verdict.NO_TEST
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name)
            (Path(folder) / PACKAGE.name / mutant.path).write_text(mutant.source)
            for tests in self.tests_of(mutant):
                if tests and verdict in (Verdict.NO_TEST, Verdict.SURVIVES):
                    verdict = self._run(tests, Path(folder))
        return verdict

    def _run(self, tests: list[str], folder: Path) -> Verdict:
        process = get_context("fork").Process(target=_run_tests, args=(tests, folder))
        process.start()
        process.join(10 * self._seconds + 120)
        hangs = process.exitcode is None
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        if hangs:
            return Verdict.HANGS
        return Verdict.KILLED if process.exitcode else Verdict.SURVIVES


_RUNNER: list[Runner] = []


def _begin(runner: Runner) -> None:
    """In a process that runs mutants: import what all of them need."""
    import torch

    for module in ("torch._dynamo", "torch.distributed.checkpoint", "pytest", "_pytest.debugging"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    _RUNNER.append(runner)


def _verdict(mutant: Mutant) -> Verdict:
    return _RUNNER[0].verdict(mutant)


def _run_tests(tests: list[str], folder: Path) -> NoReturn:
    """In a process of its own: end it with whether the tests fail with the package in a folder."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    sys.path[:0] = [str(folder)]
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    import pytest

    os.chdir(ROOT)
    own = ["-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings", "--tb=no"]
    # Not by a return, which would wait for threads.
    os._exit(int(pytest.main([*own, *tests])))


def run(args: argparse.Namespace) -> None:
    """Print how many mutants of each room are killed, and those that survive."""
    runner = Runner(json.loads(args.map.read_text()), args.seconds)
    rooms = EVERY_ROOM if args.rooms == [] else args.rooms
    mutants = draw(args.mutants, args.seed, rooms)
    with ProcessPoolExecutor(args.jobs, get_context("fork"), _begin, (runner,)) as pool:
        outcomes = []
        for mutant, verdict in zip(mutants, pool.map(_verdict, mutants), strict=True):
            outcomes.append((mutant, verdict))
            if verdict is not Verdict.KILLED:
                print(f"{mutant.path}:{mutant.line} {mutant.what}: {verdict.value}", flush=True)
    print("\n| room | mutants | " + " | ".join(each.value for each in Verdict) + " |")
    print("|---|---|" + "---|" * len(Verdict))
    for room in (*rooms, "all"):
        verdicts = [verdict for mutant, verdict in outcomes if room in (mutant.room, "all")]
        counts = [len(verdicts), *map(verdicts.count, Verdict)]
        print(f"| {room} | " + " | ".join(map(str, counts)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("tests", nargs="*", help="all by default")
    mapping.set_defaults(command=lambda args: make_map(args.map, args.tests))
    running = commands.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("--rooms", nargs="*", choices=EVERY_ROOM, default=ROOMS, metavar="ROOM")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--mutants", type=int, default=300)
    running.add_argument("--seconds", type=float, default=40, help="of tests for each mutant")
    running.add_argument("--jobs", type=int, default=2)
    running.set_defaults(command=run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
