"""What is installed with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path


def test_numpy_is_a_dependency_because_torch_warns_in_every_process_without_it() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    names = [requirement.split(">=")[0] for requirement in project["project"]["dependencies"]]
    assert names == ["torch", "loguru", "numpy"]
