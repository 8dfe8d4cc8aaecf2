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
_WRAPPER = {*_START, "start", "forward_hooks", "report"}
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
    "report": _EXTENSIONS,
    "utils": {"start"},
    "wrapper": _WRAPPER,
    **{high: {*_WRAPPER, "wrapper"} for high in ("ddp", "checkpoint", "data", "integrations")},
    "planning": {"topo", "comm"},
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


# Private names of others that are used, because there is no public way.
OTHERS_PRIVATE = {
    # Python's
    *("_asdict", "_fields", "_replace", "_exit", "_getframe"),
    # torch's process groups and stores
    *("_C", "_distributed_c10d", "_get_backend", "_get_process_group_store", "_register_backend"),
    *("_devices", "_end_coalescing", "_start_coalescing", "_Options"),
    # what its compiler has made, and a tensor that is made of two, for tests
    *("_inductor", "_internal"),
    *("_set_default_backend", "_set_default_timeout", "_timeout", "_world"),
    # torch's optimizers and their hooks
    *("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks", "_opt_called"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_step_post_hooks", "_forward_pre_hooks"),
    *("_optimizer_step_pre_hooks", "_step_supports_amp_scaling", "_wrapped_by_lr_sched"),
    # torch's modules and tensors
    *("_autograd", "_profiler_enabled", "_BatchNorm", "_buffers", "_checkpoint", "_version"),
    *("_execution_engine", "_find_tensors", "_python_dispatch"),
    # torch without a GPU
    *("_accelerator_graph_capture_health_check", "_local_scalar_dense", "_subclasses"),
    *("_to_copy", "_pytree"),
    # decent-dp's
    *("_get_topo_edges", "_param_buckets"),
}
OF_THIS_OBJECT = {"self", "cls", "super()"}
BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


def names_of_others(node: ast.AST) -> list[str]:
    """The names with which a node reaches into another object or module."""
    match node:
        case ast.Import(names=names):
            return [part for alias in names for part in alias.name.split(".")]
        case ast.ImportFrom(module=module, names=names):
            return [*(module or "").split("."), *(alias.name for alias in names)]
        case ast.Attribute(value=of, attr=name) if name.startswith("_"):
            return [] if ast.unparse(of) in OF_THIS_OBJECT else [name]
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[of, *others]):
            if called in BY_NAME and ast.unparse(of) not in OF_THIS_OBJECT:
                return [str(each.value) for each in others if isinstance(each, ast.Constant)]
    return []


def private_uses(path: Path) -> Iterator[str]:
    """Where a module uses a private name of another object or module."""
    for node in nodes(path):
        for name in names_of_others(node):
            private = re.match("_[A-Za-z]", name)
            if private and name not in OTHERS_PRIVATE and not name.startswith("_foreach_"):
                yield f"line {getattr(node, 'lineno', 0)}: {name}"


@pytest.mark.parametrize("folder", [ROOT, TESTS], ids=["package", "tests"])
def test_nothing_reaches_for_the_private_names_of_others(folder: Path) -> None:
    found = sorted(folder.rglob("*.py"))
    assert found
    assert not [
        f"{path.relative_to(folder)}, {use}" for path in found for use in private_uses(path)
    ]


def test_every_way_to_import_and_to_reach_for_a_private_name_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "topo" / "made_up.py"
    path.parent.mkdir()
    path.write_text(
        "import torch._dynamo, decent_optim_wrapper.topo._base as base\n"
        "from decent_optim_wrapper import wrapper, _Own\n"
        "from decent_optim_wrapper.ddp import shown\n"
        "class A:\n"
        "    def f(self, other):\n"
        "        from ..planning.tables import columns\n"
        "        from .. import errors\n"
        "        from ._here import shown\n"
        "        super()._inherited(self._own, self.__class__, other.shown)\n"
        "        torch._foreach_add_(other.public._theirs, self.part._theirs)\n"
        "patch.setattr(other, '_by_name', getattr(self, '_own'))\n"
    )
    assert sorted(imported_layers(path, tmp_path)) == [
        *(("_Own", 2), ("ddp", 3), ("errors", 7), ("planning", 6), ("topo", 1), ("topo", 8)),
        ("wrapper", 2),
    ]
    assert sorted(private_uses(path)) == [
        *("line 10: _theirs", "line 10: _theirs", "line 11: _by_name"),
        *("line 1: _base", "line 1: _dynamo", "line 2: _Own", "line 8: _here"),
    ]
