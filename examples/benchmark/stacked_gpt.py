"""A small GPT on the sources of Python's standard library, with the weights of all ranks stacked.

Row r of the weights is the replica of rank r. One pass computes the losses of all ranks, each on
its own batch, so that many ranks are simulated in one process.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import (
    cross_entropy,
    embedding,
    layer_norm,
    relu,
    scaled_dot_product_attention,
)

# Printable ASCII, and one symbol for everything else.
CHARACTERS, CONTEXT, WIDTH, DEPTH, HEADS, WIDEN = 96, 64, 64, 2, 2, 3
# Sequences in a batch of all ranks together.
BATCH = 32
BLOCK = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, WIDEN * WIDTH), (WIDEN * WIDTH, WIDTH)]
# Each is a multiple of the 256 values that a codec codes together.
SHAPES = [(CHARACTERS, WIDTH), (CONTEXT, WIDTH), *BLOCK * DEPTH, (WIDTH, CHARACTERS)]
# The matrices between the embeddings and the head, which Muon trains.
HIDDEN = range(2, len(SHAPES) - 1)
PARAMETERS = sum(map(prod, SHAPES))
# For 20 tokens per parameter.
STEPS = 20 * PARAMETERS // (BATCH * CONTEXT)


class Text(NamedTuple):
    """Characters to train on, and characters of other files to validate on; int64 vectors."""

    learnt: Tensor
    held_out: Tensor


@cache
def load_text() -> Text:
    """The modules of the standard library that are one file; every tenth is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    codes = [torch.frombuffer(bytearray(f.read_bytes() + b"\n"), dtype=torch.uint8) for f in files]
    # Line ends become 0 as does everything else that is not printable.
    texts = [torch.where((c > 31) & (c < 127), c.long() - 31, 0) for c in codes]
    learnt = [text for place, text in enumerate(texts) if place % 10 != 5]
    device = torch.get_default_device()
    return Text(torch.cat(learnt).to(device), torch.cat(texts[5::10]).to(device))


def initial_weights(seed: int) -> Tensor:
    """The weights with which every rank starts, of shape (parameters,)."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator, device="cpu") for shape in SHAPES]
    scales = [
        1.0 if place < HIDDEN.start else 0.5 * rows**-0.5 for place, (rows, _) in enumerate(SHAPES)
    ]
    flat = [part.flatten() * scale for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(flat).to(torch.get_default_device())


def split(weights: Tensor) -> list[Tensor]:
    """Views of stacked weights (ranks, parameters) as stacked matrices (ranks, rows, columns)."""
    parts = weights.split([prod(shape) for shape in SHAPES], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, SHAPES, strict=True)]


def batch(generator: torch.Generator, ranks: int) -> Tensor:
    """The next batches of all ranks, of shape (ranks, BATCH / ranks, CONTEXT + 1).

    All ranks together have the same sequences, however many they are.
    """
    learnt = load_text().learnt
    starts = torch.randint(len(learnt) - CONTEXT, (BATCH,), generator=generator, device="cpu")
    return _pieces(learnt, starts.to(learnt.device)).unflatten(0, (ranks, -1))


def stacked_loss(parts: Sequence[Tensor], pieces: Tensor) -> Tensor:
    """The sum over the ranks of the mean loss of each on its pieces.

    Args:
        parts: stacked matrices, as from `split`; each is read when it is needed.
        pieces: int64 of shape (ranks, batch, CONTEXT + 1).
    """
    ranks, size = pieces.shape[:2]
    rows = pieces[..., :-1] + CHARACTERS * torch.arange(ranks, device=pieces.device).view(-1, 1, 1)
    x = (embedding(rows, parts[0].flatten(0, 1)) + parts[1].unsqueeze(1)).flatten(1, 2)
    for layer in HIDDEN[:: len(BLOCK)]:
        heads = torch.bmm(_norm(x), parts[layer]).view(ranks * size, CONTEXT, 3, HEADS, -1)
        seen = scaled_dot_product_attention(*heads.transpose(1, 3).unbind(2), is_causal=True)
        x = torch.baddbmm(x, seen.transpose(1, 2).reshape(x.shape), parts[layer + 1])
        x = torch.baddbmm(x, relu(torch.bmm(_norm(x), parts[layer + 2])), parts[layer + 3])
    logits = torch.bmm(_norm(x), parts[-1])
    return cross_entropy(logits.flatten(0, 1), pieces[..., 1:].flatten()) * ranks


@torch.no_grad()
def validation_loss(weights: Tensor) -> float:
    """The mean loss on the held-out text with these weights, of shape (parameters,)."""
    held_out = load_text().held_out
    pieces = _pieces(
        held_out, torch.arange(0, len(held_out) - CONTEXT, 4 * CONTEXT, device=held_out.device)
    )
    parts = split(weights.unsqueeze(0))
    losses = [stacked_loss(parts, each.unsqueeze(0)) * len(each) for each in pieces.split(64)]
    return (torch.stack(losses).sum() / len(pieces)).item()


def _pieces(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1, device=text.device)]


def _norm(x: Tensor) -> Tensor:
    return layer_norm(x, (WIDTH,))
