"""What the documents of version 0.1.1 and of two related packages show runs here.

`FIRST_README` is the text of 0.1.1 on the package index, whose scripts run as they are written but
for the backend. `TUTORIAL` is that of decent-dp, with our import. The third document arranges ranks
in groups for data, pipeline and tensor parallelism, which torch's meshes do here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from problem import flatten
from ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory
from decent_optim_wrapper.utils import init_distributed

pytestmark = pytest.mark.slow

FIRST_README = """
```python
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.optim import SGD
from decent_optim_wrapper.wrapper import DecentOptimWrapper

# Initialize distributed training
dist.init_process_group(backend='gloo')
rank = dist.get_rank()
world_size = dist.get_world_size()
local_world_size = torch.cuda.device_count()

# Create your model and base optimizer
model = nn.Linear(10, 10).cuda()
base_optimizer = SGD(model.parameters(), lr=0.01)

# Wrap with DecentOptimWrapper
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='ring',  # or 'complete'
    bucket_cap_mb=25
)

# Training loop
for epoch in range(num_epochs):
    for batch in dataloader:
        optimizer.zero_grad()
        
        inputs, targets = batch
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        
        loss.backward()
        optimizer.step()  # Handles decentralized averaging
```

##### `step(closure=None)`

```python
optimizer.step()
```

##### `zero_grad(set_to_none=True)`

```python
optimizer.zero_grad()
```

##### `global_avg(may_revert=True)`

```python
optimizer.global_avg()
```

##### `revert_global_avg()`

```python
optimizer.revert_global_avg()
```

### Ring Topology

```python
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='ring'
)
```

### Complete Topology

```python
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='complete'
)
```

### Custom Topologies

```python
from decent_optim_wrapper.topo import Topology, TopologyFactory

class MyCustomTopology(Topology):
    def assign_groups(self):
        # Implement your custom group assignment logic
        # Return a list of lists of lists representing groups for each rank
        groups = [[] for _ in range(self._world_size)]
        # ... your logic here ...
        return groups

# Register the custom topology
TopologyFactory.add_topology('my_custom', MyCustomTopology)

# Use it
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='my_custom'
)
```

### Bucket Configuration

```python
# Smaller buckets (more communication ops, less memory)
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='ring',
    bucket_cap_mb=10  # 10 MB buckets
)

# Larger buckets (fewer communication ops, more memory)
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='ring',
    bucket_cap_mb=100  # 100 MB buckets
)
```

### Global Averaging for Evaluation

```python
# Before evaluation
optimizer.global_avg()

# Evaluate model
model.eval()
with torch.no_grad():
    for batch in val_loader:
        outputs = model(batch)
        # ... evaluation logic ...

# Optionally revert to continue decentralized training
optimizer.revert_global_avg()
model.train()
```

### Integration with Learning Rate Schedulers

```python
from torch.optim.lr_scheduler import StepLR

base_optimizer = SGD(model.parameters(), lr=0.1)
optimizer = DecentOptimWrapper(
    optimizer=base_optimizer,
    rank=rank,
    world_size=world_size,
    local_world_size=local_world_size,
    topology='ring'
)

scheduler = StepLR(base_optimizer, step_size=10, gamma=0.1)

for epoch in range(num_epochs):
    for batch in dataloader:
        optimizer.zero_grad()
        loss = train_step(model, batch)
        loss.backward()
        optimizer.step()
    
    scheduler.step()  # Update learning rate
```
"""  # noqa: W293

# The groups of the ring in that package, which it lists by rank.
RING = """
        for rank in range(self._world_size):
            for side in (1, -1) if rank % 2 == 0 else (-1, 1):
                groups[rank].append(sorted([rank, (rank + side) % self._world_size]))
"""
LOGIC = "        # ... your logic here ...\n"

TUTORIAL = '''
```python
from decent_optim_wrapper.ddp import DecentralizedDataParallel as DecentDP
# Basic initialization
ddp_model = DecentDP(
    model, # Your PyTorch model (on GPU/CPU)
    optim_fn, # Optimizer constructor function
    lr_scheduler_fn=None, # Optional LR scheduler constructor
    topology="complete", # Communication topology
    bucket_size_in_mb=25 # Size of parameter buckets
)
```

```python
from decent_optim_wrapper.optim import (
    optim_fn_adam,
    optim_fn_adamw,
    optim_fn_accum_adam,
    optim_fn_accum_adamw
)
# Use directly
ddp_model = DecentDP(model, optim_fn=optim_fn_adamw)
# Or customize hyperparameters with partial
from functools import partial
custom_adamw = partial(
    optim_fn_adamw,
    lr=0.001,
    weight_decay=0.01
)
ddp_model = DecentDP(model, optim_fn=custom_adamw)
```

```python
def my_optim_fn(params):
    """Create a custom optimizer for the given parameters.
    Args:
        params: List of (name, tensor) tuples
    Returns:
        torch.optim.Optimizer: Configured optimizer instance
    """
    return torch.optim.SGD(
        [p for _, p in params],
        lr=0.01,
        momentum=0.9
    )
ddp_model = DecentDP(model, optim_fn=my_optim_fn)
```

```python
# Training loop
for epoch in range(num_epochs):
    ddp_model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.cuda(), target.cuda()
        # Forward pass
        output = ddp_model(data)
        loss = criterion(output, target)
        # Backward pass
        ddp_model.zero_grad()
        loss.backward()
        # Note: No need to call optimizer.step() - DecentDP handles this automatically
    # Evaluation
    ddp_model.eval()
    with torch.no_grad():
        for data, target in val_loader:
            data, target = data.cuda(), target.cuda()
            output = ddp_model(data)
            val_loss = criterion(output, target)
```

```python
# Enable gradient accumulation
ddp_model.set_accumulate_grad(True)
# Accumulate gradients over multiple batches
for i in range(accumulation_steps):
    output = ddp_model(data)
    loss = criterion(output, target) / accumulation_steps
    loss.backward()
# Disable gradient accumulation and perform update
ddp_model.set_accumulate_grad(False)
```

```python
ddp_model = DecentDP(
    model,
    optim_fn=optim_fn_adamw,
    bucket_size_in_mb=50 # Larger buckets for fewer communications
)
```

```python
ddp_model = DecentDP(
    model,
    optim_fn=optim_fn_adamw,
    grad_clip_norm=1.0 # Clip gradients to norm 1.0
)
```

```python
from torch.cuda.amp import GradScaler
scaler = GradScaler()
ddp_model = DecentDP(
    model,
    optim_fn=optim_fn_adamw,
    scaler=scaler
)
```
'''


def code_of(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document, re.DOTALL)


@contextmanager
def without_gpus() -> Iterator[None]:
    """What scripts move to the GPU stays on the CPU."""
    with (
        mock.patch.object(Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(nn.Module, "cuda", lambda module: module),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        yield


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def values_of(model: nn.Module) -> list[float]:
    return flatten(list(model.parameters())).tolist()


def given(rank: int) -> dict[str, Any]:
    """What the scripts leave to the user."""
    torch.manual_seed(rank)
    batches = [(draw, draw.sin()) for draw in torch.randn(3, 4, 10)]
    return {
        "torch": torch,
        "num_epochs": 2,
        "dataloader": batches,
        "train_loader": batches,
        "val_loader": batches,
        "criterion": nn.functional.mse_loss,
        "train_step": loss_of,
    }


def run_first_readme(rank: int) -> list[tuple[str, list[float]]]:
    """On a rank: the topology and the parameters after each script."""
    script, seen = given(rank), []
    script["val_loader"] = [inputs for inputs, _ in script["dataloader"]]
    first, *others = code_of(FIRST_README)
    _, _, loop = first.partition("# Training loop\n")
    with without_gpus():
        for code in (first, *others):
            exec(code.replace(LOGIC, RING), script)
            if code in others and "optimizer = DecentOptimWrapper(" in code:
                exec(loop, script)
                script["optimizer"].synchronize()
            topology = script["optimizer"].topology
            seen.append((topology.digest, values_of(script["model"])))
    return seen


def test_the_scripts_of_the_first_readme_train_and_average() -> None:
    by_rank = run_processes(4, run_first_readme)
    digests, rows = zip(*(zip(*seen, strict=True) for seen in by_rank), strict=True)
    assert [*digests] == [digests[0]] * 4
    ring, complete = (TopologyFactory.create(name, 4).digest for name in ("ring", "complete"))
    assert [*digests[0]] == [*[ring] * 6, complete, *[ring] * 4]
    # Of shape (scripts, ranks, parameters).
    found = torch.tensor(rows).transpose(0, 1)
    started, stepped, cleared, averaged, reverted, *built, evaluated, scheduled = found
    assert (started - started.mean(0)).abs().amax(1).min() > 1e-4, "every rank has its own model"
    assert torch.equal(cleared, stepped)
    mean = cleared.mean(0).expand_as(averaged)
    torch.testing.assert_close(averaged, mean, rtol=0, atol=1e-6)
    assert torch.equal(averaged, averaged[:1].expand_as(averaged))
    assert torch.equal(reverted, cleared)
    trained = torch.stack([reverted, *built, scheduled])
    assert trained.diff(dim=0).abs().amax(-1).min() > 1e-3, "every wrapper trains"
    assert torch.equal(evaluated, built[-1])


def run_tutorial(rank: int) -> list[list[float]]:
    """On a rank: the parameters after the training loop with each module."""
    dist.init_process_group("gloo")
    script, seen = given(rank), []
    layers = nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 10)
    parts = code_of(TUTORIAL)
    loops = [part for part in parts if "for " in part and "ddp_model = " not in part]
    with without_gpus():
        script |= {"model": nn.Sequential(*layers), "accumulation_steps": 2}
        script["optim_fn"] = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        for part in parts:
            exec(part, script)
            if "ddp_model = " in part:
                exec("".join(loops), script)
                script["ddp_model"].global_avg(will_revert=False)
                seen.append(values_of(script["ddp_model"]))
    return seen


def test_the_scripts_of_the_tutorial_train() -> None:
    rows = torch.tensor(run_processes(2, run_tutorial))
    assert torch.equal(rows[0], rows[1])
    assert rows.shape[1] == 6
    assert rows[0].diff(dim=0).abs().amax(1).min() > 1e-4, "every module trains"


def run_groups(rank: int) -> tuple[list[int], float, float, list[float]]:
    """On a rank of Slurm: data, pipeline and tensor groups, and gossip along the first."""
    names = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "STEP_NUM_TASKS"}
    found = {f"SLURM_{new}": os.environ.pop(old) for old, new in names.items()}
    os.environ |= {**found, "SLURM_STEP_TASKS_PER_NODE": os.environ.pop("LOCAL_WORLD_SIZE")}
    world_size = init_distributed("gloo").world_size
    pp_size = tp_size = 2
    sizes = world_size // (2 * pp_size), pp_size, tp_size
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "pipe", "tensor"))
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(
        base, mesh=mesh, gossip_dim="data", model=model, bucket_cap_mb=1e-4
    )
    assert len(optimizer.buckets) > 1
    for batch in given(rank)["dataloader"]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # The user's own messages between two steps.
        tmp = torch.full((100,), float(rank))
        dist.broadcast(tmp, group=mesh["tensor"].get_group(), group_src=0)
        told, (stage, other) = tmp[0].item(), (mesh.get_local_rank("pipe"), torch.zeros(1))
        ranks = dist.get_process_group_ranks(mesh["pipe"].get_group())
        if stage == 0:
            dist.send(torch.tensor([float(rank)]), ranks[1])
        else:
            dist.recv(other, ranks[0])
    optimizer.global_avg(may_revert=False)
    return [*(mesh.get_coordinate() or ())], told, other.item(), values_of(model)


def test_ranks_of_slurm_gossip_along_one_of_three_dimensions() -> None:
    places, told, received, rows = zip(*run_processes(8, run_groups), strict=True)
    assert [*places] == [[rank // 4, rank // 2 % 2, rank % 2] for rank in range(8)]
    assert [*told] == [rank - rank % 2 for rank in range(8)]
    assert [*received] == [rank - 2 if rank // 2 % 2 else 0 for rank in range(8)]
    for rank, row in enumerate(rows):
        alike = [other for other, each in enumerate(rows) if row == each]
        assert alike == sorted((rank, (rank + 4) % 8))
