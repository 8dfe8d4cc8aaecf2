"""Models whose parameters are views of the buckets, in the hands of other savers."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from modules import backward, fill, flat, wrap
from ranks import run_threads
from safetensors.torch import load_model, save_model
from torch import Tensor, nn


def tied_model(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    model[4].weight = model[1].weight
    fill(model, seed)
    return model


def saved_bytes(part: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    return len(file.getvalue())


def test_a_copy_of_a_model_with_views_is_exported_whole_and_in_part(tmp_path: Path) -> None:
    """The recipe of the guide to checkpoints."""
    bucket_mb = 3 * 40 * 41 * 4 / 2**20

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = wrap(tied_model(), group, bucket_size_in_mb=bucket_mb)
        for step in range(2):
            inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank + 10 * step))
            backward(model(inputs).square().mean())
        with model.optimizer.averaged():
            expected = flat(model)
            exported = copy.deepcopy(model.module)
        # The reason for the copy: torch saves the bucket of a part, and safetensors refuses it.
        plain = saved_bytes(tied_model()[2])
        assert saved_bytes(model.module.get_submodule("2")) > 1.5 * plain
        with pytest.raises(RuntimeError):
            save_model(model.module, str(tmp_path / f"{rank}.refused"))

        assert saved_bytes(exported.get_submodule("2")) == plain
        save_model(exported, str(tmp_path / f"{rank}.safetensors"))
        loaded = tied_model(seed=1)
        load_model(loaded, tmp_path / f"{rank}.safetensors")
        assert torch.equal(flat(loaded), expected)
        assert exported.get_parameter("4.weight") is exported.get_parameter("1.weight")
        assert not torch.equal(flat(model), expected)
        assert not torch.equal(flat(tied_model()), expected)
        return expected

    assert torch.equal(*run_threads(2, main))
