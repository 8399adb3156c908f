"""The last good save loads, whichever call fails and whichever byte changes."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.by_night import by_night
from tests.checkpoint.faults import Count, Disk, Recorder
from tests.checkpoint.saved_nets import assert_equal, full_states, make, train, trained
from tests.distributed.harness import run_ranks, run_to_end
from zerocore.checkpoint.commit import files

COMMON = (ValueError, RuntimeError)


def small(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with few parameters, so that a save is few calls; its optimizer after a step."""
    torch.manual_seed(seed)
    model = zerocore.shard(nn.Sequential(nn.Linear(4, 8, bias=False)), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    advance(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_twice(folder: Path, rank: int, count: Count) -> int:
    """Saves 1 and 2, of which one stays; ``count`` begins before the second one, on one rank."""
    model, optimizer = small()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=1)
    checkpoints.save(1).wait()
    advance(model, optimizer)
    dist.barrier()
    if dist.get_rank() == rank:
        count.start()
    checkpoints.save(2).wait()
    return count.made


def check_good(folders: dict[str, tuple[int, ...]]) -> None:
    """Each loads the newest one, as it was when it was saved; then saves again."""
    expected = {}
    model, optimizer = small()
    expected[1] = full_states(model, optimizer)
    advance(model, optimizer)
    expected[2] = full_states(model, optimizer)
    for folder, allowed in folders.items():
        checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=1)
        found = checkpoints.load()
        assert found in allowed, folder
        assert_equal(full_states(model, optimizer), expected[found])
        checkpoints.save(3).wait()
        assert [path.name for path in Path(folder).iterdir()] == ["step-00000003"]


# By day at every tenth call, of each rank.
@pytest.mark.parametrize("stride", [*by_night(1), 10])
def test_a_kill_at_every_call_on_each_rank(tmp_path: Path, stride: int) -> None:
    calls = run_ranks(save_twice, 2, tmp_path / "all", 0, Count())
    calls[1] = run_ranks(save_twice, 2, tmp_path / "all_1", 1, Count())[1]
    assert calls[0] > calls[1] > 6

    def kill(case: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
        rank, last = case
        folder = tmp_path / f"{rank}-{last}"
        outcomes = run_to_end(save_twice, 2, folder, rank, Count(last), group_timeout=10.0)
        assert "exit code -9" in (outcomes[rank].error or ""), (rank, last)
        # Rank 1 has ended its part when the first one completes the checkpoint.
        return str(folder), (1, 2) if rank == 0 else (1,)

    cases = [(rank, last) for rank in (0, 1) for last in range(1, calls[rank] + 1, stride)]
    with ThreadPoolExecutor(5) as pool:  # the survivors wait for the time limit of the group
        folders = dict(pool.map(kill, cases))
    run_ranks(check_good, 1, folders, timeout=120.0)


def record(folder: Path) -> list[Any]:
    recorder = Recorder()
    recorder.start()
    model, optimizer = small()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=1)
    checkpoints.save(1).wait()
    recorder.log.append((recorder.log[-1][0], "saved", (1,), None))
    advance(model, optimizer)
    checkpoints.save(2).wait()
    recorder.log.append((recorder.log[-1][0], "saved", (2,), None))
    return recorder.log


def test_a_loss_of_power_after_every_call(tmp_path: Path) -> None:
    """Files that were not flushed are lost, or only their names or bytes."""
    logs = run_ranks(record, 2, tmp_path / "real")
    log = sorted(
        ((stamp, rank, *rest) for rank, own in enumerate(logs) for stamp, *rest in own),
        key=lambda entry: entry[0],
    )
    disk, saved = Disk(), 0
    states: dict[str, tuple[int, ...]] = {}
    seen: set[Any] = set()
    for _, rank, name, args, result in log:
        if name == "saved":
            saved = args[0] if rank == 0 else saved
            continue
        disk.make(rank, name, args, result)
        for kept in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
            left = disk.left(*map(bool, kept))
            key = (saved, repr(left))
            if key in seen:
                continue
            seen.add(key)
            if not left:
                assert saved == 0
                continue
            folder = tmp_path / f"state-{len(seen)}"
            for inner, contents in left.items():
                (folder / inner).mkdir(parents=True)
                for file, data in contents.items():
                    (folder / inner / file).write_bytes(data)
            states[str(folder)] = (1, 2) if saved < 2 else (2,)
    assert saved == 2 and len(states) > 2
    run_ranks(check_good, 1, states, timeout=120.0)


def fail_everywhere(folder: Path, kinds: tuple[str, ...], error: int) -> None:
    model, optimizer = small()
    checkpoints = zerocore.Checkpoints(folder, model, optimizer, keep=1)
    checkpoints.save(1).wait()
    good = full_states(model, optimizer)
    originals = {name: getattr(files, name) for name in kinds}
    newest, step, done = 1, 1, [False, False]
    for rank in (0, 1):
        for last in range(1, 100):
            advance(model, optimizer)
            step += 1
            if dist.get_rank() == rank:
                Count(last, kinds, error).start()
            failed = False
            try:
                checkpoints.save(step)
                checkpoints.wait()
            except (OSError, RuntimeError) as caught:
                failed = True
                assert os.strerror(error) in str(caught)
            checkpoints.wait()
            for name, original in originals.items():
                setattr(files, name, original)
            dist.barrier()
            if not failed:
                done[rank] = last > 1
                break
            found = checkpoints.load()
            if found == newest:
                assert_equal(full_states(model, optimizer), good)
            else:  # it was complete, and what failed came behind
                assert found == step and rank == 0
            newest, good = found, full_states(model, optimizer)
        newest, good = step, full_states(model, optimizer)
    assert done == [True, True]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (("reserve", "write", "finish"), errno.ENOSPC),
        (("create", "make_folder"), errno.EACCES),
        (("flush", "flush_path", "rename"), errno.EIO),
    ],
    ids=["full disk", "no permission", "broken disk"],
)
def test_errors_at_every_call(kinds: tuple[str, ...], error: int, tmp_path: Path) -> None:
    run_ranks(fail_everywhere, 2, tmp_path, kinds, error, timeout=120.0)


def flip_bits(folder: Path, count: int) -> None:
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    checkpoints.save(1).wait()
    train(model, optimizer, 1)
    before = full_states(model, optimizer)
    new = torch.optim.AdamW(model.parameters())  # its states are read while files are compared
    resumed = zerocore.Checkpoints(folder, model, new)
    paths = sorted(path for path in (folder / "step-00000001").iterdir())
    choose = random.Random(7)
    for index in range(count):
        path = paths[index % len(paths)]
        data = bytearray(path.read_bytes())
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        dist.barrier()
        good = path.read_bytes()
        if dist.get_rank() == 0:
            path.write_bytes(bytes(data))
        dist.barrier()
        with pytest.raises(COMMON, match=path.name):
            (checkpoints if index // len(paths) % 2 else resumed).load()
        assert not new.state
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(good)
        dist.barrier()
    assert_equal(full_states(model, optimizer), before)
    assert checkpoints.load() == 1


@pytest.mark.parametrize("count", [*by_night(200), 20])
def test_flipped_bits_are_all_found(tmp_path: Path, count: int) -> None:
    run_ranks(flip_bits, 2, tmp_path, count, timeout=240.0)


def load_truncated(folder: Path) -> None:
    model, optimizer = trained(3)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    checkpoints.save(1).wait()
    other = make(3, 1)
    before = zerocore.full_state_dict(other, rank0_only=False)
    for path in sorted((folder / "step-00000001").iterdir()):
        good = path.read_bytes()
        for size in (0, 1, len(good) // 2, len(good) - 1):
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(good[:size])
            dist.barrier()
            with pytest.raises(COMMON, match=path.name):
                zerocore.Checkpoints(folder, other).load()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(good)
    after = zerocore.full_state_dict(other, rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_truncated_files_change_nothing(tmp_path: Path) -> None:
    run_ranks(load_truncated, 2, tmp_path, timeout=120.0)
