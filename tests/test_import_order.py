"""The order of imports, and what is private: a module imports from layers below it only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import decent_optim_wrapper

PACKAGE = "decent_optim_wrapper"
ROOT = Path(decent_optim_wrapper.__file__).parent
TESTS = Path(__file__).parent

# What each layer may import of the package besides itself: a folder, or a module at the top
# level of the package.
_COMM = {"topo", "errors", "warn"}
_MESH = {*_COMM, "comm", "optim"}
_WIRE = {*_MESH, "codecs", "mesh"}
_GOSSIP = {*_WIRE, "wire"} - {"mesh"}
_EXTENSIONS = {*_GOSSIP, "gossip", "mesh"}
_CONFIG = {*_EXTENSIONS, "extensions", "checks"}
_ELASTIC = {*_CONFIG, "config"}
_START = {*_ELASTIC, "elastic"}
_WRAPPER = {*_START, "start", "forward_hooks", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "topo": set(),
    "codecs": set(),
    "errors": set(),
    "checks": {"topo"},
    "warn": set(),
    "log": {"warn"},
    "optim": set(),
    "comm": _COMM,
    "mesh": _MESH,
    "wire": _WIRE,
    "gossip": _GOSSIP,
    "extensions": _EXTENSIONS,
    "config": _CONFIG,
    "elastic": _ELASTIC,
    "start": _START,
    "forward_hooks": {"parameter_reads"},
    "parameter_reads": set(),
    "report": _EXTENSIONS,
    "utils": {"start"},
    "wrapper": _WRAPPER,
    "ddp": {*_WRAPPER, "wrapper"},
    "checkpoint": {*_WRAPPER, "wrapper"},
    "data": {*_WRAPPER, "wrapper"},
    "integrations": {*_WRAPPER, "wrapper"},
    "planning": {"topo", "comm"},
    "launcher": {"comm"},
    "cli": {"checkpoint", "errors", "planning", "launcher", "topo"},
    "__main__": {"cli"},
}


def modules(layer: str) -> list[Path]:
    folder = ROOT / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{layer}.py"]


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[list[str], int]]:
    """What a module imports, anywhere in it, with the lines where it does."""
    package = (PACKAGE, *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *(node.module.split(".") if node.module else [])]
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno


def imported_layers(path: Path, root: Path = ROOT) -> Iterator[tuple[str, int]]:
    for name, line in imports(path, root):
        if name[0] == PACKAGE:
            yield (name[1] if len(name) > 1 else PACKAGE), line


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_from_layers_below_it(layer: str) -> None:
    allowed = MAY_IMPORT[layer] | {layer}
    found = modules(layer)
    assert all(path.is_file() for path in found)
    assert found
    upwards = [
        f"{path.relative_to(ROOT)}, line {line}: {imported}"
        for path in found
        for imported, line in imported_layers(path)
        if imported not in allowed
    ]
    assert not upwards


def test_every_module_is_in_a_layer() -> None:
    top = {path.stem if path.suffix == ".py" else path.name for path in ROOT.iterdir()}
    assert top - {"__pycache__", "__init__", "py"} - {"py.typed"} == set(MAY_IMPORT)


def test_topologies_need_no_process_group() -> None:
    names = [".".join(name) for path in modules("topo") for name, _ in imports(path)]
    assert "torch" in names
    assert not [name for name in names if "distributed" in name]


def test_the_layers_have_an_order() -> None:
    """Without a way back up: no layer reaches itself by what it and others may import."""
    for layer in MAY_IMPORT:
        reached, waiting = set[str](), [*MAY_IMPORT[layer]]
        while waiting:
            below = waiting.pop()
            if below not in reached:
                reached.add(below)
                waiting += MAY_IMPORT.get(below, ())
        assert layer not in reached


# Private names of others that are used, because there is no public way.
OTHERS_PRIVATE = {
    # Python's
    *("_asdict", "_replace", "_exit", "_getframe"),
    # torch's process groups and stores
    *("_C", "_distributed_c10d", "_get_backend", "_get_process_group_store", "_register_backend"),
    *("_end_coalescing", "_start_coalescing"),
    "_Options",
    *("_set_default_backend", "_set_default_timeout", "_timeout", "_world"),
    # torch's optimizers and their hooks
    "_forward_pre_hooks",
    *("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks", "_opt_called"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_step_pre_hooks", "_step_supports_amp_scaling", "_wrapped_by_lr_sched"),
    # torch's modules and tensors
    *("_autograd", "_profiler_enabled"),
    *("_BatchNorm", "_buffers", "_checkpoint", "_execution_engine", "_python_dispatch", "_version"),
    # torch without a GPU
    *("_accelerator_graph_capture_health_check", "_local_scalar_dense", "_subclasses"),
    *("_to_copy", "_pytree"),
    # decent-dp's
    *("_get_topo_edges", "_param_buckets"),
}
OF_THIS_OBJECT = {"self", "cls", "super()"}
BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


def private_uses(path: Path) -> Iterator[str]:
    """Where a module uses a private name of another object or module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OF_THIS_OBJECT:
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            own = node.args and ast.unparse(node.args[0]) in OF_THIS_OBJECT
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            names = [] if own else names
        else:
            continue
        for name in names:
            private = re.match("_[A-Za-z]", name)
            if private and name not in OTHERS_PRIVATE and not name.startswith("_foreach_"):
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("folder", [ROOT, TESTS], ids=["package", "tests"])
def test_nothing_reaches_for_the_private_names_of_others(folder: Path) -> None:
    found = sorted(folder.rglob("*.py"))
    assert found
    reaches = [f"{path.relative_to(folder)}, {use}" for path in found for use in private_uses(path)]
    assert not reaches


def test_every_way_to_reach_for_a_private_name_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "made_up.py"
    path.write_text(
        "import torch._dynamo, decent_optim_wrapper.topo._base\n"
        "from decent_optim_wrapper.wrapper import _Own, shown\n"
        "from ._here import shown\n"
        "class A:\n"
        "    def f(self, other):\n"
        "        super()._inherited(self._own, self.__class__, other.shown)\n"
        "        torch._foreach_add_(other.public._theirs, self.part._theirs)\n"
        "patch.setattr(other, '_by_name', getattr(self, '_own'))\n"
    )
    assert sorted(private_uses(path)) == [
        *("line 1: _base", "line 1: _dynamo", "line 2: _Own", "line 3: _here"),
        *("line 7: _theirs", "line 7: _theirs", "line 8: _by_name"),
    ]


def test_every_way_to_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "topo" / "made_up.py"
    path.parent.mkdir()
    path.write_text(
        "import torch, decent_optim_wrapper.ddp as ddp\n"
        "from decent_optim_wrapper import wrapper, Group\n"
        "from decent_optim_wrapper.topo import Ring\n"
        "def late():\n"
        "    from ..planning.tables import columns\n"
        "    from .. import errors\n"
        "    from . import base\n"
    )
    assert list(imported_layers(path, tmp_path)) == [
        *(("ddp", 1), ("wrapper", 2), ("Group", 2), ("topo", 3)),
        *(("planning", 5), ("errors", 6), ("topo", 7)),
    ]
