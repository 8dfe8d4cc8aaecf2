"""An error says what to do: the remedies that once were in a table of the README."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_threads

from decent_optim_wrapper import DecentOptimWrapper, Schedule, TopologyFactory
from decent_optim_wrapper.integrations.versions import require
from decent_optim_wrapper.start.launch import find_launch
from decent_optim_wrapper.topo import Hierarchical, Ring

SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


class Mistake(NamedTuple):
    """A call that raises, and what its text advises."""

    call: Callable[[], object]
    advice: str


def launched(**variables: str) -> Callable[[], object]:
    return lambda: find_launch(SRUN | variables)


MISTAKES = {
    "nodes of different sizes": Mistake(
        lambda: TopologyFactory.create("ring", 6, 4), "leave it out"
    ),
    "a topology's instance": Mistake(
        lambda: TopologyFactory.add_topology("mine", Ring(4)),  # type: ignore[arg-type]
        "pass the class itself",
    ),
    "a name of a topology": Mistake(
        lambda: TopologyFactory.create("Rings", 4), "did you mean 'ring'?"
    ),
    "a name like no topology's": Mistake(
        lambda: TopologyFactory.create("torus", 4), "'torus'; the known ones are complete, ring"
    ),
    "a name of an inner topology": Mistake(
        lambda: Hierarchical(8, 2, inner="one_peer_exp"), "did you mean 'one-peer-exp'?"
    ),
    "a choice of one of the records": Mistake(
        lambda: Schedule(average_state="averge"),  # type: ignore[arg-type]
        "did you mean 'average'?",
    ),
    "a size that does not fit": Mistake(
        lambda: TopologyFactory.create("ring", 5), "topologies that fit: complete"
    ),
    "tasks of no node": Mistake(
        launched(SLURM_STEP_TASKS_PER_NODE="two"), "start the script with srun"
    ),
    "a node too many": Mistake(
        launched(SLURM_STEP_TASKS_PER_NODE="1,2", SLURM_NODEID="9"), "start the script with srun"
    ),
    "variables of two launchers": Mistake(
        launched(SLURM_STEP_TASKS_PER_NODE="3(x1)"), "unset those that are left"
    ),
}


@pytest.mark.parametrize(
    ("package", "found"), [("torch", "but 2."), ("no-such-framework", "but it is not installed")]
)
def test_a_framework_that_is_missing_or_too_old_is_named(package: str, found: str) -> None:
    with pytest.raises(ImportError, match=f"expects {package}>=90.1,<91, {found}") as error:
        require(package, (90, 1), "lightning")
    assert "pip install '.[lightning]' in a clone" in str(error.value)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_text_says_what_to_do(mistake: Mistake) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        mistake.call()
    assert mistake.advice in str(error.value)


def test_a_topology_of_other_sizes_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def main(rank: int, group: dist.ProcessGroup) -> str:
        base = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        with pytest.raises(ValueError, match="was built for world_size=4") as error:
            DecentOptimWrapper(base, topology=Ring(4), process_group=group)
        return str(error.value)

    assert all("build the topology with the sizes of this run" in t for t in run_threads(2, main))
