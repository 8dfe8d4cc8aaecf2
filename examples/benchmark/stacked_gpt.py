"""A small GPT on Python's own sources, with the weights of all ranks stacked.

Row r of the weights is the replica of rank r. One pass computes the losses of all ranks, each on
its own batch, so that many ranks are simulated in one process.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
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

CONTEXT, WIDEN = 64, 3
# Printable ASCII, and one symbol for everything else.
CHARACTERS = 96


class Text(NamedTuple):
    """Symbols to train on, and symbols of other files to validate on; int64 vectors."""

    learnt: Tensor
    held_out: Tensor


@cache
def characters_of_python() -> Text:
    """The characters of the modules of the standard library that are one file."""
    return _characters(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


@cache
def characters_of_torch() -> Text:
    """The characters of torch's sources."""
    return _characters(_sources_of_torch())


@cache
def byte_pairs_of_torch() -> Text:
    """Torch's sources in 2,048 byte pairs, which are trained on the files to train on."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [file.read_text(errors="replace") for file in _sources_of_torch()]
    tokenizer = ByteLevelBPETokenizer()
    learnt = [text for place, text in enumerate(texts) if place % 10 != 5]
    tokenizer.train_from_iterator(learnt, vocab_size=2048, show_progress=False)
    coded = [torch.tensor(each.ids, dtype=torch.int64) for each in tokenizer.encode_batch(texts)]
    return _split(coded)


def _sources_of_torch() -> list[Path]:
    return sorted(Path(torch.__file__).parent.rglob("*.py"))


def _characters(files: list[Path]) -> Text:
    codes = [torch.frombuffer(bytearray(f.read_bytes() + b"\n"), dtype=torch.uint8) for f in files]
    # Line ends become 0 as does everything else that is not printable.
    return _split([torch.where((c > 31) & (c < 127), c.long() - 31, 0) for c in codes])


def _split(texts: list[Tensor]) -> Text:
    """Keep every tenth file for the test."""
    learnt = [text for place, text in enumerate(texts) if place % 10 != 5]
    device = torch.get_default_device()
    return Text(torch.cat(learnt).to(device), torch.cat(texts[5::10]).to(device))


class StackedGPT(NamedTuple):
    """The shape of a GPT, and its text.

    Args:
        text: reads the text.
        symbols: number of symbols of the text.
        width: width of the model.
        depth: number of blocks.
        heads: number of heads of an attention.
        sequences: sequences in a batch of all ranks together.
    """

    text: Callable[[], Text] = characters_of_python
    symbols: int = CHARACTERS
    width: int = 64
    depth: int = 2
    heads: int = 2
    sequences: int = 32

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The matrices; each has a multiple of the 256 values that a codec codes together."""
        width, wide = self.width, WIDEN * self.width
        block = [(width, 3 * width), (width, width), (width, wide), (wide, width)]
        ends = (self.symbols, width), (CONTEXT, width), (width, self.symbols)
        return [*ends[:2], *block * self.depth, ends[2]]

    @property
    def hidden(self) -> range:
        """The places of the matrices between the embeddings and the head, which Muon trains."""
        return range(2, len(self.shapes) - 1)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(map(prod, self.shapes))

    @property
    def steps(self) -> int:
        """The steps for 20 symbols per parameter."""
        return 20 * self.parameters // (self.sequences * CONTEXT)

    def initial_weights(self, seed: int) -> Tensor:
        """The weights with which every rank starts, of shape (parameters,)."""
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(shape, generator=generator, device="cpu") for shape in self.shapes]
        scales = [
            1.0 if place < self.hidden.start else 0.5 * rows**-0.5
            for place, (rows, _) in enumerate(self.shapes)
        ]
        flat = [part.flatten() * scale for part, scale in zip(parts, scales, strict=True)]
        return torch.cat(flat).to(torch.get_default_device())

    def split(self, weights: Tensor) -> list[Tensor]:
        """Views of stacked weights (ranks, parameters) as matrices (ranks, rows, columns)."""
        parts = weights.split([prod(shape) for shape in self.shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def batch(self, generator: torch.Generator, ranks: int) -> Tensor:
        """The next batches of all ranks, of shape (ranks, sequences / ranks, CONTEXT + 1).

        All ranks together have the same sequences, however many they are.
        """
        learnt = self.text().learnt
        starts = torch.randint(
            len(learnt) - CONTEXT, (self.sequences,), generator=generator, device="cpu"
        )
        return _pieces(learnt, starts.to(learnt.device)).unflatten(0, (ranks, -1))

    def stacked_loss(self, parts: Sequence[Tensor], pieces: Tensor) -> Tensor:
        """The sum over the ranks of the mean loss of each on its pieces.

        Args:
            parts: stacked matrices, as from `split`; each is read when it is needed.
            pieces: int64 of shape (ranks, batch, CONTEXT + 1).
        """
        ranks, size = pieces.shape[:2]
        offsets = self.symbols * torch.arange(ranks, device=pieces.device).view(-1, 1, 1)
        rows = embedding(pieces[..., :-1] + offsets, parts[0].flatten(0, 1))
        x = (rows + parts[1].unsqueeze(1)).flatten(1, 2)
        for layer in self.hidden[::4]:
            projected = torch.bmm(self._norm(x), parts[layer])
            heads = projected.view(ranks * size, CONTEXT, 3, self.heads, -1)
            seen = scaled_dot_product_attention(*heads.transpose(1, 3).unbind(2), is_causal=True)
            x = torch.baddbmm(x, seen.transpose(1, 2).reshape(x.shape), parts[layer + 1])
            inner = relu(torch.bmm(self._norm(x), parts[layer + 2]))
            x = torch.baddbmm(x, inner, parts[layer + 3])
        logits = torch.bmm(self._norm(x), parts[-1])
        return cross_entropy(logits.flatten(0, 1), pieces[..., 1:].flatten()) * ranks

    @torch.no_grad()
    def validation_loss(self, weights: Tensor) -> float:
        """The mean loss on the held-out text with these weights, of shape (parameters,)."""
        held_out = self.text().held_out
        pieces = _pieces(
            held_out, torch.arange(0, len(held_out) - CONTEXT, 4 * CONTEXT, device=held_out.device)
        )
        parts = self.split(weights.unsqueeze(0))
        losses = [
            self.stacked_loss(parts, each.unsqueeze(0)) * len(each) for each in pieces.split(64)
        ]
        return (torch.stack(losses).sum() / len(pieces)).item()

    def _norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, (self.width,))


def _pieces(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1, device=text.device)]


# The model of most figures, of 98,304 parameters.
SMALL = StackedGPT()
SIZES = {
    "0.1M": SMALL,
    "0.4M": StackedGPT(text=characters_of_torch, width=128, sequences=64),
    "1.5M": StackedGPT(text=byte_pairs_of_torch, symbols=2048, width=192, heads=3, sequences=128),
}
