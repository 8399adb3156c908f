"""Training with states and parameters on disk: bits, readers, bytes; what a disk does wrong."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.training import case_named
from tests.engine.offloading import (
    ALL_ON_DISK,
    BF16,
    DISK,
    DISK_BOTH,
    FOLDER,
    adamw,
    assert_same_bits,
    backward,
    blocks,
    disk_files,
    disks_of,
    grouped,
    torchs,
)
from tests.engine.test_offload import VARIANTS, frozen, train, trained_blocks
from zerocore import Offload


def offloads_for(stage: int, name: str, make: Any) -> list[Offload]:
    """Two of those that the optimizer can have, others for each variant; one on several ranks."""
    can = disks_of(stage)
    if make is torchs:
        can = [each for each in can if each.states == "cpu"]
    turn = list(VARIANTS).index(name)
    few = 1 if dist.get_world_size() > 1 else 2
    return [can[(turn + index) % len(can)] for index in range(min(few, len(can)))]


def compare_all() -> None:
    """Each variant at each stage on one rank; in turn, at two on two ranks and at one on three."""
    case, world_size = case_named("plain"), dist.get_world_size()
    for stage in range(4):
        for number, (name, variant) in enumerate(VARIANTS.items()):
            if (stage + number + world_size) % (1, 2, 4)[world_size - 1]:
                continue
            options = dict(variant)
            run = partial(train, case, stage, options.pop("make"), **options)
            offloads = offloads_for(stage, name, variant["make"])
            expected = run(None) if offloads else {}
            for offload in offloads:
                what = f"stage {stage}, {name}, {offload}"
                print(what, flush=True)
                assert_same_bits(run(offload), expected, what)


@pytest.mark.parametrize("num_ranks", [*by_night(1, 2), 3])
def test_bits_are_those_of_no_offload(num_ranks: int) -> None:
    run_ranks(compare_all, num_ranks, timeout=300.0)


def compare_others() -> None:
    """Replicas of shards, adapters, dtypes, tied parameters."""
    mesh = init_device_mesh("cpu", (2, 2))
    runs: dict[str, tuple[Any, dict[str, Any]]] = {
        "hybrid": (case_named("plain"), {"group": mesh}),
        "hybrid, bf16": (case_named("plain"), {"group": mesh, "mixed_precision": BF16}),
        "frozen": (frozen(case_named("plain")), {}),
        "frozen, bf16": (frozen(case_named("plain")), {"mixed_precision": BF16}),
        **{name: (case_named(name), {}) for name in ("mixed_dtypes", "tied", "empty_shards")},
    }
    for number, (name, (case, options)) in enumerate(runs.items()):
        for stage, offload in ((3, ALL_ON_DISK), ((0, DISK), (2, DISK_BOTH))[number % 2]):
            run = partial(train, case, stage, grouped, **options)
            assert_same_bits(run(offload), run(None), f"{name}, stage {stage}, {offload}")


@pytest.mark.nightly
def test_bits_of_other_models_and_meshes() -> None:
    run_ranks(compare_others, 4, timeout=300.0)


def compare_blocks() -> None:
    for kind in ("clamped", "checkpointed", "compiled"):
        for stage, offload in ((2, DISK), (3, ALL_ON_DISK)):
            found, expected = (trained_blocks(kind, stage, each) for each in (offload, None))
            assert_same_bits(found, expected, f"{kind}, {stage}")


@pytest.mark.nightly
def test_bits_of_changed_checkpointed_and_compiled_blocks() -> None:
    run_ranks(compare_blocks, 2, timeout=120.0)


def step(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def changed_by_hand(offload: Offload | None) -> dict[str, torch.Tensor]:
    """Reads and writes by hand between steps, of weights and moments; a second optimizer."""
    model, optimizer = blocks(3, offload)
    found = {}
    for number in range(3):
        step(model, optimizer)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(1.01)
                param.data.local()[:1] += 0.5 if number == 1 else 0.0
                found[f"{number} {name}"] = param.norm().clone()
        optimizer.synchronize()
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
    del optimizer, state  # and with them the moments
    gc.collect()
    second = adamw(model.parameters())
    step(model, second)
    other, _ = blocks(3, None)
    loaded = adamw(other.parameters())
    loaded.load_state_dict(second.state_dict())
    for key, state in loaded.state_dict()["state"].items():
        found[f"moment {key}"] = state["exp_avg_sq"].local().clone()
    return found | zerocore.full_state_dict(model, rank0_only=False)


def check_readers(folder: str) -> None:
    expected = changed_by_hand(None)
    for offload in (DISK, ALL_ON_DISK):
        assert_same_bits(changed_by_hand(offload), expected, str(offload))
    model, optimizer = blocks(3, DISK)
    step(model, optimizer)
    with pytest.raises(ValueError, match="another optimizer has its moments on disk"):
        adamw(model.parameters()).load_state_dict(optimizer.state_dict())
    for index, (saving, loading) in enumerate(((ALL_ON_DISK, None), (None, DISK))):
        model, optimizer = blocks(3, saving)
        step(model, optimizer)
        checkpoints = zerocore.Checkpoints(f"{folder}/{index}", model, optimizer)
        checkpoints.save(1)
        checkpoints.wait()
        other, fresh = blocks(3, loading)
        assert zerocore.Checkpoints(f"{folder}/{index}", other, fresh).load() == 1
        for trained, by in ((model, optimizer), (other, fresh)):
            step(trained, by)
        results = [zerocore.full_state_dict(each, rank0_only=False) for each in (model, other)]
        assert_same_bits(results[1], results[0], f"{saving} to {loading}")


def test_values_are_read_and_written_between_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_readers, 2, folder)


def mapped_nbytes() -> int:
    """Resident bytes of the mapped file of states."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(r"states-of-rank-.*\n(?:\w+: .*\n)*?Rss: +(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


def check_memory() -> None:
    """Planned bytes are those of the file, whose space is taken."""
    for stage, offload in ((0, DISK), (2, DISK_BOTH), *((3, each) for each in disks_of(3))):
        for precision in (None, BF16):
            model, optimizer = blocks(stage, offload, mixed_precision=precision)
            for _ in range(2):
                step(model, optimizer)
            optimizer.synchronize()
            what = f"stage {stage}, {offload}, {precision}"
            measured = zerocore.memory_usage(model, optimizer)
            assert zerocore.planning.predict_memory(model) == measured, what
            status = os.fstat(disk_files()[0])
            assert status.st_size == measured.disk > 0, what
            assert status.st_blocks * 512 >= measured.disk, what  # a full disk is no SIGBUS later
            assert measured.host_buffers > 0, what
            assert zerocore.report(model).memory.disk == measured.disk, what
            assert "on disk" in str(zerocore.report(model)), what
            assert "states" in zerocore.describe(model).title(), what
            assert f"states-of-rank-{dist.get_rank()}" not in os.listdir(FOLDER), what
            del model, optimizer
            gc.collect()
            assert disk_files() == [], what


def check_given_back() -> None:
    """Between steps little of the file is in the process's memory."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model = zerocore.shard(model, stage=3, offload=ALL_ON_DISK)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    assert mapped_nbytes() < zerocore.memory_usage(model, optimizer).disk / 3


def test_memory_is_given_back() -> None:
    run_ranks(check_given_back, 1)


def test_planned_bytes_are_those_taken() -> None:
    run_ranks(check_memory, 2)


def refuse_all() -> list[str]:
    errors = []
    with torch.device("meta"):
        huge = nn.Linear(1 << 22, 1 << 20, bias=False)
    for model, options in (
        (huge, {"offload": DISK}),
        (nn.Linear(4, 4), {"offload": Offload(states="disk", path="/no/such/folder")}),
    ):
        with pytest.raises((ValueError, OSError, RuntimeError)) as error:
            zerocore.shard(model, stage=3, **options)
        errors.append(str(error.value))
    model, _ = blocks(3, DISK)
    for make in (torchs, lambda params: torch.optim.SGD(params, lr=0.1)):
        optimizer = make(model.parameters())
        backward(model)
        with pytest.raises(
            ValueError, match=rf"{type(optimizer).__name__} keeps its states in memory"
        ):
            optimizer.step()
    return errors


def test_refusals_are_named_on_every_rank() -> None:
    for full, missing in run_ranks(refuse_all, 2):
        assert "bytes free, " in full and FOLDER in full
        assert "path='/no/such/folder' is not a folder" in missing


def fail_on_one_rank(offload: Offload, how: str) -> str:
    """The errors of the ranks when the disk of rank 0 fails in the third step: the file ends, or
    its changes cannot be written."""
    model, optimizer = blocks(3, offload)
    for _ in range(2):
        step(model, optimizer)
    optimizer.synchronize()
    if dist.get_rank() == 0 and how == "ends":
        os.ftruncate(disk_files()[0], 8192)
    elif dist.get_rank() == 0:
        other = os.open("/dev/full", os.O_RDWR)
        os.dup2(other, disk_files()[0])
    try:
        for _ in range(3):
            step(model, optimizer)
        optimizer.synchronize()
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["ends", "takes nothing"])
@pytest.mark.parametrize("offload", [DISK, ALL_ON_DISK], ids=["states", "all"])
def test_a_failed_disk_reaches_all_ranks(offload: Offload, how: str) -> None:
    failed, other = run_ranks(fail_on_one_rank, 2, offload, how)
    assert "of unit '" in failed and f"{FOLDER}/states-of-rank-0." in failed, failed
    assert ("cannot read" if how == "ends" else "cannot write") in failed
    assert "rank 0" in other, other


def train_on(checkpoint: str, swap: str, steps: int, dies: bool) -> dict[str, torch.Tensor]:
    """Saves after two steps, or resumes there; the folder of the file is removed meanwhile."""
    offload = Offload(states="disk", gradients="cpu", parameters="disk", path=swap)
    model, optimizer = blocks(3, offload)
    checkpoints = zerocore.Checkpoints(checkpoint, model, optimizer)
    done = checkpoints.load() if os.listdir(checkpoint) else 0
    for number in range(done, steps):
        if number == 2 and done == 0:
            checkpoints.save(2)
            checkpoints.wait()
        backward(model)
        optimizer.step()
        if dies and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # under the update
        optimizer.zero_grad()
        assert os.listdir(swap) == []
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(swap)
    step(model, optimizer)
    state: dict[str, torch.Tensor] = zerocore.full_state_dict(model, rank0_only=False)
    return state


def train_plain(steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = blocks(3, None)
    for _ in range(steps):
        step(model, optimizer)
    state: dict[str, torch.Tensor] = zerocore.full_state_dict(model, rank0_only=False)
    return state


def test_a_killed_run_leaves_nothing_and_resumes(tmp_path: Path) -> None:
    """The file has no name: a folder that is removed is no loss either."""
    checkpoint, swap = tmp_path / "checkpoint", tmp_path / "swap"
    checkpoint.mkdir()
    swap.mkdir()
    args = (str(checkpoint), str(swap), 5)
    outcomes = run_to_end(train_on, 2, *args, True)
    assert all(outcome.error and "exit code -9" in outcome.error for outcome in outcomes)
    assert os.listdir(swap) == []
    resumed = run_ranks(train_on, 2, *args, False)
    expected = run_ranks(train_plain, 2, 6)
    assert_same_bits(resumed[0], expected[0], "resumed")
