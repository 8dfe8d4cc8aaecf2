"""The examples, launched as a user launches them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import run_script, run_script_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
# Looked for and not imported, which every worker would wait for.
missing = [name for name in ("sklearn", "torchvision") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"the examples need {missing}"),
]


class End(NamedTuple):
    """How a run of train_digits.py ended: test accuracy in percent, and MiB sent per rank."""

    accuracy: float
    sent: float


def ends(out: str) -> dict[str, End]:
    found = re.findall(r"^(.*): test accuracy (.*)%, (.*) MiB sent$", out, re.MULTILINE)
    return {name: End(float(accuracy), float(sent)) for name, accuracy, sent in found}


def test_four_ranks_learn_the_digits_with_the_defaults(tmp_path: Path) -> None:
    runs = ends(run_script_on_ranks(4, EXAMPLES / "train_digits.py", cwd=tmp_path))
    assert set(runs) == {"ring, gossip_every=1"}
    assert runs["ring, gossip_every=1"].accuracy >= 97
    assert (tmp_path / "runs" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_the_runs_to_compare_with_print_what_they_send(tmp_path: Path) -> None:
    options = ("--gossip-every", "1", "4", "--ddp", "--non-iid", "--epochs", "2")
    script = EXAMPLES / "train_digits.py"
    runs = ends(run_script_on_ranks(2, script, *options, cwd=tmp_path))
    always, rarely = runs["ring, gossip_every=1"].sent, runs["ring, gossip_every=4"].sent
    assert 0.2 * always < rarely < 0.3 * always
    # In a pair an all-reduce sends the parameters once, as gossip does.
    assert runs["DDP"].sent == pytest.approx(always, rel=0.02)


def test_digits_also_run_as_a_plain_process(tmp_path: Path) -> None:
    runs = ends(run_script(EXAMPLES / "train_digits.py", "--epochs", "3", cwd=tmp_path))
    assert runs["ring, gossip_every=1"].sent == 0


def test_the_digits_are_learnt_though_ranks_are_killed_and_one_comes_back(tmp_path: Path) -> None:
    script = EXAMPLES / "survive_digits.py"
    out = run_script(script, "--rejoin", "--epochs", "8", "--lr", "0.04", cwd=tmp_path)
    assert "rank 0 was killed at step 5" in out
    assert "rank 2 was killed at step 11" in out
    back = re.findall(r"rank 0 starts at step (\d+)", out)
    assert back[0] == "0"
    assert int(back[1]) >= 55
    accuracy = re.search(r"ranks \(0, 1, 3\) are left: averaged model (.*)%", out)
    assert accuracy is not None, out
    assert float(accuracy[1]) >= 90


def test_the_custom_topology_can_be_looked_at_and_trained_on(tmp_path: Path) -> None:
    script = EXAMPLES / "custom_topology.py"
    assert "star: consensus rate" in run_script(script, cwd=tmp_path)
    assert "largest error of a weight 0.0" in run_script_on_ranks(3, script, cwd=tmp_path)


# Before training the loss is that of all 103 characters being as likely, 4.6, or above.
SMALL_GPT = "--width", "64", "--depth", "2", "--steps", "20", "--lr", "0.01"


class Point(NamedTuple):
    """What train_gpt.py has printed: validation loss, and MiB sent per rank."""

    loss: float
    sent: float


def gpt_runs(out: str) -> dict[str, list[Point]]:
    """By name; each has ten points."""
    line = r"^(.*), step \d+: validation loss (.*), (.*) MiB sent$"
    runs: dict[str, list[Point]] = {}
    for name, loss, sent in re.findall(line, out, re.MULTILINE):
        runs.setdefault(name, []).append(Point(float(loss), float(sent)))
    assert all(len(run) == 10 for run in runs.values()), out
    return runs


@pytest.mark.parametrize("inner", ["fsdp", "tp"])
def test_a_gpt_learns_whose_replicas_are_spread_over_a_mesh(inner: str, tmp_path: Path) -> None:
    options = ("--inner", inner, *SMALL_GPT)
    out = run_script_on_ranks(4, EXAMPLES / "train_gpt.py", *options, cwd=tmp_path)
    ((name, run),) = gpt_runs(out).items()
    assert name == "ring, float32"
    assert run[-1].loss < 3.5
    # In pairs each step sends what of the model of 0.45 MiB is on this rank.
    assert 20 * 0.2 < run[-1].sent < 20 * 0.3
    assert (tmp_path / "runs" / "gpt.png").read_bytes().startswith(b"\x89PNG")


def test_a_gpt_learns_with_rounds_within_a_step_and_under_the_next_one(tmp_path: Path) -> None:
    script, losses = EXAMPLES / "train_gpt.py", set()
    for option in ((), ("--no-overlap",)):
        ((name, run),) = gpt_runs(
            run_script_on_ranks(4, script, *option, *SMALL_GPT, cwd=tmp_path)
        ).items()
        assert name == "ring, float32" + ", no overlap" * bool(option)
        assert run[-1].loss < 3.5
        assert 20 * 0.4 < run[-1].sent < 20 * 0.5
        losses.add(run[-1].loss)
    assert len(losses) == 2


def test_a_gpt_learns_shards_by_topic_in_every_format_and_with_ddp(tmp_path: Path) -> None:
    options = ("--shards", "topics", "--gradient-tracking", "--comm-dtype", "float32", "int8")
    command = (*options, "--ddp", *SMALL_GPT)
    out = run_script_on_ranks(4, EXAMPLES / "train_gpt.py", *command, cwd=tmp_path)
    runs = gpt_runs(out)
    assert list(runs) == ["ring, float32, tracking", "ring, int8, tracking", "DDP"]
    assert all(run[-1].loss < min(3.5, run[0].loss) for run in runs.values()), out
    exact, coded, reduced = (run[-1].sent for run in runs.values())
    # Parameters and estimates, as against 1.5 copies of the gradients. The first meeting of two
    # ranks is not coded.
    assert reduced == pytest.approx(exact * 1.5 / 2, rel=0.02)
    assert 0.25 < coded / exact < 0.35


def test_shards_by_topic_are_neighbouring_parts_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    load_data = importlib.import_module("train_gpt").load_data
    whole = load_data("topics", 0, 1, torch.device("cpu"))
    for way in ("topics", "shuffled"):
        parts = [load_data(way, rank, 4, torch.device("cpu")) for rank in range(4)]
        assert all(torch.equal(part.held_out, whole.held_out) for part in parts)
        shards = torch.cat([part.shard for part in parts])
        assert torch.equal(shards.bincount(), whole.shard.bincount())
        assert torch.equal(shards, whole.shard) == (way == "topics")


def test_a_mesh_sends_along_the_slow_dimension_what_is_computed(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "mesh_bytes.py"
    out = run_script(script, "--measured", "2", "--computed", "2", cwd=tmp_path)
    rows = dict(re.findall(r"^\| (HSDP.*?|gossip.*?) \| (.*) \|$", out, re.MULTILINE))
    assert rows == {
        "HSDP, float32": "1.000 | 1.000",
        "HSDP, bf16": "0.500 | 0.500",
        "gossip in pairs, float32": "1.000 | 1.000",
        "gossip in pairs, bf16": "0.500 | 0.500",
        "gossip in pairs, bf16, every 4 steps": "0.125 | 0.125",
    }


def test_the_benchmarks_run_without_a_network_lab(tmp_path: Path) -> None:
    """Behaviour only: tests time nothing."""
    benchmark = EXAMPLES / "benchmark"
    small = ("--sizes", "1", "--steps", "2", "--warmup", "1", "--rate", "", "--ranks", "2")
    methods = ("DDP", "ours", "ours, auto", "ours, complete, int8", "bare exchange")
    uneven = ("--jitter", "0.3", "--slow-factor", "1.5", "--adamw")
    command = (*small, *uneven, "--methods", *methods)
    out = run_script(benchmark / "step_time.py", *command, cwd=tmp_path)
    assert all(f"| {method} |" in out for method in methods)
    assert (tmp_path / "runs" / "step_time.png").exists()
    out = run_script(
        benchmark / "overhead.py", "--parameters", "1e5", "--repeats", "1", cwd=tmp_path
    )
    assert "one round, views:" in out
    out = run_script(benchmark / "codec_speed.py", "--mib", "0.1", "--repeats", "1", cwd=tmp_path)
    assert re.findall(r"^\| (\w+) \| ([\d.]+) \|", out, re.MULTILINE) == [
        ("bfloat16", "2.000"),
        ("int8", "1.022"),
        ("int4", "0.519"),
    ]
    assert "| ring |" in run_script(benchmark / "startup.py", "--world-sizes", "16", cwd=tmp_path)
    rows = ("DDP", "mixing_rate=lr/lr_max", "QGSGD, gossip_every=4")
    once = ("--world-size", "2", "--epochs", "1", "--seeds", "0", "--lrs", "0.1")
    out = run_script(benchmark / "schedules.py", *once, "--rows", *rows, cwd=tmp_path)
    assert all(f"| {row} | 0.1 |" in out for row in rows)


def test_codes_are_compared_by_accuracy_and_bytes(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "codes.py"
    codes = ("None", "int8", "TopKCodec(16)")
    small = ("--world-sizes", "4", "--seeds", "0", "--epochs", "1", "--codes", *codes)
    out = run_script(script, *small, cwd=tmp_path)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    sent = {row[0]: float(row[1]) for row in cells[2:]}
    assert sent["`int8`"] < 0.3 * sent["`None`"]
    assert sent["`TopKCodec(16)`"] < 0.1 * sent["`None`"]
    assert all(len(row) == 4 and "%" in row[2] for row in cells[2:])


def test_tracking_is_compared_with_ddp_for_every_base(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "tracking.py"
    small = ("--world-sizes", "4", "--batch", "64", "--topologies", "ring", "--epochs", "1")
    one = ("--bases", "SGD", "--methods", "DDP", "--seeds", "0", "1", "--lrs", "1e-6", "0.02")
    assert "| 0.02 |" in run_script(script, *small, *one, cwd=tmp_path)
    out = run_script(script, *small, "--seeds", "0", "--lrs", "0.01", cwd=tmp_path)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    sent = {(row[0], row[3]): float(row[-1]) for row in cells[2:]}
    for base, plain in (("SGD", 1.0), ("AdamW", 1.0), ("Schedule-Free", 2.0)):
        bytes_of = {method: value for (name, method), value in sent.items() if name == base}
        assert bytes_of["DDP"] == pytest.approx(1.5 * bytes_of["plain gossip"], rel=0.02)
        tracked = bytes_of["plain gossip"] * (plain + 1)
        assert bytes_of["tracking"] == pytest.approx(tracked, rel=0.02)
        assert bytes_of["tracking, int8"] < bytes_of["tracking"] / (1.5 if plain > 1 else 3.9)
        assert bytes_of["tracking, int4"] < bytes_of["tracking, int8"]


def test_the_timeline_shows_what_a_method_does_in_a_step(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "timeline.py"
    small = ("--size", "8", "--rate", "", "--ranks", "2", "--steps", "2")
    methods = ("no communication", "ours", "ours, in the backward pass")
    out = run_script(script, *small, "--methods", *methods, cwd=tmp_path)
    head, *rows = (line.strip("|").split("|") for line in out.splitlines() if line[:2] == "| ")
    columns = [column.strip() for column in head]
    cells = {row[0].strip(): [float(cell.split()[0]) for cell in row[1:]] for row in rows}
    assert cells.keys() == set(methods)
    for method, values in cells.items():
        spent = dict(zip(columns[1:], values, strict=True))
        # The layers sleep for 0.1 s and 0.2 s.
        assert spent["forward"] >= 95
        assert spent["backward"] >= 190
        assert spent["update"] > 0
        for activity in ("wait", "mix", "send"):
            assert (spent[activity] > 0) == method.startswith("ours"), (method, activity)
    assert (tmp_path / "runs" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_link_is_idle_where_its_counters_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmark"))
    timeline = importlib.import_module("timeline")
    traffic = importlib.import_module("netlab").Traffic

    def sent(ms: int) -> int:
        """100 MB/s until 0.3 s, and again from 0.5 s on."""
        return 100_000 * (min(ms, 300) + max(0, ms - 500))

    samples = [
        timeline.Sample(ms / 1000, [traffic(0, 0), traffic(sent=sent(ms), received=0)])
        for ms in range(1000)
    ]
    spans = [timeline.Span("backward", 0.1, 0.35), timeline.Span("wait", 0.35, 0.6)]
    trace = timeline.Trace(spans=spans, steps=[0.1, 0.9], retransmitted=0)
    recording = timeline.Recording(traces=[trace, trace], samples=samples)
    (idle,) = timeline.idle_times(recording, rank=1, rate=1e8)
    assert (idle.start, idle.end) == (pytest.approx(0.3, abs=0.005), pytest.approx(0.5, abs=0.005))
    assert idle.during == "wait"
    (whole,) = timeline.idle_times(recording, rank=0, rate=1e8)
    assert whole.end - whole.start > 0.79


def test_the_time_to_an_accuracy_is_that_of_the_best_learning_rate(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "time_to_accuracy.py"
    small = ("--ranks", "2", "--rate", "", "--epochs", "3", "--lrs", "1e-6", "0.05")
    methods = ("DDP", "ours, auto")
    out = run_script(script, *small, "--target", "0.3", "--methods", *methods, cwd=tmp_path)
    for method in methods:
        # With the smallest rate nothing is learnt.
        assert re.search(rf"\| {method} \| 0.05 \| \d+\.\d \| \d\d\.\d% \|", out), out
        assert f"{method}, lr 1e-06, seed 0: inf s" in out


def test_the_cost_of_staleness_is_that_of_the_best_learning_rate(tmp_path: Path) -> None:
    script = EXAMPLES / "benchmark" / "staleness.py"
    small = ("--world-size", "2", "--epochs", "1", "--seeds", "0", "1", "--lrs", "1e-6", "0.005")
    column = ("--shards", "shuffled", "--bases", "Adam")
    names = ("DDP", "every 8 steps, 8 late", "auto")
    out = run_script(script, *small, *column, "--rows", *names, cwd=tmp_path)
    lines = [line for line in out.splitlines() if line.startswith("|")]
    head, _, *rows = (line.strip("| ").split(" | ") for line in lines)
    assert head == ["a round", "mean staleness", "shuffled, Adam"]
    assert [name for name, *_ in rows] == list(names)
    assert all(cell.endswith(", lr 0.005") for *_, cell in rows), out
    ddp, late, auto = (float(staleness) for _, staleness, _ in rows)
    assert (ddp, late) == (0.0, 8.0)
    assert 1 <= auto <= 16


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from /proc")
def test_gradients_of_one_bucket_are_fewer_than_all_of_them(tmp_path: Path) -> None:
    methods = ("DecentOptimWrapper", "DecentralizedDataParallel")
    arguments = ("--parameters", "9e6", "--methods", *methods)
    out = run_script(EXAMPLES / "benchmark" / "gradient_memory.py", *arguments, cwd=tmp_path)
    figures = dict(re.findall(r"\| (\w+) \| (\d+) \|", out))
    assert int(figures["DecentOptimWrapper"]) == 34
    assert int(figures["DecentralizedDataParallel"]) <= 25


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from /proc")
def test_views_save_a_copy_of_the_parameters_and_the_step_in_the_backward_pass_gradients(
    tmp_path: Path,
) -> None:
    wrapper, module = "DecentOptimWrapper", "DecentralizedDataParallel"
    methods = (f"{wrapper}, copies", f"{wrapper}, views", f"{module}, views")
    arguments = ("--parameters", "14e6", "--methods", *methods)
    out = run_script(EXAMPLES / "benchmark" / "memory.py", *arguments, cwd=tmp_path)
    figures = re.findall(r"\| ([\w, ]+) \| \d+ \| \d+ \| (-?\d\.\d\d) \|", out)
    assert [method for method, _ in figures] == list(methods), out
    copies, views, in_backward = (float(figure) for _, figure in figures)
    assert copies == pytest.approx(2, abs=0.35), out
    assert views == pytest.approx(1, abs=0.35), out
    # Those of the last layers only; here a bucket is half of the model.
    assert in_backward < views - 0.3, out
