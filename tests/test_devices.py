"""Control messages and plans stay on their device, whatever the default device is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import backward, flatten, make_params, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import Schedule, StateAverage
from decent_optim_wrapper.checkpoint import Checkpoints


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_default_device_does_not_reach_the_messages_between_ranks(
    topology: str, tmp_path: Path
) -> None:
    def main(rank: int, group: dist.ProcessGroup, device: str) -> list[Tensor]:
        params, late = make_params(), make_params(seed=3)
        with torch.device(device):
            options: Any = {
                "schedule": Schedule(global_avg_every=2),
                "extensions": [StateAverage()],
            }
            wrapper = wrap(params, group, topology=topology, **options)
            checkpoints = Checkpoints(tmp_path / device, wrapper)
            for step in range(4):
                with torch.device("cpu"):
                    backward(params, rank, step)
                wrapper.step()
            wrapper.add_param_group({"params": late})
            with wrapper.averaged():
                averaged = flatten(params)
            wrapper.global_avg(may_revert=False)
            distance = torch.tensor(wrapper.consensus_distance(), device="cpu")
            wrapper.synchronize()
            checkpoints.save(4, {"optimizer": wrapper.state_dict()})
            assert checkpoints.load() is not None
        return [flatten(params), flatten(late), averaged, distance]

    usual, odd = (run_threads(2, partial(main, device=device)) for device in ("cpu", "meta"))
    for one, other in zip(usual, odd, strict=True):
        assert all(map(torch.equal, one, other))
    assert not torch.equal(usual[0][0], flatten(make_params()))
