"""What is installed with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from api_page import PAGE, api_page

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


def test_the_api_page_is_that_of_the_docstrings() -> None:
    stale = "write it again: PYTHONPATH=. python tests/api_page.py"
    assert PAGE.read_text(encoding="utf-8") == api_page(), stale
