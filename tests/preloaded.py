"""Imported by the process from which all ranks are forked: what they need, and forks cost less.

A fork copies the table of all pages. In huge pages, what has been imported takes few entries: a
fork and the end of its process then take 32 ms of CPU time instead of 74.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.metadata
import os
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from _pytest.assertion import install_importhook
from _pytest.config import get_config

# What tests and examples import: it takes eight seconds, and a fork of it less than a tenth of one.
IMPORTED_ONCE = (
    *("torch._dynamo", "torch.distributed.checkpoint", "decent_optim_wrapper"),
    *("sklearn.datasets", "torchvision", "tqdm", "meshes", "modules", "restartable_processes"),
    # Of the standard library, by the first connection.
    *("encodings.idna", "stringprep"),
    # The tests, too: each rank would import its own for a tenth of a second.
    *(path.stem for path in Path(__file__).parent.glob("test_*.py")),
)
# Of <sys/mman.h>. Kernels before Linux 6.1 refuse to collapse pages, and nothing changes.
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
SIZE = 2 << 20


def collapse() -> None:
    """Move the private memory of this process to huge pages."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *name = line.split()
        if mode == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in addresses.split("-"))
            first = -(-first // SIZE) * SIZE
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                madvise(first, max(0, end // SIZE * SIZE - first), advice)


# All that is imported stays: collections would look at it for more than a second.
gc.disable()
# As pytest imports tests, to show what an assertion compares: workers need not import them again.
rewriting = install_importhook(get_config())
for name in IMPORTED_ONCE:
    with suppress(ImportError):
        importlib.import_module(name)
sys.meta_path.remove(rewriting)
# For its first group each rank looks for a backend in all installed packages, for 12 ms.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[assignment]
importlib.metadata.entry_points(group="torch.distributed.backends")
# A collection in a child would write to, and so copy, all that it looks at.
gc.freeze()
gc.enable()
# In the end as usual, or Triton would list what cannot be freed; but not in a child, in which the
# last collection would copy all memory.
atexit.register(gc.unfreeze)
os.register_at_fork(after_in_child=partial(atexit.unregister, gc.unfreeze))
collapse()
