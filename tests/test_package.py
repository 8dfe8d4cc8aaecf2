"""What is installed with the package."""

from __future__ import annotations

import ast
import pickle
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from decent_optim_wrapper import CallOrderError, NonFiniteError, PeerError

ROOT = Path(__file__).parent.parent


def test_nothing_installs_by_the_name_that_is_somebody_elses_on_the_package_index() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("decent_optim_wrapper/**/*.py")]
    texts += [path for kind in ("md", "py") for path in ROOT.glob(f"examples/**/*.{kind}")]
    by_name = re.compile(r"decent[-_]optim[-_]wrapper\[|pip install (?:-\S+ )*'?decent[-_]optim")
    found = {path: by_name.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert len(found) > 20
    assert not {str(path): hits for path, hits in found.items() if hits}


def test_numpy_is_a_dependency_because_torch_warns_in_every_process_without_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [requirement.split(">=")[0] for requirement in project["project"]["dependencies"]]
    assert names == ["torch", "loguru", "numpy"]


def public_names() -> Iterator[str]:
    """The names in each `__all__` of the package, and those that the guides import from it."""
    for path in ROOT.glob("decent_optim_wrapper/**/*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from ast.literal_eval(node.value)
    for page in ROOT.glob("examples/guides/*.md"):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for part in ast.walk(ast.parse(code)):
                if isinstance(part, ast.ImportFrom) and str(part.module).startswith("decent_optim"):
                    yield from (each.name for each in part.names)


def documented() -> Iterator[tuple[str, str]]:
    """The module and the name of each entry of the reference."""
    for path in ROOT.glob("examples/guides/reference/*.md"):
        module = ""
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)$", path.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            else:
                yield module, name


def test_errors_survive_pickling_as_between_processes() -> None:
    for error in (
        PeerError("lost", rank=2, round=5, bucket=1),
        NonFiniteError("NaN", [1, 3]),
        CallOrderError("order"),
    ):
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_every_public_name_is_once_in_the_reference() -> None:
    found = Counter(name for _, name in documented())
    assert len(found) > 70
    assert max(found.values()) == 1
    forgotten = set(public_names()) - {"__version__"} - found.keys()
    assert not forgotten, "add them to a page of examples/guides/reference"


def test_each_name_of_the_reference_exists() -> None:
    # Frameworks take seconds to import; when the site is built, their names are checked, too.
    names = [each for each in documented() if "integrations." not in each[0]]
    missing = [each for each in names if not hasattr(import_module(each[0]), each[1])]
    assert not missing
