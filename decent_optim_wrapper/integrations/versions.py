"""Whether the framework that is installed is one that an integration was written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def require(package: str, oldest: tuple[int, int], extra: str) -> None:
    """Check the version of a framework before anything of it is imported.

    Args:
        package: its name in the package index.
        oldest: the first version that is supported; the next major version is not.
        extra: the extra of this package that installs it.

    Raises:
        ImportError: it is not installed, or the version is not supported.
    """
    expected = f"{package}>={oldest[0]}.{oldest[1]},<{oldest[0] + 1}"
    try:
        found = version(package)
    except PackageNotFoundError:
        found = None
    if found is not None:
        major, minor = (int(part) for part in found.split(".")[:2])
        if oldest <= (major, minor) < (oldest[0] + 1, 0):
            return
    raise ImportError(
        f"decent_optim_wrapper.integrations.{extra} expects {expected}, but "
        f"{'it is not installed' if found is None else f'{found} is installed'}; "
        f"pip install '.[{extra}]' in a clone of decent_optim_wrapper"
    )
