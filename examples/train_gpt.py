"""Train a character-level GPT whose replicas are spread over ranks and gossip with each other.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --inner fsdp
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --inner tp

The text is the reference of the Python language, which ships with Python for `help()`. The ranks
are a mesh ("gossip", "inner"): `--inner-size` of them hold a replica together, by FSDP2 (`fsdp`)
or tensor parallelism (`tp`); with `none` each rank holds one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory
from decent_optim_wrapper.utils import init_distributed

WIDTH, HEAD, DEPTH, CONTEXT, BATCH = 64, 16, 2, 64, 16
# Steps, the validation loss of the averaged model, and MiB that this rank has sent by then.
Point = tuple[int, float, float]


class Block(nn.Module):
    """Attention and a perceptron; tensor parallelism gives each rank some heads and neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        heads = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))


class GPT(nn.Module):
    """Predicts the next character: logits of shape (batch, length, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inner", choices=("fsdp", "tp", "none"), default="fsdp")
    parser.add_argument("--inner-size", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="one-peer-exp")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/gpt.png"), help="the curves")
    return parser.parse_args()


def spread(model: GPT, inner: str, mesh: DeviceMesh) -> None:
    """Spread a replica over the ranks of the inner dimension."""
    if inner == "tp":
        plan = dict.fromkeys(("query", "key", "value", "widen"), ColwiseParallel())
        plan |= dict.fromkeys(("project", "narrow"), RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh["inner"], plan)
    elif inner == "fsdp":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["inner"])


def loss_at(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Mean loss on the pieces of the text that begin there."""
    pieces = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(args: argparse.Namespace) -> list[Point]:
    device, inner = init_distributed().device, 1 if args.inner == "none" else args.inner_size
    shape = dist.get_world_size() // inner, inner
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("gossip", "inner"))
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text], device=device)
    learnt, held_out = data.tensor_split([len(data) * 9 // 10])
    exam = torch.arange(0, len(held_out) - CONTEXT, 8 * CONTEXT)
    torch.manual_seed(0)
    model = GPT(len(alphabet)).to(device)
    spread(model, args.inner, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    options = {"topology": args.topology, "mesh": mesh, "gossip_dim": "gossip", "model": model}
    optimizer = DecentOptimWrapper(optimizer, **options)
    # FSDP splits the batch of a replica among its ranks; those of tensor parallelism share it.
    fsdp = args.inner == "fsdp"
    place = dist.get_rank() if fsdp else mesh.get_local_rank("gossip")
    generator = torch.Generator().manual_seed(place)
    history, sent = [], 0
    for step in range(1, args.steps + 1):
        size = (BATCH // inner if fsdp else BATCH,)
        starts = torch.randint(len(learnt) - CONTEXT, size, generator=generator)
        optimizer.zero_grad()
        loss_at(model, learnt, starts).backward()
        optimizer.clip_grad_norm_(1.0)  # By the norm of the whole replica.
        optimizer.step()
        sent += optimizer.stats().bytes_sent
        if step % max(1, args.steps // 20) == 0:
            with optimizer.averaged(), torch.no_grad():
                history.append((step, loss_at(model, held_out, exam).item(), sent / 2**20))
    return history


def draw(history: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    labels = "validation loss, nats per character", "MiB sent per rank since the start"
    for axes, label, column in zip(figure.subplots(1, 2), labels, (1, 2), strict=True):
        axes.plot([point[0] for point in history], [point[column] for point in history])
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    args = parse_arguments()
    history = train(args)
    if dist.get_rank() == 0:
        draw(history, args.output)
        print("step {}: validation loss {:.3f}, {:.2f} MiB sent".format(*history[-1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
