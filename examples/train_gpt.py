"""Train a character-level GPT with gossip averaging, and compare it with DDP.

    export OMP_NUM_THREADS=1
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --ddp --comm-dtype float32 int8
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --inner fsdp

The text is the reference of the Python language, which ships with Python for `help()`. Every rank
trains on its own shard of it: shuffled blocks, or (`--shards topics`) neighbouring topics. The last
tenth of each topic is held out. With `--inner` the ranks are a mesh ("gossip", "inner"):
`--inner-size` of them share a replica, by FSDP2 (`fsdp`) or tensor parallelism (`tp`). A
run with the defaults takes 1.5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import DecentOptimWrapper, GradientTracking, TopologyFactory
from decent_optim_wrapper.optim import lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.utils import init_distributed

HEAD, CONTEXT, BATCH, BLOCK = 32, 64, 8, 2048
# Steps, the validation loss of the averaged model, and MiB that this rank has sent by then.
Point = tuple[int, float, float]


class Data(NamedTuple):
    """The text of this rank's shard, the held-out text, and the number of characters."""

    shard: Tensor
    held_out: Tensor
    characters: int


class Block(nn.Module):
    """Attention and a perceptron; tensor parallelism gives each rank some heads and neurons."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        heads = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))


class GPT(nn.Module):
    """Predicts the next character: logits of shape (batch, length, characters)."""

    def __init__(self, characters: int, width: int, depth: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="ring")
    dtypes = ("float32", "bfloat16", "int8", "int4", "int3")
    parser.add_argument(
        "--comm-dtype", choices=dtypes, nargs="*", default=["float32"], help="one run for each"
    )
    parser.add_argument("--gradient-tracking", action="store_true")
    mixing = parser.add_mutually_exclusive_group()
    mixing.add_argument("--no-overlap", action="store_true", help="finish each round in its step")
    mixing.add_argument("--forward", action="store_true", help="mix before the next forward pass")
    parser.add_argument("--ddp", action="store_true", help="compare with DistributedDataParallel")
    parser.add_argument("--shards", choices=("shuffled", "topics"), default="shuffled")
    parser.add_argument("--inner", choices=("fsdp", "tp", "none"), default="none")
    parser.add_argument("--inner-size", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/gpt.png"), help="the curves")
    args = parser.parse_args()
    if args.ddp and args.inner != "none":
        parser.error("--ddp expects replicas of one rank: drop --inner")
    return args


def load_data(shards: str, place: int, count: int, device: torch.device) -> Data:
    """The text of one of `count` shards of equally many characters, and the text to validate on."""
    texts = [topics[name] for name in sorted(topics)]
    whole = torch.frombuffer(bytearray("".join(texts), "utf-32-le"), dtype=torch.int32)
    alphabet, numbers = whole.unique(return_inverse=True)
    codes = numbers.to(device).split([len(text) for text in texts])
    parts = [code.tensor_split([len(code) * 9 // 10]) for code in codes]
    learnt, held_out = (torch.cat(part) for part in zip(*parts, strict=True))
    if shards == "shuffled":
        blocks = learnt.split(BLOCK)
        # The same for every seed, so that losses can be compared.
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
        learnt = torch.cat([blocks[number] for number in order])
    return Data(learnt.tensor_split(count)[place], held_out, len(alphabet))


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


def wrap(
    base: torch.optim.Optimizer,
    model: GPT,
    mesh: DeviceMesh,
    args: argparse.Namespace,
    comm_dtype: str,
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        base,
        topology=args.topology,
        comm_dtype=None if comm_dtype == "float32" else getattr(torch, comm_dtype),
        extensions=[GradientTracking()] if args.gradient_tracking else [],
        overlap="forward" if args.forward else not args.no_overlap,
        mesh=mesh,
        gossip_dim="gossip",
        model=model,
    )


def name_of(args: argparse.Namespace, comm_dtype: str | None) -> str:
    if comm_dtype is None:
        return "DDP"
    options = ", tracking" * args.gradient_tracking + ", no overlap" * args.no_overlap
    return f"{args.topology}, {comm_dtype}{options}" + ", forward" * args.forward


def train(args: argparse.Namespace, device: torch.device, comm_dtype: str | None) -> list[Point]:
    """A usual training loop, with gossip in that format or (None) with DistributedDataParallel."""
    inner = 1 if args.inner == "none" else args.inner_size
    shape = dist.get_world_size() // inner, inner
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("gossip", "inner"))
    # FSDP splits the batch of a replica among its ranks; ranks of tensor parallelism share it.
    if args.inner == "fsdp":
        place, count, batch = dist.get_rank(), dist.get_world_size(), BATCH // inner
    else:
        place, count, batch = mesh.get_local_rank("gossip"), shape[0], BATCH
    shard, held_out, characters = load_data(args.shards, place, count, device)
    exam = torch.arange(0, len(held_out) - CONTEXT, 8 * CONTEXT)
    torch.manual_seed(args.seed)
    model = network = GPT(characters, args.width, args.depth).to(device)
    spread(model, args.inner, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if comm_dtype is None:
        network = DistributedDataParallel(model)
    else:
        optimizer = wrap(optimizer, model, mesh, args, comm_dtype)
    # The bytes that a ring all-reduce of the gradients sends in a step.
    reduced = 2 * (1 - 1 / count) * sum(param.nbytes for param in model.parameters())
    warmup = args.steps // 20
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, args.steps - warmup, warmup)
    generator = torch.Generator().manual_seed(1000 * args.seed + place)
    history, sent = [], 0.0
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(shard) - CONTEXT, (batch,), generator=generator)
        optimizer.zero_grad()
        loss_at(network, shard, starts).backward()
        if comm_dtype is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)  # By the norm of the whole replica.
        optimizer.step()
        scheduler.step()
        sent += reduced if comm_dtype is None else optimizer.stats().bytes_sent
        if step % max(1, args.steps // 10) == 0:
            averaged = nullcontext() if comm_dtype is None else optimizer.averaged()
            with averaged, torch.no_grad():
                history.append((step, loss_at(model, held_out, exam).item(), sent / 2**20))
            if dist.get_rank() == 0:
                line = "{}, step {}: validation loss {:.4f}, {:.2f} MiB sent"
                print(line.format(name_of(args, comm_dtype), *history[-1]), flush=True)
    return history


def draw(runs: dict[str, list[Point]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    labels = "step", "MiB sent per rank since the start"
    for axes, label, column in zip(figure.subplots(1, 2), labels, (0, 2), strict=True):
        for name, history in runs.items():
            axes.plot(
                [point[column] for point in history], [point[1] for point in history], label=name
            )
        axes.set(xlabel=label, ylabel="validation loss, nats per character")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    args, device = parse_arguments(), init_distributed().device
    methods = [*args.comm_dtype, *([None] if args.ddp else [])]
    runs = {name_of(args, method): train(args, device, method) for method in methods}
    if dist.get_rank() == 0:
        draw(runs, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
