"""The order of imports, and what is private: a module imports from layers below it only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import decent_optim_wrapper

PACKAGE = "decent_optim_wrapper"
ROOT = Path(decent_optim_wrapper.__file__).parent
TESTS = Path(__file__).parent

# What each layer may import of the package besides itself: a folder, or a module at the top
# level of the package.
_COMM = {"topo", "errors", "warn", "forks"}
_MESH = {*_COMM, "comm", "optim"}
_WIRE = {*_MESH, "codecs", "mesh"}
_GOSSIP = {*_WIRE, "wire", "checks"} - {"mesh"}
_EXTENSIONS = {*_GOSSIP, "gossip", "mesh"}
_DEPRECATED = {*_EXTENSIONS, "extensions"}
_CONFIG = {*_DEPRECATED, "deprecated"}
_ELASTIC = {*_CONFIG, "config"}
_START = {*_ELASTIC, "elastic"}
_WRAPPER = {*_START, "start", "forward_hooks", "report", "planning"}
MAY_IMPORT: dict[str, set[str]] = {
    **{low: set() for low in (*_COMM, "codecs", "optim", "parameter_reads")},
    "checks": {"topo"},
    "log": {"warn"},
    "comm": _COMM,
    "mesh": _MESH,
    "wire": _WIRE,
    "gossip": _GOSSIP,
    "extensions": _EXTENSIONS,
    "deprecated": _DEPRECATED,
    "config": _CONFIG,
    "elastic": _ELASTIC,
    "start": _START,
    "forward_hooks": {"parameter_reads", "forks"},
    "report": {*_EXTENSIONS, "planning"},
    "utils": {"start"},
    "wrapper": _WRAPPER,
    **{high: {*_WRAPPER, "wrapper"} for high in ("ddp", "checkpoint", "data", "integrations")},
    "planning": {"topo", "comm", "start"},
    "launcher": {"comm"},
    "cli": {"checkpoint", "errors", "planning", "launcher", "topo"},
    "__main__": {"cli"},
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Those of a module."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[list[str], int]]:
    """What a module imports, anywhere in it, with the lines where it does."""
    package = (PACKAGE, *path.relative_to(root).parent.parts)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split("."), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *(node.module.split(".") if node.module else [])]
            yield from (([*base, alias.name], node.lineno) for alias in node.names)


def imported_layers(path: Path, root: Path = ROOT) -> Iterator[tuple[str, int]]:
    for name, line in imports(path, root):
        if name[0] == PACKAGE:
            yield (name[1] if len(name) > 1 else PACKAGE), line


def test_a_layer_imports_only_from_layers_below_it() -> None:
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    layers = {path: path.parts[0].removesuffix(".py") for path in paths}
    del layers[Path("__init__.py")]
    assert set(layers.values()) == set(MAY_IMPORT)
    upwards = [
        f"{path}, line {line}: {imported}"
        for path, layer in layers.items()
        for imported, line in imported_layers(ROOT / path)
        if imported not in {*MAY_IMPORT[layer], layer}
    ]
    assert not upwards


def test_topologies_need_no_process_group() -> None:
    names = [".".join(name) for path in (ROOT / "topo").glob("*.py") for name, _ in imports(path)]
    assert "torch" in names
    assert not [name for name in names if "distributed" in name]


def test_the_layers_have_an_order() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


# Up to the names, which may be in parentheses.
OWN_IMPORT = rf"^\s*(?:from|import) (?:{PACKAGE}|\.)\S*(?: import \(\s*(?:\w+,\s*)*)?"


@pytest.mark.parametrize("folder", [ROOT, TESTS], ids=["package", "tests"])
def test_nothing_private_is_imported_from_another_module_of_the_package(folder: Path) -> None:
    """Ruff sees to private attributes."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert len(re.findall(OWN_IMPORT, text, re.MULTILINE)) > 100
    assert not re.findall(rf"{OWN_IMPORT}[^)\n]*(?<!as )\b_[a-z]", text, re.MULTILINE)
