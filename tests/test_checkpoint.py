"""Checkpoint sets: whole or passed over, whatever happens to a rank or to a file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from problem import MakeOptimizer, adamw, flatten, make_params, take_steps, wrap
from ranks import run_processes, run_threads
from restartable_processes import RestartableProcesses, wrap_elastic
from torch import Tensor
from warning_texts import warned_texts

from decent_optim_wrapper import AsItArrives, DecentOptimWrapper, PeerError, Schedule
from decent_optim_wrapper.checkpoint import Checkpoints, sets, whole_file
from decent_optim_wrapper.checkpoint.saved_set import SavedSet

WORLD = 2
GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "checkpoints.md"


class Run(NamedTuple):
    """A rank in training."""

    params: list[Tensor]
    optimizer: DecentOptimWrapper
    checkpoints: Checkpoints

    def advance(self, rank: int, steps: range, every: int = 1) -> None:
        for step in steps:
            take_steps(self.optimizer, self.params, rank, [step])
            if (step + 1) % every == 0:
                self.save(step + 1)

    def save(self, step: int) -> None:
        model = [param.detach() for param in self.params]
        self.checkpoints.save(step, {"model": model, "optimizer": self.optimizer.state_dict()})

    def resume(self, model_first: bool = False) -> int:
        """Go on from the newest set; the number of steps done."""
        saved = self.checkpoints.load()
        if saved is None:
            return 0
        if not model_first:
            self.optimizer.load_state_dict(saved.state["optimizer"])
        with torch.no_grad():
            torch._foreach_copy_(self.params, saved.state["model"])
        if model_first:
            self.optimizer.load_state_dict(saved.state["optimizer"])
        return saved.step

    def end(self) -> Tensor:
        """The parameters before and after the last round has been mixed in."""
        own = flatten(self.params)
        self.optimizer.synchronize()
        return torch.cat([own, flatten(self.params)])


def start(
    group: dist.ProcessGroup | None,
    folder: Path,
    seed: int = 0,
    keep: int = 2,
    make: MakeOptimizer = adamw,
    **options: Any,
) -> Run:
    params = make_params(seed)
    optimizer = wrap(params, group, make(params), **{"topology": "ring", **options})
    return Run(params, optimizer, Checkpoints(folder, optimizer, keep))


def train(folder: Path, steps: int, seed: int = 0) -> None:
    """Train from step 0 and save after every step."""
    run_threads(WORLD, lambda rank, group: start(group, folder, seed).advance(rank, range(steps)))


def resume(folder: Path) -> list[int]:
    """The step from which each rank would go on."""
    return run_threads(WORLD, lambda rank, group: start(group, folder, seed=5).resume())


def file_of(folder: Path, step: int, rank: int, world_size: int = WORLD) -> Path:
    return folder / f"step_{step:08d}" / f"rank_{rank}_of_{world_size}.pt"


def marker_of(folder: Path, step: int, world_size: int = WORLD) -> Path:
    return folder / f"step_{step:08d}" / f"set_of_{world_size}.sha256"


def sets_of(folder: Path, *steps: int) -> list[Path]:
    """The files of whole sets."""
    own = {rank: [file_of(folder, step, rank) for step in steps] for rank in range(WORLD)}
    return sorted([*chain(*own.values()), *(marker_of(folder, step) for step in steps)])


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    with warned_texts() as texts:
        yield texts


@pytest.mark.parametrize(("world_size", "shared"), [(2, False), (4, True)])
def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_never_stopped(
    world_size: int, shared: bool, tmp_path: Path, warned: list[str]
) -> None:
    """A disk of each rank serves as well as a shared one."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        folder = tmp_path if shared else tmp_path / str(rank)
        whole, steps = start(group, folder), 7
        assert whole.resume() == 0
        whole.advance(rank, range(steps), every=4)
        expected = whole.end()
        resumed = start(group, folder, seed=5)
        assert resumed.resume(model_first=shared) == resumed.optimizer.round == 4
        resumed.advance(rank, range(4, steps), every=4)
        assert torch.equal(resumed.end(), expected)
        return expected

    one, other, *_ = run_threads(world_size, main)
    assert not torch.equal(one, other)
    assert len(files(tmp_path)) == world_size + (1 if shared else world_size)
    assert warned == []


def take_a_file_of_another_saving(path: Path) -> None:
    """A run that was restarted wrote the step again, and was killed before both ranks had."""
    again = path.parent.parent / "again"
    train(again, 4, seed=1)
    (again / path.parent.name / path.name).replace(path)


def to_marker(act: Callable[[Path], object]) -> Callable[[Path], object]:
    """Does it to the marker in place of the file."""
    return lambda path: act(path.with_name("set_of_2.sha256"))


UNUSABLE = "step_00000004/rank_1_of_2.pt cannot be used"
MARKER = "step_00000004/set_of_2.sha256 cannot be used"
# What happens to the file of rank 1 or to the marker, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda path: os.truncate(path, path.stat().st_size - 40), UNUSABLE),
    "a bit": (flip_a_bit, UNUSABLE),
    "another saving's": (take_a_file_of_another_saving, UNUSABLE),
    "missing": (Path.unlink, "No such file or directory"),
    "an empty marker": (to_marker(lambda path: os.truncate(path, 0)), MARKER),
    "a bit of the marker": (to_marker(flip_a_bit), UNUSABLE),
    "a marker without text": (to_marker(lambda path: path.write_bytes(b"\xff")), MARKER),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(folder, 4)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_one_rank_makes_all_use_the_previous_set(
    damage: str, saved: Path, tmp_path: Path, warned: list[str]
) -> None:
    act, words = DAMAGES[damage]
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    act(file_of(folder, 4, rank=1))
    assert resume(folder) == [3, 3]
    assert words in "".join(warned)
    flip_a_bit(file_of(folder, 3, rank=0))
    assert resume(folder) == [0, 0]
    assert "no complete set of 2 ranks" in "".join(warned)


def test_a_set_of_an_earlier_version_is_loaded_after_the_command_of_the_guide(
    saved: Path, tmp_path: Path, warned: list[str]
) -> None:
    """Its files end with a seal, which torch.load ignores, and have no marker."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for path in files(folder):
        if path.suffix == ".pt":
            path.write_bytes(path.read_bytes() + b"\1" * 40)
        else:
            path.unlink()
    assert resume(folder) == [0, 0]
    assert "no complete set of 2 ranks, with a marker set_of_2.sha256" in "".join(warned)
    (command,) = re.findall(r"^sha256sum .*", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    command = command.replace("120", "004").replace("of_4", "of_2")
    subprocess.run(command, shell=True, cwd=folder, check=True)
    assert resume(folder) == [4, 4]


def found_in(folder: Path, warned: list[str]) -> str:
    """Nothing is loaded from a folder, but a warning says what is in it."""
    warned.clear()
    assert resume(folder) == [0, 0]
    return "".join(warned)


def test_sets_that_are_not_where_they_are_expected_are_named(
    saved: Path, tmp_path: Path, warned: list[str]
) -> None:
    run = tmp_path / "runs" / "mine"
    shutil.copytree(saved, run)
    newest = marker_of(run, 4).parent
    shutil.copytree(newest, tmp_path / "kept" / "best")
    for folder, where in (
        *((newest, newest), (tmp_path / "runs", newest), (tmp_path, newest)),
        (tmp_path / "kept", tmp_path / "kept" / "best"),
    ):
        text = found_in(folder, warned)
        assert f"{folder} has no set" in text
        assert str(where) in text
        assert "pass the folder of one run, which has its sets in folders such as step_" in text
    assert "not a folder" in found_in(file_of(run, 4, 0), warned)
    assert found_in(tmp_path / "new", warned) == ""
    (tmp_path / "new" / "logs").mkdir(parents=True)
    assert found_in(tmp_path / "new", warned) == ""
    assert resume(run) == [4, 4]


def test_a_set_of_another_run_in_the_folder_is_named(
    saved: Path, tmp_path: Path, warned: list[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)

    def anew(rank: int, group: dist.ProcessGroup) -> None:
        start(group, folder, seed=1).advance(rank, range(3))

    run_threads(WORLD, anew)
    # Once, although three sets are saved.
    (text,) = warned
    assert f"{folder / 'step_00000004'} is of another run, which this one, at step 1" in text
    assert "give every run its own folder, or remove" in text
    assert resume(folder) == [4, 4]
    warned.clear()

    def go_on(rank: int, group: dist.ProcessGroup) -> None:
        # From the set before a damaged one, in whose place it saves its own.
        run = start(group, folder)
        assert run.resume() == 3
        warned.clear()
        run.advance(rank, range(3, 6))
        assert not warned

    flip_a_bit(file_of(folder, 4, rank=1))
    run_threads(WORLD, go_on)
    assert resume(folder) == [6, 6]


def test_of_two_jobs_in_one_folder_none_mixes_its_files_with_the_others(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2 * WORLD, timeout=60)

    def write_together(*args: Any, fill: Any = whole_file.write_state) -> str:
        both.wait()
        return str(fill(*args))

    def job(seed: int) -> list[str]:
        def main(rank: int, group: dist.ProcessGroup) -> str:
            checkpoints = start(group, tmp_path, seed).checkpoints
            try:
                checkpoints.save(1, {"job": torch.full((1 << 18,), seed)})
            except OSError as error:
                return str(error)
            return ""

        return run_threads(WORLD, main)

    monkeypatch.setattr(sets, "write_state", write_together)
    with ThreadPoolExecutor() as pool:
        errors = [each for job in pool.map(job, (1, 2)) for each in job]
    for text in filter(None, errors):
        assert "its bytes are not those that were written; give every run its own folder" in text
    saved = [path for path in files(tmp_path) if path.suffix == ".pt"]
    assert len(saved) == WORLD
    for path in saved:
        (job_number,) = torch.load(path)["job"].unique()
        assert job_number in (1, 2)


def test_a_set_that_another_job_has_replaced_is_named(
    saved: Path, tmp_path: Path, warned: list[str]
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, seed=1)
        run.advance(rank, range(4))
        assert not warned
        if rank == 0:
            shutil.copytree(saved / "step_00000004", marker_of(tmp_path, 4).parent, **exists)
        run.advance(rank, range(4, 6))

    exists: dict[str, Any] = {"dirs_exist_ok": True}
    run_threads(WORLD, main)
    (text,) = warned
    assert f"{tmp_path / 'step_00000004'} is of another run" in text


def test_the_newest_complete_sets_stay_and_older_ones_go(tmp_path: Path) -> None:
    train(tmp_path, 6)
    assert files(tmp_path) == sets_of(tmp_path, 5, 6)
    assert len(list(tmp_path.iterdir())) == 2

    def resumed(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        assert run.resume() == 5
        run.advance(rank, range(5, 6))

    file_of(tmp_path, 6, rank=1).unlink()
    file = file_of(tmp_path, 2, rank=1)
    left = whole_file.part_of(file)
    assert left != whole_file.part_of(file), "two jobs would write to the same file"
    left.parent.mkdir()
    left.write_bytes(b"left by a killed process")
    run_threads(WORLD, resumed)
    assert files(tmp_path) == sets_of(tmp_path, 6)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_would_run_code_does_not(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    checkpoints = start(None, tmp_path).checkpoints
    checkpoints.save(1, {})
    path = file_of(tmp_path, 1, 0, world_size=1)
    with torch.serialization.safe_globals([os.mkdir]):
        digest = whole_file.write_state(path, Trap())
    marker = marker_of(tmp_path, 1, world_size=1)
    marker.write_text(f"{digest}  step_00000001/{path.name}\n")
    with pytest.raises(Exception, match="mkdir"):
        checkpoints.load()
    assert not (tmp_path / "sprung").exists()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(path: Path, *args: Any, write: Any = whole_file.write) -> None:
    write(path, *args)
    if path.suffix == ".pt":
        die()


def mark_and_die(*args: Any, mark: Any = SavedSet.mark) -> None:
    mark(*args)
    die()


def save_half_and_die(state: Any, file: Any, save: Callable[..., None] = torch.save) -> None:
    save(state, file)
    file.truncate(file.tell() // 2)
    file.flush()
    die()


# When rank 1 is killed around its third save(): whose function kills it, which one, what takes its
# place, and the set that a new run finds.
MOMENTS: dict[str, tuple[Any, str, Callable[..., None], int]] = {
    "half written": (torch, "save", save_half_and_die, 2),
    "agreement": (whole_file, "write", write_and_die, 2),
    # The survivor has written its marker.
    "marker": (SavedSet, "mark", die, 2),
    "second agreement": (SavedSet, "mark", mark_and_die, 3),
    "removal": (Path, "unlink", die, 3),
}


def save_after_a_loss(rank: int, folder: Path, name: str) -> None:
    """The survivor cannot go on, and saves nothing."""
    dist.init_process_group("gloo")
    owner, function, fault, _ = MOMENTS[name]
    # A disk of each rank: the marker of the survivor is of no use to the other.
    run = start(None, folder / str(rank), keep=1, timeout=20)
    run.advance(rank, range(2))
    if rank == 1:
        setattr(owner, function, fault)
    with pytest.raises(PeerError):
        run.advance(rank, range(2, 10))
    # A round that fails closes the connections made here; the first still mixes what arrived.
    with pytest.raises(PeerError):
        take_steps(run.optimizer, run.params, rank, range(3))
    for step in (4, 5):
        with pytest.raises(PeerError):
            run.save(step)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_a_survivor_saves_nothing_alone_and_a_new_run_finds_the_last_complete_set(
    name: str, tmp_path: Path
) -> None:
    run_processes(WORLD, save_after_a_loss, tmp_path, name, lost={1})
    file = file_of(tmp_path / "1", 3, rank=1)
    assert len(whole_file.parts_of(file)) == (name == "half written")

    def go_on(rank: int, group: dist.ProcessGroup) -> int:
        run = start(group, tmp_path / str(rank))
        step = run.resume()
        assert not torch.equal(flatten(run.params), flatten(make_params()))
        run.advance(rank, range(4, 6))
        return step

    assert run_threads(WORLD, go_on) == [MOMENTS[name][-1]] * 2
    assert not whole_file.parts_of(file)


def test_a_step_that_does_not_come_after_the_last_set_is_refused(tmp_path: Path) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path)
        with pytest.raises(ValueError, match=r"one step on every rank.*got \[1, 2\] by rank"):
            run.save(1 + rank)
        assert not files(tmp_path)
        run.advance(rank, range(3))
        if rank == 1:
            # As one that was lost before it knew that the set was complete.
            run = run._replace(checkpoints=Checkpoints(tmp_path, run.optimizer))
        for step in (3, 2, -1):
            with pytest.raises(ValueError, match="above 3, the step of the last set"):
                run.save(step)

    run_threads(WORLD, main)
    assert resume(tmp_path) == [3, 3]


def save_while_ranks_go_and_come(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], folder: Path
) -> int:
    """Save with all ranks, with those that are left, and with all again."""
    params = make_params()
    # Nothing is in flight between steps: only the checkpoint can notice a loss.
    options: dict[str, Any] = {"topology": "complete", "timeout": 5, "overlap": False}
    optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
    run = Run(params, optimizer, Checkpoints(folder, optimizer))
    report("joined", optimizer.members)
    alone = False
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        take_steps(optimizer, params, rank, [optimizer.round])
        round, members = optimizer.round, optimizer.members
        if len(members) == 3 and round in (2, 4):
            run.save(round)
        elif len(members) == 3 and round == 6:
            if rank == 2:
                die()
            # The next step() goes on without the lost rank.
            with pytest.raises(PeerError):
                run.save(round)
        elif len(members) == 2 and not alone:
            run.save(round)
            alone = True
            report("alone", round)
        report(f"round {round}", members)
        time.sleep(0.01)
    run.save(optimizer.round)
    return optimizer.round


@pytest.mark.slow
def test_sets_of_fewer_ranks_never_displace_sets_of_all_ranks(tmp_path: Path) -> None:
    with RestartableProcesses(3, save_while_ranks_go_and_come, tmp_path) as processes:
        alone = processes.wait_for(0, "alone")
        processes.wait_for(1, "alone")
        processes.reports.pop((2, "joined"))
        processes.start(2)
        assert processes.wait_for(2, "joined") == (0, 1, 2)
        processes.finish()
        (last,) = set(processes.results())
    assert 4 < alone < last
    kept = [(4, 3, (0, 1, 2)), (alone, 2, (0, 1)), (last, 3, (0, 1, 2))]
    expected = [file_of(tmp_path, step, rank, size) for step, size, all in kept for rank in all]
    expected += [marker_of(tmp_path, step, size) for step, size, _ in kept]
    # The rank that came back does not know of the sets before, and removes nothing yet.
    assert files(tmp_path) == sorted([*expected, file_of(tmp_path, 2, 2, 3)])


def fill_the_disk(path: Path, patch: pytest.MonkeyPatch) -> None:
    def symlink(path: Path, make: Callable[[Path], Path] = whole_file.part_of) -> Path:
        part = make(path)
        if "rank_1" in path.name and path.parent.name == "step_00000003":
            part.symlink_to("/dev/full")
        return part

    path.parent.mkdir()
    patch.setattr(whole_file, "part_of", symlink)


def damage_on_the_way(path: Path, patch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def damage(part: Path, target: Path) -> Path:
        if target == path:
            flip_a_bit(part)
        return replace(part, target)

    patch.setattr(Path, "replace", damage)


@pytest.mark.parametrize(
    ("prevent", "error"),
    [
        (fill_the_disk, r"\[Errno 28\] No space left on device"),
        (damage_on_the_way, "its bytes are not those that were written"),
    ],
)
def test_a_rank_that_could_not_write_says_why_and_older_sets_stay_until_all_have(
    prevent: Callable[[Path, pytest.MonkeyPatch], None],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
) -> None:
    prevent(file_of(tmp_path, 3, rank=1), monkeypatch)

    def fail(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        run.advance(rank, range(2))
        # More than Python keeps back, so that torch's writer fails, too.
        large = {"large": torch.ones(1 << 20)}
        if rank == 1:
            with pytest.raises(OSError, match=error) as caught:
                run.checkpoints.save(3, large)
            assert caught.value.__cause__ is None
        else:
            run.checkpoints.save(3, large)
        assert set(sets_of(tmp_path, 2)) <= set(files(tmp_path))
        assert not whole_file.parts_of(file_of(tmp_path, 3, rank=1))

    def go_on(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        assert run.resume() == 2
        run.save(4)

    run_threads(WORLD, fail)
    (text,) = warned
    assert "step_00000003 is not complete: could not write on rank 1" in text
    run_threads(WORLD, go_on)
    assert files(tmp_path) == sets_of(tmp_path, 4)


def test_wrong_arguments_and_states_that_could_not_be_loaded_are_refused(tmp_path: Path) -> None:
    optimizer = wrap(make_params())
    make: Any = partial(Checkpoints, tmp_path)
    save: Any = make(optimizer).save
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: make(optimizer.optimizer), TypeError, "expects a DecentOptimWrapper.* got SGD"),
        (lambda: make(optimizer, keep="2"), TypeError, "keep expects a number of sets, got '2'"),
        (lambda: make(optimizer, keep=0), ValueError, "keep must be 1 sets or more, got 0"),
        (lambda: save(1.5, {}), TypeError, "'float' object cannot be interpreted"),
        (lambda: save(1, {"where": tmp_path}), TypeError, "containers of these, got pathlib"),
    ]
    for call, error, match in calls:
        with pytest.raises(error, match=match):
            call()
    assert files(tmp_path) == []
    save(torch.tensor(1), {"where": str(tmp_path)})
    assert files(tmp_path) == [file_of(tmp_path, 1, 0, 1), marker_of(tmp_path, 1, 1)]


@pytest.mark.slow
def test_nobody_is_given_up_while_a_rank_writes_for_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, slow, write = 2.0, list[Path](), whole_file.write

    def write_slowly(path: Path, *args: Any) -> Any:
        if "rank_1" in path.name:
            slow.append(path)
            time.sleep(1.25 * timeout)
        return write(path, *args)

    def save(rank: int, group: dist.ProcessGroup) -> None:
        start(group, tmp_path, timeout=timeout).checkpoints.save(3, {"value": rank})

    monkeypatch.setattr(whole_file, "write", write_slowly)
    run_threads(WORLD, save)
    assert slow == [file_of(tmp_path, 3, rank=1)]
    assert files(tmp_path) == sets_of(tmp_path, 3)


@pytest.mark.slow
def test_nothing_is_mixed_into_values_that_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ranks that wait for others take part in rounds."""
    write = whole_file.write

    def write_slowly(path: Path, *args: Any) -> Any:
        if "rank_1" in path.name:
            time.sleep(1.0)
        return write(path, *args)

    def save(rank: int, group: dist.ProcessGroup) -> Tensor:
        options: Any = {"overlap": AsItArrives(), "schedule": Schedule(mixing_rate=0.2)}
        run = start(group, tmp_path, seed=rank, sync_at_start=False, **options)
        assert len(run.optimizer.buckets) > 1
        run.advance(rank, range(2), every=9)
        run.optimizer.synchronize()
        before = flatten(run.params)
        run.save(2)
        return before

    monkeypatch.setattr(whole_file, "write", write_slowly)
    own = run_threads(WORLD, save)
    files = [torch.load(file_of(tmp_path, 2, rank)) for rank in range(WORLD)]
    saved = [flatten(file["model"]) for file in files]
    assert (own[0] - own[1]).abs().max() > 1e-3
    torch.testing.assert_close(sum(saved), sum(own))
    assert not torch.equal(*saved)
