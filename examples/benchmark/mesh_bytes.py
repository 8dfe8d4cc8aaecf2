"""What a rank sends along the dimension between replicas: gossip against HSDP's all-reduce.

    python examples/benchmark/mesh_bytes.py

A replica is two ranks that share it by FSDP2. For few replicas the table is measured from
`optimizer.stats()` while they train; for more it is computed. What HSDP sends is computed: the sum
of the gradients' shards as a ring makes it, in float32 and in bfloat16. It took 29 s on 2 busy
cores.
"""

from __future__ import annotations

import argparse

import netlab
import progress
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from decent_optim_wrapper import DecentOptimWrapper, Schedule, TopologyFactory

SHARDS, STEPS, WIDTH, MIB = 2, 4, 256, 1 << 20
METHODS = {
    "gossip in pairs, float32": (None, 1),
    "gossip in pairs, bf16": (torch.bfloat16, 1),
    "gossip in pairs, bf16, every 4 steps": (torch.bfloat16, 4),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measured", type=int, nargs="*", default=[2, 4], help="replicas")
    parser.add_argument("--computed", type=int, nargs="*", default=[8, 16], help="replicas")
    return parser.parse_args()


def build_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def shard_bytes() -> int:
    """Bytes of the model on one rank, in float32: every parameter splits evenly."""
    return sum(param.nbytes for param in build_model().parameters()) // SHARDS


def measured(replicas: int) -> dict[str, float]:
    """Bytes per step that this rank sends to other replicas, for each method."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("gossip", "fsdp"))
    sent = {}
    for name, (dtype, every) in METHODS.items():
        torch.manual_seed(0)
        model = build_model()
        torch.manual_seed(dist.get_rank())
        for module in (*model, model):
            fully_shard(module, mesh=mesh["fsdp"])
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(model.parameters(), lr=0.01),
            topology="one-peer-exp",
            mesh=mesh,
            gossip_dim="gossip",
            model=model,
            comm_dtype=dtype,
            schedule=Schedule(gossip_every=every),
        )
        sent[name] = 0.0
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(1, WIDTH)).square().mean().backward()
            optimizer.step()
            sent[name] += optimizer.stats().bytes_sent / STEPS
        optimizer.synchronize()
    dist.destroy_process_group()
    return sent


def computed(replicas: int) -> dict[str, float]:
    """The same from the topology."""
    pair = TopologyFactory.create("one-peer-exp", replicas).group_of(0, 0)
    mean = pair.copies_sent * shard_bytes()
    return {
        name: mean * (1 if dtype is None else 0.5) / every
        for name, (dtype, every) in METHODS.items()
    }


def all_reduced(replicas: int) -> dict[str, float]:
    """Bytes per step of a ring's all-reduce of the shards' gradients."""
    nbytes = 2 * (1 - 1 / replicas) * shard_bytes()
    return {"HSDP, float32": nbytes, "HSDP, bf16": nbytes / 2}


def main() -> None:
    args = parse_arguments()
    columns = {}
    with netlab.lab(1, rate="") as where, progress.bar(len(args.measured), "column") as bar:
        for replicas in args.measured:
            ranks = netlab.run(where, replicas * SHARDS, measured, replicas, timeout=300)
            mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in METHODS}
            columns[f"{replicas} replicas, measured"] = all_reduced(replicas) | mean
            bar.update()
    for replicas in args.computed:
        columns[f"{replicas}, computed"] = all_reduced(replicas) | computed(replicas)
    print(f"S = {shard_bytes() / MIB:.3f} MiB, the shard of a rank in float32")
    print("| multiples of S per step | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in (*all_reduced(2), *METHODS):
        cells = [f"{column[name] / shard_bytes():.3f}" for column in columns.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
