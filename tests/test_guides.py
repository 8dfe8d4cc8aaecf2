"""The README and the guides: their Python runs, and their links lead somewhere.

The blocks of a page share a namespace and run in order, on four ranks or on eight. A block that
cannot run here is fenced as ``python no-run: <reason>``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from ranks import run_processes, run_script_on_ranks
from torch import Tensor, nn

from decent_optim_wrapper.launcher import add_arguments

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
FIRST_HOUR = ROOT / "examples" / "first_hour.md"
# A reference, whose code is signatures; lists of changes and of errors; a page of whole scripts.
NOT_RUN = {"api", "changes", "troubleshooting", "first_hour"}
PAGES = [ROOT / "README.md", *GUIDES, FIRST_HOUR, ROOT / "examples" / "benchmark" / "README.md"]
RANKS = {"mesh": 8}

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
NO_RUN = re.compile(r"python no-run: \S.*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILE = re.compile(r"\b(?:examples|tests)/[\w/]+\.\w+")

Batch = tuple[Tensor, Tensor]


class Block(NamedTuple):
    """A block of code: what stands behind its fence, the line of the fence, and its text."""

    info: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    return [
        Block(info=found[1], line=text.count("\n", 0, found.start()) + 1, code=found[2])
        for found in FENCE.finditer(text)
    ]


def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """Run a block as if it stood alone in a file that has the name and the lines of the page."""
    exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


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


def saved_by_decent_dp() -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
    return {f"_model.{name}": tensor for name, tensor in model.state_dict().items()}


class Outcome(NamedTuple):
    """What came of a page on one rank."""

    blocks: int
    # The parameters of each model that was validated.
    validated: list[list[float]]


def run_page(rank: int, page: Path, folder: Path) -> Outcome:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # decent-dp moves the model to a GPU that it sees.
    logger.disable("decent_dp")
    os.chdir(folder)
    validated: list[list[float]] = []

    def validate(model: nn.Module) -> None:
        validated.append(flat(model))

    # What the pages say is the reader's own.
    namespace = {
        "build_model": build_model,
        "loader": list(batches(rank, 8)),
        "load_shard": lambda shard, shards: batches(shard, 100),
        "loss": loss,
        "validate": validate,
        "folder": folder,
        "saved": saved_by_decent_dp(),
    }
    torch.manual_seed(rank)
    run = [block for block in blocks(page.read_text(encoding="utf-8")) if block.info == "python"]
    for number, block in enumerate(run):
        # Where a page has several scripts, the ranks meet again on the same store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        run_block(page, block, namespace)
    if dist.is_initialized():
        dist.destroy_process_group()
    return Outcome(len(run), validated)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES[:-1] if p.stem not in NOT_RUN], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    ranks = run_processes(RANKS.get(page.stem, 4), run_page, page, tmp_path)
    assert ranks[0].blocks > 0
    assert len({rank.blocks for rank in ranks}) == 1
    torch.manual_seed(0)
    start = flat(build_model())
    for models in zip(*(rank.validated for rank in ranks if rank.validated), strict=True):
        assert all(model == models[0] for model in models), "what is validated is the average"
        assert models[0] != start


NUMBER = re.compile(r"-?\d+\.\d+")


# The processes of tests have no log.
SHOW_THE_LINE = """
from loguru import logger

logger.enable("decent_optim_wrapper.start.summary")
"""


class Script(NamedTuple):
    """What a script of the page should print, and what it does print, in the order of lines."""

    expected: str
    printed: str
    # What its ranks write beside.
    others: list[str]


@pytest.fixture(scope="module")
def first_hour(tmp_path_factory: pytest.TempPathFactory) -> list[Script]:
    page = blocks(FIRST_HOUR.read_text(encoding="utf-8"))
    scripts = [block.code for block in page if block.info == "python"]
    texts = [block.code.strip() for block in page if block.info == "text"]
    expected = [text for text in texts if text.startswith("rank ")]
    folder, found = tmp_path_factory.mktemp("first_hour"), []
    for script, text in zip(scripts, expected, strict=True):
        (folder / "train.py").write_text(SHOW_THE_LINE + script)
        lines = run_script_on_ranks(2, "train.py", cwd=folder).splitlines()
        # Each rank's lines stay in their order.
        printed = sorted((line for line in lines if line.startswith("rank ")), key=rank_of)
        others = [line for line in lines if not line.startswith("rank ")]
        found.append(Script(text, "\n".join(printed), others))
    return found


def rank_of(line: str) -> str:
    return line.partition(":")[0]


def figures(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.slow
def test_the_scripts_of_the_first_hour_print_what_stands_below_them(
    first_hour: list[Script],
) -> None:
    assert len(first_hour) == 3
    for expected, printed, _ in first_hour:
        assert NUMBER.sub("", printed) == NUMBER.sub("", expected)
        # Another CPU may round differently.
        assert figures(printed) == pytest.approx(figures(expected), abs=2e-4)


@pytest.mark.slow
def test_the_scripts_of_the_first_hour_log_the_line_that_the_page_shows(
    first_hour: list[Script],
) -> None:
    (shown,) = re.findall(r"^\d{4}-.* - (.*)$", FIRST_HOUR.read_text("utf-8"), re.MULTILINE)
    logged = [
        [line.partition(" - ")[2] for line in script.others if "decent_optim_wrapper" in line]
        for script in first_hour
    ]
    assert logged == [[], [shown], [shown]]


@pytest.mark.slow
def test_what_is_the_same_in_the_first_hour_is_so_digit_by_digit(
    first_hour: list[Script],
) -> None:
    for texts in zip(*((script.expected, script.printed) for script in first_hour), strict=True):
        reduced, gossiped, (average, own, same, other) = map(figures, texts)
        assert reduced[0] == reduced[1]
        assert gossiped[0] != gossiped[1]
        assert average == same == pytest.approx(sum(gossiped) / 2, abs=2e-5)
        assert [own, other] == gossiped


# What the elastic guide says is the reader's own. Rank 0 is killed in its fifth step. From their
# tenth step on the others wait a little for it in every step, until it is back.
READERS_PART = """
import itertools, os, signal, sys, time, torch
from pathlib import Path

torch.manual_seed(0)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
build_model = lambda: torch.nn.Linear(4, 1)
validate = lambda model: print("validated by rank", os.environ["RANK"], flush=True)
steps = itertools.count(1)


def load_shard(shard, shards):
    if not is_first:
        Path("back").touch()
    return iter(torch.randn(8, 4) for _ in range(1000))


def loss(model, batch):
    step = next(steps)
    if is_first and os.environ["RANK"] == "0" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 3
    while is_first and step > 10 and time.monotonic() < deadline and not Path("back").exists():
        time.sleep(0.05)
    return model(batch).square().mean()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # every rank is a fresh interpreter, as for a user
def test_the_script_of_the_elastic_guide_goes_on_without_rank_0_which_comes_back(
    tmp_path: Path,
) -> None:
    page = blocks((ROOT / "examples" / "guides" / "elastic.md").read_text(encoding="utf-8"))
    training = [block.code for block in page if block.info == "python"]
    (tmp_path / "train.py").write_text("".join([READERS_PART, *training]))
    (command,) = (each.code.split() for each in page if each.code.startswith("python -m"))
    assert command[3:5] == ["run", "--nproc-per-node"]
    command[5] = "2"
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 ended (killed by SIGKILL); it is started again" in done.stderr
    assert (tmp_path / "back").exists()
    assert done.stdout == "[rank 0] validated by rank 0\n"
    assert "terminate called" not in done.stderr


def test_the_recipes_of_the_elastic_guide_can_be_parsed() -> None:
    """And what they start takes their options."""
    yaml = pytest.importorskip("yaml")
    page = blocks((ROOT / "examples" / "guides" / "elastic.md").read_text(encoding="utf-8"))
    (slurm,) = (block.code for block in page if "srun" in block.code)
    subprocess.run(["bash", "-n"], input=slurm, text=True, check=True)
    (manifest,) = (block.code for block in page if block.info == "yaml")
    service, job = yaml.safe_load_all(manifest)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    for line in (slurm.partition("bash -c")[2].strip().strip("'"), *container["args"]):
        words = shlex.split(line.replace("\\\n", " "))
        words = [re.sub(r"\$ENDPOINT", "host:1", word) for word in words]
        words = [re.sub(r"\$\w+", "2", word) for word in words[words.index("run") + 1 :]]
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        args = parser.parse_args(words)
        assert args.command == ["train.py"]
        assert args.endpoint is not None
        assert args.nnodes == 2


def test_an_error_names_the_page_and_its_line() -> None:
    page = Path("page.md")
    text = "# Title\n\n```python\nname = 1\n```\n\n```python\nname += 1\n1 / 0\n```\n"
    namespace: dict[str, Any] = {}
    first, second = blocks(text)
    run_block(page, first, namespace)
    with pytest.raises(ZeroDivisionError) as error:
        run_block(page, second, namespace)
    frame = traceback.extract_tb(error.tb)[-1]
    assert (frame.filename, frame.lineno) == ("page.md", 9)
    assert namespace["name"] == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}_{page.stem}")
def test_a_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        # A drawing is text.
        runs = block.info in ("python", "sh", "text", "yaml")
        assert runs or NO_RUN.fullmatch(block.info), f"line {block.line}: {block.info!r}"


SCRIPTS = [
    path
    for folder in ("", "benchmark", "integrations")
    for path in sorted((ROOT / "examples" / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
HOW_LONG = re.compile(
    r"\d s of CPU time|\d s on 2|\btakes? some seconds"
    r"|--minutes|\b(?:\d|an?|two|four) minutes?\b|\bhours\b"
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_how_long_it_takes(script: Path) -> None:
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert text is not None
    assert HOW_LONG.search(" ".join(text.split()))


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = HEADING.findall(prose(page.read_text(encoding="utf-8")))
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert max(Counter(slugs).values()) == 1, f"{page}: two headings of one name"
    return set(slugs)


@pytest.mark.parametrize(
    "page",
    [*PAGES, Path(__file__).parent / "README.md"],
    ids=lambda page: f"{page.parent.name}_{page.stem}",
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(prose(text)) if not link.startswith("https://")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
    for name in FILE.findall(text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", [*GUIDES, FIRST_HOUR], ids=lambda page: page.stem)
def test_a_guide_begins_with_when_one_needs_it(page: Path) -> None:
    title, empty, first = page.read_text(encoding="utf-8").splitlines()[:3]
    assert title.startswith("# ")
    assert not empty
    assert re.match("Read this page (if|when|before|to) ", first)


def test_every_guide_is_linked_from_the_readme() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    links = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(text))}
    assert set(PAGES[1:]) <= links


def test_every_test_file_stands_in_the_table_of_the_tests() -> None:
    here = Path(__file__).parent
    rows = (line.split("|") for line in (here / "README.md").read_text("utf-8").splitlines())
    named = [name.strip() for row in rows if len(row) == 4 for name in row[2].split(",")]
    files = sorted(path.stem.removeprefix("test_") for path in here.glob("test_*.py"))
    assert sorted(named) == sorted([*files, "files", "---"])
