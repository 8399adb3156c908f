"""Other files in a folder of checkpoints: they end no save, and none that others need is lost.

Links, files of users, unfinished saves of processes that live or have ended, damaged checkpoints.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.by_night import by_night
from tests.checkpoint.saved_nets import assert_equal, full_states, make, train, trained
from tests.distributed.harness import run_ranks
from tests.reported import warnings_of
from zerocore.checkpoint.checksums import DamagedError
from zerocore.checkpoint.commit.folder import this_host

COMMON = (ValueError, RuntimeError)
TEMPORARY = "step-00000009.tmp-{}-0123abcd"


@contextmanager
def first_rank_only() -> Any:
    """The block runs on the first rank, before the others go on."""
    dist.barrier()
    yield dist.get_rank() == 0
    dist.barrier()


def save_past(folder: Path) -> None:
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=1)
    named = [f"step-{step:08}" for step in range(10)]
    with warnings_of("zerocore") as messages:
        for step in range(1, 7):
            checkpoints.save(step).wait()
            with first_rank_only() as is_first:
                if is_first:
                    put_in_the_way(folder, folder / named[step], step)
        checkpoints.save(7).wait()
        checkpoints.save(8).wait()
    assert checkpoints.steps() == [1, 3, 8] and checkpoints.load() == 8
    if dist.get_rank() == 0:
        assert sorted(path.name for path in (folder.parent / "elsewhere").iterdir())
        left = sorted(path.name.partition(".deleted-") for path in folder.iterdir())
        assert [name for name, mark, _ in left if not mark] == sorted(
            [named[1], named[3], named[8], "step-1.tmp-notes.txt", "step-00000009.tmp-mine"]
        )
        gone = {name: list(folder.glob(f"{name}.deleted-*")) for name, mark, _ in left if mark}
        assert sorted(gone) == [named[2], named[5], named[6]]
        rest = {name: sorted(os.listdir(path)) for name, (path,) in gone.items()}
        assert rest == {
            named[2]: ["export", "notes.txt"],
            named[5]: ["__7_0.distcp"],
            named[6]: [".nfs0000000000a1b2"],
        }
        expected = ("it is a link", "lacks the checksums.json", "export, notes.txt", "__7_0.distcp")
        assert all(sum(part in text for text in messages) in (1, 2) for part in expected), messages
        assert not any(".nfs" in text or "mine" in text for text in messages)
    dist.barrier()


def put_in_the_way(folder: Path, saved: Path, step: int) -> None:
    """Changes of checkpoints by people and file systems, another one to each."""
    if step == 1:
        (folder / "step-1.tmp-notes.txt").write_text("mine")
        (folder / "step-00000009.tmp-mine").mkdir()
        saved.rename(folder.parent / "elsewhere")
        saved.symlink_to(folder.parent / "elsewhere")
    elif step == 2:
        (saved / "notes.txt").write_text("mine")
        (saved / "export").mkdir()
    elif step == 3:
        (saved / "checksums.json").unlink()  # as torch's own dcp.save would have written it
    elif step == 5:
        (saved / "__7_0.distcp").mkdir()  # cannot be deleted as a file
    elif step == 6:
        (saved / ".nfs0000000000a1b2").write_text("open elsewhere")


def test_what_cannot_be_deleted_ends_no_save(tmp_path: Path) -> None:
    run_ranks(save_past, 2, tmp_path / "run", timeout=120.0)


LOCKING = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
UNFINISHED = (
    TEMPORARY.format(this_host()),  # of a process that lives, then of one that has ended
    TEMPORARY.format("other"),
    TEMPORARY.removesuffix("-{}-0123abcd") + "-0123abcd",  # of nobody knows which host
    TEMPORARY.format(f"{this_host()}.5b3e9c01.4194309.7"),  # as it was named before
)


def lock(path: Path) -> subprocess.Popen[str]:
    """A process that writes to the folder."""
    command = [sys.executable, "-c", LOCKING, str(path)]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert living.stdout is not None and living.stdout.readline() == "locked\n"
    return living


def save_beside(folder: Path) -> None:
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    for index, name in enumerate(UNFINISHED):
        living = None
        with first_rank_only() as is_first:
            if is_first:
                (folder / name).mkdir(parents=True)
                (folder / name / "__0_0.distcp").write_bytes(b"half")
                living = lock(folder / name) if index == 0 else None
        if index == 0:
            with pytest.raises(
                RuntimeError, match=r"another process of this host is writing .*tmp-"
            ):
                checkpoints.save(1)
                checkpoints.wait()
            assert (folder / name).exists()
            with first_rank_only():
                if living is not None:
                    os.kill(living.pid, signal.SIGKILL)
                    os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        with warnings_of("zerocore") as messages:
            checkpoints.save(index + 1).wait()
        is_left = index > 0
        assert (folder / name).exists() == is_left, name
        is_warned = any("written less than" in text for text in messages)
        assert is_warned == (is_left and dist.get_rank() == 0)
        if living is not None:
            living.wait()
    with first_rank_only() as is_first:
        for name in UNFINISHED[1:] if is_first else ():
            for path in (folder / name / "__0_0.distcp", folder / name):
                os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 700))
    checkpoints.save(7).wait()
    assert sorted(os.listdir(folder)) == [f"step-{step:08}" for step in (3, 4, 7)]


def test_unfinished_saves_of_those_that_live(tmp_path: Path) -> None:
    run_ranks(save_beside, 2, tmp_path / "run", timeout=120.0)


def without_locks(folder: Path) -> None:
    """On a file system without locks each unfinished save counts as alive for a while."""
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    name = UNFINISHED[0]
    with first_rank_only() as is_first:
        if is_first:
            (folder / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, warnings_of("zerocore") as messages:
        patch.setattr("fcntl.flock", no_locks)
        checkpoints.save(1).wait()
    assert (folder / name).exists() and checkpoints.steps() == [1]
    assert any("written less than" in text for text in messages) == (dist.get_rank() == 0)


def no_locks(file: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    run_ranks(without_locks, 2, tmp_path / "run", timeout=120.0)


HOLDING = """
import sys, torch, zerocore
from zerocore.checkpoint.commit import files
model = zerocore.shard(torch.nn.Linear(4, 4))
checkpoints = zerocore.Checkpoints(sys.argv[1], model)
write, files.write = files.write, lambda *args: (sys.stdin.read(), write(*args))[1]
pending = checkpoints.save(3)
print("begun", flush=True)
pending.wait()
print(checkpoints.steps())
"""


def refuse_and_save(folder: Path, is_alone: bool) -> None:
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    if is_alone:
        checkpoints.save(4).wait()
        assert checkpoints.steps() == [3, 4]
    else:
        with pytest.raises(RuntimeError, match="give each training a folder of its own"):
            checkpoints.save(4).wait()


@pytest.mark.nightly
def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDING, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "begun\n"
        while not list(folder.glob("step-00000003.tmp-*/*")):
            assert other.poll() is None
        run_ranks(refuse_and_save, 2, folder, False)
        other.stdin.close()
        assert other.stdout.read() == "[3]\n"
    run_ranks(refuse_and_save, 2, folder, True)


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 16
    path.write_bytes(bytes(data))


def break_head(path: Path) -> None:
    """The pickle of each chunk: what torch's reader cannot read."""
    path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_x9"))


def damages(last: int) -> dict[str, Any]:
    """The damage of a checkpoint, by the name in its warning."""
    return {
        f"__{last}_0.distcp is damaged": lambda at: flip(at / f"__{last}_0.distcp", 0.7),
        f"rank-{last}.pt": lambda at: flip(at / f"rank-{last}.pt", 0.5),
        "rank-0.pt": lambda at: flip(at / "rank-0.pt", 0.5),
        f"__{last}_0.distcp has 9 bytes": lambda at: (at / f"__{last}_0.distcp").write_bytes(
            b"too short"
        ),
        "__0_0.distcp is missing": lambda at: (at / "__0_0.distcp").unlink(),
        ".metadata": lambda at: (at / ".metadata").unlink(),
        "checksums.json is missing": lambda at: (at / "checksums.json").unlink(),
    }


def load_past(folder: Path) -> None:
    last = dist.get_world_size() - 1
    model, optimizer = trained(3)
    writer = zerocore.Checkpoints(folder, model, optimizer, keep=2)
    expected = {}
    for step in (1, 2):
        train(model, optimizer, 1, seed=step)
        expected[step] = full_states(model, optimizer)
        writer.save(step).wait()
    newest = folder / "step-00000002"
    for index, (message, damage) in enumerate(damages(last).items()):
        with first_rank_only() as is_first:
            if is_first:
                damage(newest)
        other = make(3, 5)
        states = torch.optim.AdamW(other.parameters())
        if index % 2:
            train(other, states, 1)
        before = full_states(other, states) if index % 2 else {}
        checkpoints = zerocore.Checkpoints(folder, other, states, keep=2)
        with pytest.raises(DamagedError, match=message):
            checkpoints.load(fallback=False)
        if before:
            assert_equal(full_states(other, states), before)
        assert states.state if before else not states.state
        with warnings_of("zerocore") as messages:
            assert checkpoints.load() == 1
        assert_equal(full_states(other, states), expected[1])
        if dist.get_rank() == 0:
            assert len(messages) == 1 and message in messages[0], messages
        if index == 1:  # another program, which was told to load 1, knows nothing of the damage
            checkpoints = zerocore.Checkpoints(folder, other, states, keep=2)
            assert checkpoints.load(1) == 1
        train(other, states, 1, seed=2)
        assert_equal(full_states(other, states), expected[2])
        checkpoints.save(2).wait()
        assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
        assert zerocore.Checkpoints(folder, other, states).load() == 2
        assert_equal(full_states(other, states), expected[2])
    keep_what_is_good(folder, model, optimizer)


def keep_what_is_good(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Neither misfits nor good checkpoints are passed over, and damaged ones keep none alive."""
    again = zerocore.Checkpoints(folder, model, optimizer, keep=2)
    with pytest.raises((FileExistsError, RuntimeError), match="never overwritten"):
        again.save(2)
        again.wait()
    with pytest.raises(COMMON, match="does not fit") as caught:
        zerocore.Checkpoints(folder, zerocore.shard(nn.Linear(2, 2))).load()
    assert not isinstance(caught.value, DamagedError)
    with first_rank_only() as is_first:
        if is_first:
            flip(folder / "step-00000002" / "rank-0.pt", 0.5)
    assert again.load() == 1
    again.save(3).wait()
    assert again.steps() == [1, 2, 3]  # two are good
    again.save(4).wait()
    assert again.steps() == [3, 4]
    with first_rank_only() as is_first:
        for step in (3, 4) if is_first else ():
            (folder / f"step-{step:08}" / "checksums.json").write_bytes(b"")
    with pytest.raises(DamagedError, match="step-00000003"):
        again.load()
    again.save(2).wait()
    assert again.steps() == [2, 3, 4]  # it is the only good one
    assert again.load() == 2


@pytest.mark.parametrize("world_size", [*by_night(1), 3])
def test_the_one_before_a_damaged_one(world_size: int, tmp_path: Path) -> None:
    run_ranks(load_past, world_size, tmp_path / "run", timeout=120.0)


def load_half(folder: Path) -> None:
    """Without checksums damage shows in the middle of the load, on one rank."""
    model, optimizer = trained(3)
    writer = zerocore.Checkpoints(folder, model, optimizer)
    writer.save(1).wait()
    expected = full_states(model, optimizer)
    train(model, optimizer, 1)
    writer.save(2).wait()
    with first_rank_only() as is_first:
        if is_first:
            break_head(folder / "step-00000002" / "__1_0.distcp")
    for stage in (1, 3):
        other = make(stage, 5)
        states = torch.optim.AdamW(other.parameters())
        hurried = zerocore.Checkpoints(folder, other, states, verify=False)
        with pytest.raises(DamagedError, match=r"step-00000002"):
            hurried.load(2)
        assert not states.state
        assert hurried.load() == 1
        assert_equal(full_states(other, states), expected)


def test_damage_that_one_rank_finds_late(tmp_path: Path) -> None:
    run_ranks(load_half, 2, tmp_path / "run", timeout=120.0)
