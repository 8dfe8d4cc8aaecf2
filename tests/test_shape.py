"""How large and how entangled the code may become, and which layer may import which."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import fill
from ranks import run_threads
from torch import nn

import decent_optim_wrapper
from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.ddp import DecentralizedDataParallel

PACKAGE = "decent_optim_wrapper"
ROOT = Path(decent_optim_wrapper.__file__).parent
# Properties do not count as methods: to those who use them they are attributes.
MOST_METHODS, MOST_REWRITTEN = 25, 12
# Code lines of the whole package. It only goes down: a feature is paid for with a deletion.
MOST_LINES = 11_860
# Each layer of the measured model fills one bucket.
BUCKET_MB = 80 / 2**20
# Modules of the package that its import loads, of more than 140.
MOST_LOADED = 85
# What the core must not know by name: these come in through its seams.
FEATURES = {
    *("tracking", "outer", "int8", "quantised", "quantized"),
    *("elastic", "mesh", "fsdp", "auto", "identical"),
}
# Objects of torch and of frameworks, which are changed by assignment.
FOREIGN_ATTRIBUTES = {
    *("grad", "data", "training", "momentum", "param_groups", "state", "defaults", "__class__"),
    *("_opt_called", "found_inf", "grad_scale", "_timeout", "lazy_init", "reduceOp"),
    *("prepare_model", "prepare_optimizer", "save_state", "models", "is_background", "atexit"),
    *("prepare_scheduler", "optimizers"),
    *("average_tokens_across_devices", "free_memory"),
    # The public property of the wrapper, and what Python's `inspect` reads of a function.
    *("mixing_rate", "__signature__"),
}
# What each layer may import of the package besides itself: a folder, or a module at the top
# level of the package; of `elastic/`, each folder is a layer.
_COMM = {"topo", "errors", "warn", "forks"}
_MESH = {*_COMM, "comm", "optim"}
_WIRE = {*_MESH, "codecs", "mesh"}
_GOSSIP = {*_WIRE, "wire", "checks"} - {"mesh"}
_EXTENSIONS = {*_GOSSIP, "gossip", "mesh"}
_CONFIG = {*_GOSSIP, "gossip"}
_START = {*_CONFIG, "config", "extensions", "mesh"}
_WRAPPER = {*_START, "extensions", "mesh", "start", "forward_hooks", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    **{low: set() for low in (*_COMM, "codecs", "optim")},
    "checks": {"topo", "optim"},
    "log": {"warn"},
    "comm": _COMM,
    "mesh": _MESH,
    "wire": _WIRE,
    "gossip": _GOSSIP,
    "extensions": _EXTENSIONS,
    "config": _CONFIG,
    "start": _START,
    "forward_hooks": {"forks"},
    "report": _EXTENSIONS,
    "utils": {"start"},
    "wrapper": _WRAPPER,
    **{high: {*_WRAPPER, "wrapper"} for high in ("ddp", "checkpoint")},
    "integrations": {*_WRAPPER, "wrapper", "checkpoint"},
    "planning": {"topo", "comm", "start", "report", "wire"},
    # Ranks that come and go: the core does not know of them.
    "elastic": set(),
    "elastic.stores": {"comm", "errors", "start"},
    "elastic.membership": {*_START, "start", "elastic.stores"},
    "elastic.launcher": {"checks", "comm", "errors", "elastic.membership", "elastic.stores"},
    "elastic.data": {*_WRAPPER, "wrapper"},
    "data": {"elastic.data"},
    "cli": {"checkpoint", "errors", "planning", "elastic.launcher", "topo"},
    "__main__": {"cli"},
}
# What takes part in communication.
SENDS = {
    *("send", "isend", "receive", "recv", "irecv", "exchange", "gather", "all_gather"),
    *("all_reduce", "broadcast", "barrier", "connect"),
}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def code_lines(source: str) -> int:
    """Lines that are neither empty nor comments nor docstrings."""
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            is_doc = begins and token.type == tokenize.STRING
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if token.string.strip() and not is_doc:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_code_lines_leave_out_text() -> None:
    source = (
        '"""Text."""\n\n# A comment.\ndef one():\n    """Text,\n\n    and more."""\n    return 1\n'
    )
    assert code_lines(source) == 2


def test_the_package_stays_below_its_ceiling() -> None:
    lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py"))
    assert 0 < lines <= MOST_LINES


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package."""
    paths = ROOT.rglob("*.py")
    return {str(p.relative_to(ROOT)): parsed(p.read_text(encoding="utf-8")) for p in paths}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """What a module imports, defines and names."""
    for node in ast.walk(tree):
        fields = ("id", "attr", "arg", "name", "asname", "module")
        found = (getattr(node, field, None) for field in fields)
        yield from (name for name in found if isinstance(name, str))


def test_the_core_names_no_feature() -> None:
    core = {path: tree for path, tree in trees().items() if path.startswith("gossip/")}
    names = {(path, name) for path, tree in core.items() for name in identifiers(tree)}
    assert ("gossip/step.py", "Step") in names
    # As words of the name: `autograd` is not "auto".
    words = {(path, re.sub(r"([A-Z])", r"_\1", name).lower()) for path, name in names}
    assert not [each for each in words if FEATURES & set(re.findall(r"[a-z0-9]+", each[1]))]


def is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """To those who use it an attribute, and no method."""
    names = [ast.unparse(each) for each in method.decorator_list]
    return any(name.endswith(("property", ".setter")) for name in names)


def assigned(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """The attributes assigned somewhere below a node: of what, the name, and the line."""
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=of, attr=name, ctx=ast.Store(), lineno=line):
                yield ast.unparse(of), name, line


def called(node: ast.AST) -> set[str]:
    """The last parts of the names that are called somewhere below a node."""
    functions = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {getattr(each, "attr", getattr(each, "id", "")) for each in functions}


def test_no_class_does_everything_changes_much_or_sends_in_its_constructor() -> None:
    nodes = [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
    classes = [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]
    assert classes
    for path, kind in classes:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        methods = [each for each in kind.body if isinstance(each, functions)]
        rewritten = set()
        for method in methods:
            if method.name in ("__init__", "__post_init__"):
                assert not called(method) & SENDS, (path, kind.name)
            else:
                rewritten |= {name for of, name, _ in assigned(method) if of == "self"}
        assert len(rewritten) <= MOST_REWRITTEN, (path, kind.name, rewritten)
        assert sum(not is_property(each) for each in methods) <= MOST_METHODS, (path, kind.name)


def test_no_object_assigns_an_attribute_of_another() -> None:
    assert not [
        f"{path}, line {line}: {of}.{name}"
        for path, tree in trees().items()
        for of, name, line in assigned(tree)
        if of not in ("self", "cls") and name not in FOREIGN_ATTRIBUTES
    ]


def test_the_wrapper_has_few_options() -> None:
    own = {"optimizer", "rank", "world_size", "local_world_size", "topology", "bucket_cap_mb"}
    options = set(inspect.signature(DecentOptimWrapper).parameters)
    assert own < options
    assert len(options - own - {"extensions"}) <= 14


def calls_of(step: Callable[[], object]) -> list[tuple[str, str]]:
    """The file and the function of each call in the package that a step makes."""
    calls: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            calls.append((str(path.relative_to(ROOT)), frame.f_code.co_name))

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def training(kind: str, model: nn.Module, group: dist.ProcessGroup) -> Callable[[], object]:
    """What a user calls for one batch: the forward pass, the backward pass, and the step."""
    batch = torch.ones(1, 4)
    make_base = partial(torch.optim.SGD, lr=0.1)
    sent: Any = {"comm_dtype": torch.float32 if "float32" in kind else None}
    if "module" in kind:
        trained = DecentralizedDataParallel(
            model, make_base, bucket_size_in_mb=BUCKET_MB, process_group=group, **sent
        )
        assert len(trained.optimizer.buckets) == 2
        return lambda: trained(batch).sum().backward()
    optimizer = DecentOptimWrapper(
        make_base(model.parameters()),
        topology="ring",
        bucket_cap_mb=BUCKET_MB,
        overlap=False if kind == "in the step" else None,
        process_group=group,
        model=model if "model" in kind else None,
        **sent,
    )
    assert len(optimizer.buckets) == 2

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("kind", "most_calls", "most_files"),
    [
        ("delayed", 155, 12),
        ("in the step", 150, 12),
        ("model, float32", 219, 15),
        ("model", 419, 23),
        ("module, float32", 313, 24),
        ("module", 493, 32),
    ],
)
def test_a_step_of_pairs_makes_few_calls(kind: str, most_calls: int, most_files: int) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[str, str]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        step = training(kind, model, group)
        # The first steps make the buffers.
        for _ in range(4):
            step()
        return calls_of(step)

    for calls in run_threads(2, main):
        files = {file for file, _ in calls}
        assert "gossip/step.py" in files
        assert len(calls) <= most_calls, len(calls)
        assert len(files) <= most_files, files
        # The header and two buckets, each sent and received: no message says which are finite. What
        # is coded is sent by another thread.
        sent = [name for file, name in calls if file == "comm/transport.py"]
        messages = 2 if kind in ("model", "module") else 6
        assert 2 * sent.count("exchange") + sent.count("send") + sent.count("receive") == messages


def imports(path: str, tree: ast.AST) -> Iterator[tuple[list[str], int]]:
    """What a module imports, anywhere in it, with the lines where it does."""
    package = (PACKAGE, *Path(path).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split("."), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *(node.module.split(".") if node.module else [])]
            yield from (([*base, alias.name], node.lineno) for alias in node.names)


def layer_of(module: Sequence[str]) -> str:
    """The layer of a module, by the parts of its name below the package."""
    name = ".".join(module[:2])
    return name if name in MAY_IMPORT else module[0]


def test_a_layer_imports_only_from_layers_below_it() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()
    layers = {path: layer_of(path.removesuffix(".py").split("/")) for path in trees()}
    del layers["__init__.py"]
    assert set(layers.values()) == set(MAY_IMPORT)
    upwards = [
        f"{path}, line {line}: {'.'.join(name)}"
        for path, layer in layers.items()
        for name, line in imports(path, trees()[path])
        if name[0] == PACKAGE and layer_of([*name, PACKAGE][1:]) not in {*MAY_IMPORT[layer], layer}
    ]
    assert not upwards


ON_DEMAND = f"""
import pickle, pydoc, sys
import {PACKAGE}
print(*sys.modules)
names = {PACKAGE}.__all__
assert "EtcdStore" in names and set(names) <= set(dir({PACKAGE}))
everything = {{}}
exec("from {PACKAGE} import *", everything)
for name in names:
    assert everything[name] is getattr({PACKAGE}, name)
    assert pickle.loads(pickle.dumps(everything[name])) == everything[name]
assert {PACKAGE}.data.ElasticSampler
assert "class Elastic(" in pydoc.render_doc({PACKAGE}, renderer=pydoc.plaintext)
assert not hasattr({PACKAGE}, "elastik")
"""


def test_the_import_loads_what_every_run_needs_and_other_names_are_loaded_on_demand() -> None:
    command = [sys.executable, "-c", ON_DEMAND]
    loaded = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    own = [each.split(".") for each in loaded if each.split(".")[0] == PACKAGE]
    assert [PACKAGE, "gossip", "step"] in own
    rooms = {each[1] for each in own if len(each) > 1}
    assert not rooms & {"elastic", "data", "checkpoint", "planning", "integrations", "deprecated"}
    assert len(own) <= MOST_LOADED


def test_topologies_need_no_process_group() -> None:
    topo = {path: tree for path, tree in trees().items() if path.startswith("topo/")}
    names = [".".join(name) for path, tree in topo.items() for name, _ in imports(path, tree)]
    assert "torch" in names
    assert not [name for name in names if "distributed" in name]


# Up to the names, which may be in parentheses.
OWN_IMPORT = rf"^\s*(?:from|import) (?:{PACKAGE}|\.)\S*(?: import \(\s*(?:\w+,\s*)*)?"


@pytest.mark.parametrize("folder", [ROOT, Path(__file__).parent], ids=["package", "tests"])
def test_nothing_private_is_imported_from_another_module_of_the_package(folder: Path) -> None:
    """Ruff sees to private attributes."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert len(re.findall(OWN_IMPORT, text, re.MULTILINE)) > 100
    assert not re.findall(rf"{OWN_IMPORT}[^)\n]*(?<!as )\b_[a-z]", text, re.MULTILINE)
