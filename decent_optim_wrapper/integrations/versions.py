"""Checks that the installed version of a framework is supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def require(package: str, oldest: tuple[int, int], extra: str, below: int | None = None) -> None:
    """Check the version of a framework before anything of it is imported.

    Args:
        package: its name on the package index.
        oldest: the first supported version.
        extra: the extra of this package that installs it.
        below: the first major version that is not supported; None means the one after `oldest`.

    Raises:
        ImportError: it is not installed, or the version is not supported.
    """
    below = oldest[0] + 1 if below is None else below
    expected = f"{package}>={oldest[0]}.{oldest[1]},<{below}"
    try:
        found = version(package)
    except PackageNotFoundError:
        found = None
    if found is not None:
        major, minor = (int(part) for part in found.split(".")[:2])
        if oldest <= (major, minor) < (below, 0):
            return
    raise ImportError(
        f"decent_optim_wrapper.integrations.{extra} expects {expected}, but "
        f"{'it is not installed' if found is None else f'{found} is installed'}; "
        f"pip install '.[{extra}]' in a clone of decent_optim_wrapper"
    )
