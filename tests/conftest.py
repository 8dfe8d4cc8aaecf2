"""What all tests share."""

from __future__ import annotations

import torch

# As torchrun starts its ranks. On a busy machine every operation of several threads waits for the
# thread that has no core: the table of 128 ranks then took 56 s instead of 3.
torch.set_num_threads(1)
