"""The README and the guides: their Python runs, and their links lead somewhere.

The blocks of a page share a namespace and run in order, on two to eight ranks. A block that
cannot run here is fenced as ``python no-run: <reason>``.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from etcd_servers import free_ports
from forked import forked_python
from ranks import run_processes, run_script, run_script_on_ranks
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.elastic.launcher.options import add_arguments

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "guides"
GUIDES = [page for page in sorted(FOLDER.glob("*.md")) if page.stem != "README"]
CLUSTERS = FOLDER / "clusters.md"
ELASTIC = FOLDER / "elastic.md"
FIRST_HOUR = ROOT / "examples" / "first_hour.md"
TESTS = Path(__file__).parent / "README.md"
# Without Python to run.
LISTS = [FOLDER / "README.md", *sorted((FOLDER / "reference").glob("*.md"))]
# Lists of changes and of errors; a page of whole scripts.
NOT_RUN = {"changes", "troubleshooting", "first_hour", "slow_network", "several_sites"}
PAGES = [ROOT / "README.md", *GUIDES, FIRST_HOUR, ROOT / "examples" / "benchmark" / "README.md"]
RANKS = {"mesh": 8, "checkpoints": 4, "topologies": 4}

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
NO_RUN = re.compile(r"python no-run: \S.*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILE = re.compile(r"\b(?:examples|tests)/[\w/]+\.\w+")
Batch = tuple[Tensor, Tensor]
Models = list[list[float]]


class Block(NamedTuple):
    """A block of code: what stands behind its fence, the line of the fence, and its text."""

    info: str
    line: int
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(info=found[1], line=text.count("\n", 0, found.start()) + 1, code=found[2])
        for found in FENCE.finditer(text)
    ]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1))


def flat(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def batches(rank: int, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        inputs = torch.randn(16, 10, generator=generator)
        yield inputs, inputs.sum(dim=1, keepdim=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


def run_blocks(page: Path, namespace: dict[str, Any], last: int | None) -> None:
    run = [block for block in blocks_of(page) if block.info == "python"][:last]
    assert run
    for number, block in enumerate(run):
        # Where a page has several scripts, the ranks meet again on the same store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        # Errors name the page and its line.
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


def run_page(rank: int, page: Path, folder: Path, death: int | None) -> Models:
    """The parameters of each model that was validated.

    Args:
        rank: this rank.
        page: the page, all of whose blocks run.
        folder: where the ranks may write.
        death: the step of the first block, which alone runs then, in which rank 0 kills itself.
    """
    os.chdir(folder)
    validated: Models = []
    steps = itertools.count(1)

    def loss_or_death(model: nn.Module, batch: Batch) -> Tensor:
        if rank == 0 and next(steps) == death:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    # What the pages say is the reader's own.
    namespace: dict[str, Any] = {
        "build_model": build_model,
        "loader": list(batches(rank, 8)),
        "data": [(inputs[0], targets[0]) for inputs, targets in batches(0, 200)],
        "load_shard": lambda shard, shards: batches(shard, 100),
        "loss": loss_or_death,
        "validate": lambda model: validated.append(flat(model)),
        "folder": folder,
    }
    torch.manual_seed(rank)
    run_blocks(page, namespace, last=1 if death else None)
    if dist.is_initialized():
        dist.destroy_process_group()
    return validated


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES[:-1] if p.stem not in NOT_RUN], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    check_averages(run_processes(RANKS.get(page.stem, 2), run_page, page, tmp_path, None))


@pytest.mark.slow
def test_the_script_of_the_elastic_guide_goes_on_without_rank_0(tmp_path: Path) -> None:
    ranks = run_processes(2, run_page, ELASTIC, tmp_path, 5, lost={0})
    assert any(ranks)
    check_averages(ranks)


def check_averages(ranks: list[Models]) -> None:
    """Check that what was validated is the same on all ranks, and has been trained."""
    torch.manual_seed(0)
    start = flat(build_model())
    for models in zip(*filter(None, ranks), strict=True):
        assert all(model == models[0] for model in models), "what is validated is the average"
        assert models[0] != start


def test_the_recipes_of_the_cluster_guide_can_be_parsed() -> None:
    """And the launchers that they start take their options."""
    yaml = pytest.importorskip("yaml")
    page = blocks_of(CLUSTERS)
    scripts = [block.code for block in page if block.info == "sh"]
    (kubernetes, sky) = (list(yaml.safe_load_all(b.code)) for b in page if b.info == "yaml")
    spec = kubernetes[1]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert kubernetes[0]["metadata"]["name"] == spec["subdomain"]
    (launched,) = (script for script in scripts if "bash -c" in script)
    launchers = [
        launched.partition("bash -c")[2].strip().strip("'"),
        *container["args"],
        sky[0]["run"],
    ]
    for script in (*scripts, *launchers):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for line in launchers:
        words = shlex.split(line.replace("\\\n", " ").replace("$ENDPOINT", "host:1"))
        words = [re.sub(r"\$\w+", "2", word) for word in words[words.index("run") + 1 :]]
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        args = parser.parse_args(words)
        assert (args.script, args.nnodes) == ("train.py", 2)
        assert ("endpoint" in args) == (args.store is None)


def cells_of_the_cluster_guide(folder: Path, world_size: int) -> list[str]:
    """What the page writes into two cells, which print, and the module that they need."""
    page = blocks_of(CLUSTERS)
    (script,) = (block.code for block in page if block.info == "python")
    begin = "from test_guides import batches, build_model, loss\ndef train():\n"
    end = f"assert optimizer.topology.world_size == {world_size}\nprint('trained', optimizer.round)"
    body = f"loader = batches(0, 8)\n{script}{end}"
    (folder / "my_module.py").write_text(begin + indent(body, "    "))
    (port,) = free_ports(1)
    cells = [block.code for block in page if "rank_main" in block.code]
    return [
        cell.replace("29500", str(port))
        .replace('"4"', f'"{world_size}"')
        .replace("=4", f"={world_size}")
        for cell in cells
    ]


@pytest.mark.slow
def test_the_program_of_the_cluster_guide_starts_its_ranks(tmp_path: Path) -> None:
    module, program = cells_of_the_cluster_guide(tmp_path, 4)
    magic, _, module = module.partition("\n")
    assert magic == "%%writefile my_ranks.py"
    (tmp_path / "my_ranks.py").write_text(module)
    # Without importing torch again in all of them.
    forked = program.replace(
        "mp.spawn(rank_main", 'mp.start_processes(rank_main, start_method="fork"'
    )
    assert forked != program
    (tmp_path / "program.py").write_text(forked)
    printed = run_script("program.py", cwd=tmp_path)
    # The output of ranks that print at the same time is mixed.
    assert [printed.count(each) for each in ("trained", "8")] == [4, 4], printed


FORKED_KERNEL = """
import multiprocessing, os, sys
from forked import PROCESSES
from ipykernel import kernelapp

os.environ["JPY_PARENT_PID"] = str(os.getppid())  # with which it ends
os.chdir({folder!r})
sys.path.insert(0, {folder!r})
sys.argv = ["", "-f", "{{connection_file}}"]
multiprocessing.get_context = lambda method: PROCESSES
kernelapp.launch_new_instance()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_cells_of_the_cluster_guide_train_in_a_notebook(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    assert manager.kernel_spec is not None
    # Without importing torch again in the kernel and in all ranks.
    kernel = FORKED_KERNEL.format(folder=str(tmp_path))
    manager.kernel_spec.argv = [*shlex.split(forked_python()), "-c", kernel]
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=100)
    try:
        for cell in cells_of_the_cluster_guide(tmp_path, 2):
            reply = client.execute_interactive(cell, timeout=280, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    # The ranks print where the kernel does.
    printed = capfd.readouterr().out
    # Two processes print, and may do so at the same time: their words, in any order.
    words = re.findall(r"trained|8", printed[printed.index("trained") :])
    assert sorted(words) == ["8", "8", "trained", "trained"], printed


NUMBER = re.compile(r"(-?\d+\.\d+)")
# The processes of tests have no log.
SHOW_THE_LINE = """
from loguru import logger

logger.enable("decent_optim_wrapper.start.summary")
"""


@pytest.mark.slow
def test_the_scripts_of_the_first_hour_print_what_stands_below_them(tmp_path: Path) -> None:
    page = blocks_of(FIRST_HOUR)
    scripts = [block.code for block in page if block.info == "python"]
    texts = [block.code for block in page if block.info == "text"]
    expected = [text.splitlines() for text in texts if text.startswith("rank ")]
    shown = re.findall(r"^\d{4}-.* - (.*)$", FIRST_HOUR.read_text("utf-8"), re.MULTILINE)
    # How long this machine waits, and why, is another matter.
    shown[1] = shown[1].partition("network")[0]
    logged = []
    for script, on_the_page in zip(scripts, expected, strict=True):
        (tmp_path / "train.py").write_text(SHOW_THE_LINE + script)
        lines = run_script_on_ranks(4, "train.py", cwd=tmp_path).splitlines()
        # Each rank's lines stay in their order.
        printed = sorted(
            (line for line in lines if line.startswith("rank ")), key=lambda line: line[:7]
        )
        # Texts and figures by turns. Another CPU may round differently.
        ours, theirs = (NUMBER.split("\n".join(each)) for each in (printed, on_the_page))
        assert ours[::2] == theirs[::2]
        figures = [float(each) for each in theirs[1::2]]
        assert [float(each) for each in ours[1::2]] == pytest.approx(figures, abs=2e-4)
        logged.append(
            [line.partition(" - ")[2] for line in lines if "decent_optim_wrapper" in line]
        )
    assert [len(each) for each in logged] == [0, 2, 2]
    for summary, waits in logged[1:]:
        assert summary == shown[0]
        assert waits.startswith(shown[1])


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = HEADING.findall(prose(page))
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert max(Counter(slugs).values()) == 1, f"{page}: two headings of one name"
    return set(slugs)


@pytest.mark.parametrize(
    "page", [*PAGES, *LISTS, TESTS], ids=lambda page: f"{page.parent.name}_{page.stem}"
)
def test_links_lead_somewhere_and_a_block_is_run_or_says_why_not(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if not link.startswith("https://")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name
    for block in blocks_of(page):
        # A drawing is text.
        runs = block.info in ("python", "sh", "text", "yaml", "{eval-rst}") or page == TESTS
        assert runs or NO_RUN.fullmatch(block.info), f"line {block.line}: {block.info!r}"


def test_every_guide_is_linked_from_the_readme() -> None:
    links = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(PAGES[0]))}
    assert {*PAGES[1:], FOLDER / "reference" / "README.md"} <= links


def test_the_table_of_defaults_names_options_and_the_functions_that_decide_them() -> None:
    row = re.compile(r"^\| (`.*) \| (`.*`) in `([\w/]+\.py)`", re.MULTILINE)
    rows = row.findall(prose(FOLDER / "how_it_works.md"))
    assert len(rows) >= 6
    for options, functions, path in rows:
        names = {*re.findall(r"`(\w+)`", options)}
        assert names <= {*inspect.signature(DecentOptimWrapper).parameters}
        source = (ROOT / "decent_optim_wrapper" / path).read_text(encoding="utf-8")
        for name in re.findall(r"(\w+)`", functions):
            assert f"def {name}(" in source, (name, path)
