"""Imported last by the process from which all ranks are forked, so that forks of it cost less.

A fork copies the table of all pages. In huge pages, what has been imported takes few entries: a
fork and the end of its process then take 32 ms of CPU time instead of 74.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
from functools import partial
from pathlib import Path

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


# A collection in a child would write to, and so copy, all that it looks at.
gc.collect()
gc.freeze()
# In the end as usual, or Triton would list what cannot be freed; but not in a child, in which the
# last collection would copy all memory.
atexit.register(gc.unfreeze)
os.register_at_fork(after_in_child=partial(atexit.unregister, gc.unfreeze))
collapse()
