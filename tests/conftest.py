"""What all tests share."""

from __future__ import annotations

import os

import torch

# As torchrun starts its ranks. On a busy machine every operation of several threads waits for the
# thread that has no core: the table of 128 ranks then took 56 s instead of 3.
torch.set_num_threads(1)

# Torch asks the name server for the name of every address that connects to a store, and meanwhile
# the store serves nobody. Where the answer is lost, glibc would ask again only after 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
