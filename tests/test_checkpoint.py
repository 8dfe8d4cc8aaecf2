"""Checkpoint sets: whole or passed over, whatever happens to a rank or to a file."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, adamw, backward, flatten, make_params
from ranks import run_processes, run_threads
from restartable_processes import RestartableProcesses, wrap_elastic
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from warned import warned_texts

from decent_optim_wrapper import DecentOptimWrapper, PeerError
from decent_optim_wrapper.checkpoint import Checkpoints, sealed_file

STEPS = 7
WORLD = 2


class Run(NamedTuple):
    params: list[Tensor]
    optimizer: DecentOptimWrapper
    scheduler: CosineAnnealingLR
    checkpoints: Checkpoints

    def advance(self, rank: int, steps: range, every: int = 1) -> None:
        for step in steps:
            backward(self.params, rank, step)
            self.optimizer.step()
            self.scheduler.step()
            if (step + 1) % every == 0:
                self.checkpoints.save(step + 1, self.state())

    def state(self) -> dict[str, Any]:
        return {
            "model": [param.detach() for param in self.params],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def resume(self, same_world: bool = False) -> int:
        saved = self.checkpoints.load(same_world=same_world)
        if saved is None:
            return 0
        self.optimizer.load_state_dict(saved.state["optimizer"])
        self.scheduler.load_state_dict(saved.state["scheduler"])
        with torch.no_grad():
            for param, value in zip(self.params, saved.state["model"], strict=True):
                param.copy_(value)
        return saved.step


def start(
    group: dist.ProcessGroup, folder: Path, seed: int = 0, keep: int = 2, topology: str = "ring"
) -> Run:
    params = make_params(seed=seed)
    optimizer = DecentOptimWrapper(
        adamw(params), process_group=group, topology=topology, bucket_cap_mb=TINY_CAP_MB
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
    return Run(params, optimizer, scheduler, Checkpoints(folder, optimizer, keep))


def train(folder: Path, steps: int, world_size: int = WORLD, every: int = 1) -> None:
    """Train from step 0 and save."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        start(group, folder).advance(rank, range(steps), every)

    run_threads(world_size, main)


def resume(folder: Path, world_size: int = WORLD, same_world: bool = False) -> list[int]:
    """The step from which each rank would go on."""
    return run_threads(
        world_size, lambda rank, group: start(group, folder, seed=5).resume(same_world)
    )


def file_of(folder: Path, step: int, rank: int, world_size: int = WORLD) -> Path:
    return folder / f"step_{step:08d}" / f"rank_{rank}_of_{world_size}.pt"


def finish(run: Run) -> Tensor:
    """The parameters before and after the last round has been mixed in."""
    own = flatten(run.params)
    run.optimizer.synchronize()
    return torch.cat([own, flatten(run.params)])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    with warned_texts() as texts:
        yield texts


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_never_stopped(
    world_size: int, tmp_path: Path
) -> None:
    def whole(rank: int, group: dist.ProcessGroup) -> Tensor:
        run = start(group, tmp_path / "whole")
        run.advance(rank, range(STEPS))
        return finish(run)

    def resumed(rank: int, group: dist.ProcessGroup) -> Tensor:
        run = start(group, tmp_path / "stopped", seed=5)
        step = run.resume()
        assert step == run.optimizer.round == 4
        run.advance(rank, range(step, STEPS))
        return finish(run)

    train(tmp_path / "stopped", 5, world_size, every=2)
    expected = run_threads(world_size, whole)
    assert all(map(torch.equal, run_threads(world_size, resumed), expected))
    assert not torch.equal(expected[0], expected[1])
    assert not torch.equal(expected[0][: len(expected[0]) // 2], flatten(make_params()))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def take_a_file_of_another_saving(path: Path) -> None:
    """A run that was restarted wrote the step again, and was killed before both ranks had."""
    train(path.parent.parent / "again", 4)
    (path.parent.parent / "again" / path.parent.name / path.name).replace(path)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Puts something else in the place of a file."""

    def act(path: Path) -> None:
        path.unlink()
        make(path)

    return act


UNUSABLE = "step_00000004/rank_1_of_2.pt cannot be used"
NO_FILE = f"{UNUSABLE}: it is not a regular file"
# What happens to the file of rank 1, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), UNUSABLE),
    "nothing": (lambda path: os.truncate(path, 0), UNUSABLE),
    "no seal": (lambda path: os.truncate(path, path.stat().st_size - 40), UNUSABLE),
    "a bit": (flip_a_bit, UNUSABLE),
    "the other rank's": (
        lambda path: shutil.copy(path.with_name("rank_0_of_2.pt"), path),
        UNUSABLE,
    ),
    "another step's": (
        lambda path: shutil.copy(path.parent.parent / "step_00000003" / path.name, path),
        UNUSABLE,
    ),
    "another saving's": (take_a_file_of_another_saving, "of another set is rank_1_of_2.pt"),
    "a folder": (instead(Path.mkdir), UNUSABLE),
    "a fifo": (instead(os.mkfifo), NO_FILE),
    "a socket": (instead(bind), NO_FILE),
    "a device": (instead(partial(os.symlink, "/dev/zero")), NO_FILE),
    "missing": (Path.unlink, "step_00000004 is passed over: no whole rank_1_of_2.pt"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_one_rank_makes_all_use_the_previous_set(
    damage: str, tmp_path: Path, warned: list[str]
) -> None:
    act, words = DAMAGES[damage]
    train(tmp_path, 4)
    assert resume(tmp_path) == [4, 4]
    assert warned == []
    act(file_of(tmp_path, 4, rank=1))
    assert resume(tmp_path) == [3, 3]
    assert words in "".join(warned)
    flip_a_bit(file_of(tmp_path, 3, rank=0))
    assert resume(tmp_path) == [0, 0]
    assert "no complete set of 2 ranks" in "".join(warned)


def test_an_empty_folder_and_one_that_is_not_there_start_from_the_beginning(
    tmp_path: Path, warned: list[str]
) -> None:
    assert resume(tmp_path) == [0, 0]
    assert resume(tmp_path / "none") == [0, 0]
    assert warned == []


def test_a_set_of_another_world_size_is_left_alone(tmp_path: Path, warned: list[str]) -> None:
    train(tmp_path, 4, world_size=4)
    before = files(tmp_path)
    assert resume(tmp_path, same_world=True) == [0, 0]
    assert "has checkpoints, but no complete set of 2 ranks" in "".join(warned)
    train(tmp_path, 6)
    assert set(before) < set(files(tmp_path))
    assert resume(tmp_path, world_size=4, same_world=True) == [4] * 4
    assert resume(tmp_path) == [6, 6]


def test_disks_of_their_own_serve_as_well_as_a_shared_one(tmp_path: Path) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        start(group, tmp_path / str(rank)).advance(rank, range(3))

    def again(rank: int, group: dist.ProcessGroup) -> int:
        return start(group, tmp_path / str(rank), seed=5).resume()

    run_threads(WORLD, main)
    assert files(tmp_path / "1") == [f"step_0000000{step}/rank_1_of_2.pt" for step in (2, 3)]
    assert run_threads(WORLD, again) == [3, 3]
    file_of(tmp_path / "0", 3, rank=0).unlink()
    assert run_threads(WORLD, again) == [2, 2]


def test_the_newest_complete_sets_stay_and_older_ones_go(tmp_path: Path) -> None:
    train(tmp_path, 6)
    assert files(tmp_path) == [f"step_0000000{s}/rank_{r}_of_2.pt" for s in (5, 6) for r in (0, 1)]
    assert len(list(tmp_path.iterdir())) == 2

    def resumed(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        assert run.resume() == 5
        run.advance(rank, range(5, 6))

    file_of(tmp_path, 6, rank=1).unlink()
    file_of(tmp_path, 2, rank=1).parent.mkdir()
    (tmp_path / "step_00000002" / "rank_1_of_2.pt.part").write_bytes(b"left by a killed process")
    run_threads(WORLD, resumed)
    assert files(tmp_path) == [f"step_00000006/rank_{r}_of_2.pt" for r in (0, 1)]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path)
        with pytest.raises(TypeError, match=r"weights_only=True\) reads again, got pathlib"):
            run.checkpoints.save(1, {"where": tmp_path})
        run.checkpoints.save(1, {"where": str(tmp_path)})

    run_threads(WORLD, main)
    assert files(tmp_path) == [f"step_00000001/rank_{r}_of_2.pt" for r in (0, 1)]


def test_a_file_that_would_run_code_does_not(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path)
        run.checkpoints.save(1, {})
        path = file_of(tmp_path, 1, rank, world_size=1)
        stamp = sealed_file.read_stamp(path)
        with torch.serialization.safe_globals([os.mkdir]):
            sealed_file.write(path, Trap(), stamp)
        with pytest.raises(Exception, match="mkdir"):
            run.checkpoints.load()

    run_threads(1, main)
    assert not (tmp_path / "sprung").exists()


def test_a_step_that_does_not_come_after_the_last_set_is_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path)
        with pytest.raises(ValueError, match=r"one step on every rank.*got \[1, 2\] by rank"):
            run.checkpoints.save(1 + rank, run.state())
        assert not tmp_path.exists() or not files(tmp_path)
        run.advance(rank, range(3))
        for step in (3, 2, -1):
            with pytest.raises(ValueError, match="above 3, that of the last set"):
                run.checkpoints.save(step, run.state())

    run_threads(WORLD, main)
    assert resume(tmp_path) == [3, 3]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(path: Path, state: Any, stamp: int, write: Any = sealed_file.write) -> None:
    write(path, state, stamp)
    die()


def save_half_and_die(state: Any, file: Any, save: Callable[..., None] = torch.save) -> None:
    save(state, file)
    file.truncate(file.tell() // 2)
    file.flush()
    die()


class Moment(NamedTuple):
    """When rank 1 is killed around its third save(), and what is found.

    Args:
        owner: whose function kills it.
        name: of the function.
        fault: in place of the function.
        saved: the last set that the survivor has saved.
        found: the set that a new run finds.
        partial: whether a part of a file is left.
        timeout: of the wrapper; None is that of the group.
    """

    owner: Any
    name: str
    fault: Callable[..., None]
    saved: int = 2
    found: int = 2
    partial: bool = False
    timeout: float | None = None


MOMENTS = {
    "before": Moment(Checkpoints, "save", die),
    "half written": Moment(torch, "save", save_half_and_die, partial=True, timeout=20),
    "flush": Moment(os, "fsync", die, partial=True),
    "rename": Moment(Path, "replace", die, partial=True, timeout=20),
    "agreement": Moment(sealed_file, "write", write_and_die, found=3),
    "removal": Moment(Path, "unlink", die, saved=3, found=3, timeout=20),
}


def step_on(optimizer: DecentOptimWrapper, times: int) -> None:
    for _ in range(times):
        optimizer.step()


def save_after_a_loss(rank: int, folder: str, name: str) -> tuple[int, list[str]]:
    dist.init_process_group("gloo")
    params, moment = make_params(), MOMENTS[name]
    options: dict[str, Any] = {"topology": "ring", "bucket_cap_mb": TINY_CAP_MB}
    optimizer = DecentOptimWrapper(adamw(params), timeout=moment.timeout, **options)
    checkpoints = Checkpoints(folder, optimizer, keep=1)
    saved, errors = 0, []
    try:
        for step in range(1, 10):
            backward(params, rank, step)
            optimizer.step()
            if rank == 1 and step == 3:
                setattr(moment.owner, moment.name, moment.fault)
            checkpoints.save(step, {"params": flatten(params)})
            saved = step
    except PeerError as error:
        errors = [str(error)]
        # A round that fails closes the connections made here; the first still mixes what arrived.
        with pytest.raises(PeerError):
            step_on(optimizer, 3)
    for step in (saved + 1, saved + 2):
        with pytest.raises(PeerError) as caught:
            checkpoints.save(step, {"params": flatten(params)})
        errors.append(str(caught.value))
    return saved, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_a_survivor_saves_nothing_alone_and_a_new_run_finds_the_last_complete_set(
    name: str, tmp_path: Path
) -> None:
    moment = MOMENTS[name]
    ((last, errors),) = run_processes(2, save_after_a_loss, str(tmp_path), name, lost={1})
    assert last == moment.saved
    assert len(errors) == 3
    for text in errors[-2:]:
        assert f"the set of step {last} stays" in text
        assert "torch.save() writes an emergency copy" in text
    partial = sealed_file.partial(file_of(tmp_path, 3, rank=1))
    assert partial.exists() == moment.partial

    def load_and_save(rank: int, group: dist.ProcessGroup) -> int:
        run = start(group, tmp_path)
        saved = run.checkpoints.load()
        assert saved is not None
        assert not torch.equal(saved.state["params"], flatten(make_params()))
        for step in (5, 6):
            run.checkpoints.save(step, saved.state)
        return saved.step

    assert run_threads(WORLD, load_and_save) == [moment.found] * 2
    assert not partial.exists()


def test_a_rank_cut_off_from_the_last_agreement_does_not_write_over_a_complete_set(
    tmp_path: Path,
) -> None:
    """Rank 0 has removed the older set, and rank 1 does not know that the new one is complete."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        run.advance(rank, range(2))
        if rank == 1:
            gather, ended = run.optimizer.all_gather, False

            def lose_the_answer(numbers: Tensor) -> Tensor:
                nonlocal ended
                answers = gather(numbers)
                if len(numbers) == 1 and ended:
                    raise PeerError("the answer did not come")
                # Before, the ranks ask each other whether all have ended their writing.
                ended = len(numbers) == 1 and bool(answers.all())
                return answers

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run.optimizer, "all_gather", lose_the_answer)
                with pytest.raises(PeerError, match="the set of step 2 stays"):
                    run.advance(rank, range(2, 3))
        else:
            run.advance(rank, range(2, 3))
        with pytest.raises(ValueError, match="above 3, that of the last set"):
            run.checkpoints.save(3, run.state())

    run_threads(WORLD, main)
    assert resume(tmp_path) == [3, 3]


def save_while_ranks_go_and_come(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], folder: str
) -> int:
    """Save with all ranks, with those that are left, and with all again."""
    params = make_params()
    # Nothing is in flight between steps: only the checkpoint can notice a loss.
    options: dict[str, Any] = {"topology": "complete", "timeout": 5, "overlap": False}
    optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
    checkpoints = Checkpoints(folder, optimizer, keep=2)
    report("joined", optimizer.members)
    alone = False

    def save() -> None:
        checkpoints.save(optimizer.round, {"params": flatten(params)})

    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        optimizer.step()
        if len(optimizer.members) == 3 and optimizer.round in (2, 4):
            save()
        elif len(optimizer.members) == 3 and optimizer.round == 6:
            if rank == 2:
                die()
            # The next step() goes on without the lost rank.
            with pytest.raises(PeerError, match="the set of step 4 stays"):
                save()
        elif len(optimizer.members) == 2 and not alone:
            save()
            alone = True
            report("alone", optimizer.round)
        report(f"round {optimizer.round}", optimizer.members)
        time.sleep(0.01)
    save()
    return optimizer.round


@pytest.mark.slow
def test_sets_of_fewer_ranks_never_displace_those_of_all(tmp_path: Path) -> None:
    with RestartableProcesses(3, save_while_ranks_go_and_come, str(tmp_path)) as processes:
        alone = processes.wait_for(0, "alone")
        processes.wait_for(1, "alone")
        processes.reports.pop((2, "joined"))
        processes.start(2)
        assert processes.wait_for(2, "joined") == (0, 1, 2)
        processes.finish()
        (last,) = set(processes.results())
    assert 4 < alone < last
    kept = [(4, 3, (0, 1, 2)), (alone, 2, (0, 1)), (last, 3, (0, 1, 2))]
    expected = [
        str(file_of(tmp_path, step, rank, size).relative_to(tmp_path))
        for step, size, ranks in kept
        for rank in ranks
    ]
    # The rank that came back does not know of the sets before, and removes nothing yet.
    assert files(tmp_path) == sorted([*expected, "step_00000002/rank_2_of_3.pt"])

    def load(rank: int, group: dist.ProcessGroup, same_world: bool) -> int:
        checkpoints = start(group, tmp_path, topology="complete").checkpoints
        saved = checkpoints.load(same_world=same_world)
        return saved.step if saved else 0

    assert run_threads(3, partial(load, same_world=False)) == [last] * 3
    flip_a_bit(file_of(tmp_path, last, 1, 3))
    assert run_threads(3, partial(load, same_world=True)) == [4, 4, 4]
    assert run_threads(3, partial(load, same_world=False)) == [alone] * 3


FULL_MB = 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is soon full, where the test may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_MB}m", "tmpfs", str(folder)]
    if os.getuid() or shutil.which("mount") is None or subprocess.run(mount).returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_without_room(rank: int, folders: list[str], limited: bool) -> tuple[str, list[str]]:
    """Rank 1 has no room for the second set; both save a third that is small again."""
    dist.init_process_group("gloo")
    folder = Path(folders[rank])
    optimizer = DecentOptimWrapper(adamw(make_params()), bucket_cap_mb=TINY_CAP_MB)
    checkpoints = Checkpoints(folder, optimizer, keep=1)
    state = {"step": torch.ones(100)}
    checkpoints.save(1, state)
    error = ""
    with warned_texts() as lines:
        if rank == 1:
            if limited:
                # The next best thing to a full disk that needs no rights.
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_MB << 20, resource.RLIM_INFINITY))
            with pytest.raises(OSError, match=r"No space left on device|File too large") as caught:
                checkpoints.save(2, {**state, "large": torch.ones(FULL_MB << 20)})
            error = errno.errorcode[caught.value.errno or 0]
            assert caught.value.__cause__ is None
        else:
            checkpoints.save(2, state)
    assert len(lines) == int(rank == 0)
    assert not list(folder.rglob("*.part"))
    assert torch.load(file_of(folder, 1, rank), weights_only=True)["step"].sum() == 100
    checkpoints.save(3, state)
    dist.destroy_process_group()
    return error, lines


@pytest.mark.slow
@pytest.mark.parametrize(("limited", "expected"), [(False, "ENOSPC"), (True, "EFBIG")])
def test_a_full_disk_raises_what_the_system_says_and_leaves_the_set_before(
    limited: bool, expected: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small = tmp_path if limited else request.getfixturevalue("small_disk")
    folders = [tmp_path, small]
    (_, lines), (error, _) = run_processes(
        WORLD, save_without_room, [str(folder) for folder in folders], limited
    )
    assert error == expected
    assert "step_00000002 is not complete: could not write rank_1_of_2.pt" in lines[0]
    for rank, folder in enumerate(folders):
        assert f"step_00000003/rank_{rank}_of_2.pt" in files(folder)
        assert not file_of(folder, 1, rank).exists()


def test_a_file_that_is_damaged_while_it_is_written_is_noticed_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    replace = Path.replace

    def damage(path: Path, target: Path) -> Path:
        if str(target).endswith("step_00000003/rank_1_of_2.pt"):
            flip_a_bit(path)
        return replace(path, target)

    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, tmp_path, keep=1)
        run.advance(rank, range(2))
        if rank == 1:
            with pytest.raises(OSError, match="its bytes do not match its seal"):
                run.advance(rank, range(2, 3))
        else:
            run.advance(rank, range(2, 3))

    monkeypatch.setattr(Path, "replace", damage)
    run_threads(WORLD, main)
    assert "step_00000003 is not complete: could not write rank_1_of_2.pt" in "".join(warned)
    assert resume(tmp_path) == [2, 2]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    base = adamw(make_params())
    alone = DecentOptimWrapper(base)
    with pytest.raises(TypeError, match=r"expects the DecentOptimWrapper .*, got AdamW"):
        Checkpoints(tmp_path, base)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep expects a whole number, got '2'"):
        Checkpoints(tmp_path, alone, keep="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be 1 or more sets, got 0"):
        Checkpoints(tmp_path, alone, keep=0)
    checkpoints = Checkpoints(tmp_path, alone)
    for step in (1.5, "1", None):
        with pytest.raises(TypeError, match=rf"step expects a whole number, got {step!r}"):
            checkpoints.save(step, {})  # type: ignore[arg-type]
    assert files(tmp_path) == []
    checkpoints.save(torch.tensor(1), {})  # type: ignore[arg-type]
    assert files(tmp_path) == ["step_00000001/rank_0_of_1.pt"]


def test_nobody_is_given_up_while_a_rank_writes_or_reads_for_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read, slow, timeout = sealed_file.write, sealed_file.read_stamp, [], 2.0

    def hold_up(path: Path) -> None:
        if "rank_1" in path.name:
            slow.append(path)
            time.sleep(1.5 * timeout)

    def write_slowly(path: Path, state: Any, stamp: int) -> None:
        hold_up(path)
        write(path, state, stamp)

    def read_slowly(path: Path) -> int:
        hold_up(path)
        return read(path)

    def main(rank: int, group: dist.ProcessGroup) -> int:
        params = make_params(seed=rank)
        optimizer = DecentOptimWrapper(adamw(params), process_group=group, timeout=timeout)
        checkpoints = Checkpoints(tmp_path, optimizer)
        checkpoints.save(3, {"value": rank})
        loaded = checkpoints.load()
        assert loaded is not None
        return loaded.step * 10 + int(loaded.state["value"])

    monkeypatch.setattr(sealed_file, "write", write_slowly)
    monkeypatch.setattr(sealed_file, "read_stamp", read_slowly)
    assert run_threads(WORLD, main) == [30, 31]
    # Written, read again by the writer, and loaded.
    assert len(slow) == 3
