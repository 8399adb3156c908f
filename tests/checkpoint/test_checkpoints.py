"""zerocore.Checkpoints: resumed training is the same training, and no crash loses a checkpoint."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.checkpoint.mutants import sign_folder
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states, make, train, trained
from tests.distributed.harness import run_ranks
from tests.io.page_cache import can_bypass_cache, drop_from_cache
from zerocore.checkpoint.dcp import loading
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.safe_reader import load_tensors

COMMON = (ValueError, RuntimeError)


class Loader:
    """A data loader's state: another one on each rank."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.arange(3) + self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Training:
    """A model with dropout, an optimizer with a schedule, and batches drawn at random."""

    def __init__(self, folder: Path, stage: int, name: str, seed: int = 0, **options: Any) -> None:
        self.model = make(stage, seed)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.loader = Loader()
        self.loader.position = 100 * dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + 10 * self.loader.position)
        states: dict[str, Any] = {"schedule": self.schedule, "loader": self.loader}
        self.checkpoints = zerocore.Checkpoints(
            folder, self.model, self.optimizer, stateful=states, **options
        )

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.loader.position += 1
            x = torch.randn(4, 4, 3, 3) * random.random()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses


def resume(folder: Path) -> None:
    for stage, name in ((0, "adamw"), (1, "sgd"), (2, "zerocore"), (3, "zerocore"), (3, "adamw")):
        place = folder / f"{dist.get_world_size()}-{stage}-{name}"
        first = Training(place, stage, name, background=stage != 1)
        assert first.checkpoints.load() is None and first.checkpoints.steps() == []
        first.run(2)
        pending = first.checkpoints.save(2)
        assert pending.stall_seconds > 0.0
        losses = first.run(3)  # while it is written
        pending.wait()
        assert pending.done and first.checkpoints.steps() == [2]
        second = Training(place, stage, name, seed=1)
        assert second.checkpoints.load() == 2
        assert second.loader.position == first.loader.position - 3
        assert second.run(3) == losses
        assert_equal(
            full_states(second.model, second.optimizer), full_states(first.model, first.optimizer)
        )
        states = {"model": make(3, 5).state_dict()}
        dcp.load(states, checkpoint_id=place / "step-00000002")  # torch reads it, too


@pytest.mark.one_by_day
@pytest.mark.parametrize("world_size", [1, 3])
def test_resumed_training_is_the_same_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    run_ranks(resume, world_size, tmp_path, timeout=120.0)


def load_elsewhere(folder: Path) -> None:
    for stage, name in ((0, "adamw"), (1, "sgd"), (2, "zerocore"), (3, "zerocore")):
        expected = Training(folder / f"2-{stage}", stage, name).checkpoints
        other = Training(folder / f"3-{stage}-{name}", 3 - stage, name, seed=1)
        assert other.checkpoints.load(2) == 2
        again = Training(folder / f"3-{stage}-{name}", stage, name, seed=2)
        again.checkpoints.load()
        assert_equal(
            full_states(other.model, other.optimizer), full_states(again.model, again.optimizer)
        )
        assert other.loader.position in (2, 102) and expected.steps() == []


def test_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(resume, 3, tmp_path, timeout=120.0)
    run_ranks(load_elsewhere, 2, tmp_path)


def hybrid(folder: Path, is_saving: bool) -> dict[str, Any]:
    mixed = zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
    shape = (2, 2) if is_saving else (1, 3)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer = trained(3 if is_saving else 2, "zerocore", group=mesh, mixed_precision=mixed)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    if is_saving:
        checkpoints.save(5).wait()
    else:
        train(model, optimizer, 1)
        assert checkpoints.load() == 5
    return full_states(model, optimizer)


def test_hybrid_meshes_and_mixed_precision(tmp_path: Path) -> None:
    saved = run_ranks(hybrid, 4, tmp_path, True)
    for loaded in run_ranks(hybrid, 3, tmp_path, False):
        assert_equal(loaded, saved[0])


def keep_and_refuse(folder: Path) -> None:
    training = Training(folder / "kept", 3, "adamw", keep=2)
    for step in range(1, 5):
        training.checkpoints.save(step)
    training.checkpoints.wait()
    assert training.checkpoints.steps() == [3, 4]
    with pytest.raises((FileExistsError, RuntimeError), match="never overwritten"):
        training.checkpoints.save(4)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 1"):
        training.checkpoints.load(1)
    if dist.get_rank() == 0:
        (folder / "kept" / "step-00000009.tmp-0123").mkdir()
        (folder / "kept" / "step-00000008").mkdir()  # without .metadata
    dist.barrier()
    assert training.checkpoints.load() == 4
    (folder / "kept").rename(folder / "moved") if dist.get_rank() == 0 else None
    dist.barrier()
    assert training.checkpoints.steps() == []


def test_old_ones_are_deleted_and_halves_are_not_seen(tmp_path: Path) -> None:
    run_ranks(keep_and_refuse, 2, tmp_path)


def flip(path: Path) -> None:
    """Changes a bit of a number in one of the chunks of a file."""
    data = bytearray(path.read_bytes())
    stored = Contents(path.parent).metadata.storage_data
    places = [info for info in stored.values() if info.relative_path == path.name]
    place = max(places, key=lambda info: info.length)
    with zipfile.ZipFile(io.BytesIO(data[place.offset : place.offset + place.length])) as chunk:
        name = next(name for name in chunk.namelist() if name.endswith("/data/0"))
        begin = place.offset + chunk.getinfo(name).header_offset
    name_length, extra_length = struct.unpack("<HH", data[begin + 26 : begin + 30])
    data[begin + 30 + name_length + extra_length] ^= 4
    path.write_bytes(bytes(data))


def lead_to(folder: Path, path: str) -> None:
    """Forges metadata whose bytes are in another file, with their checksum."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sign_folder(folder, ".metadata")


def break_files(folder: Path) -> None:
    training = Training(folder, 3, "adamw", keep=None)
    training.checkpoints.save(1).wait()
    before = full_states(training.model, training.optimizer)
    training.run(1)
    changed = full_states(training.model, training.optimizer)
    saved, rank = folder / "step-00000001", dist.get_rank()
    file, values = saved / "__1_0.distcp", saved / "__0_1.distcp"
    good = {path: path.read_bytes() for path in saved.iterdir()}
    metadata, sums = saved / ".metadata", saved / "checksums.json"
    evil = pickle.dumps(os.system)
    damages: list[tuple[str, Any]] = [
        (r"__1_0\.distcp.*damaged.*'(model|optim)", lambda: flip(file)),
        (r"__1_0\.distcp has \d+ bytes, but '", lambda: file.write_bytes(good[file][:-50])),
        (r"__1_0\.distcp is missing", file.unlink),
        (r"__0_1\.distcp is damaged", lambda: values.write_bytes(good[values][:-1] + b"x")),
        (r"posix\.system", lambda: (sums.unlink(), metadata.write_bytes(evil))),
        (r"\.metadata is damaged", lambda: metadata.write_bytes(good[metadata][:100])),
        (r"checksums.json is missing", sums.unlink),
        (r"checksums.json is damaged", lambda: sums.write_bytes(good[sums][1:])),
        (r"rank-0.pt is damaged", lambda: (saved / "rank-0.pt").write_bytes(b"rest")),
        (r"rank-1.pt is missing", (saved / "rank-1.pt").unlink),
        (r"__1_0\.distcp is not a regular file", lambda: (file.unlink(), os.mkfifo(file))),
        (r"\.metadata.*'/dev/zero'", lambda: lead_to(saved, "/dev/zero")),
    ]
    for message, damage in damages:
        dist.barrier()
        if rank == 0:
            damage()
        dist.barrier()
        with pytest.raises(COMMON, match=message):
            training.checkpoints.load()
        assert_equal(full_states(training.model, training.optimizer), changed)
        if rank == 0:
            for path, data in good.items():
                if not path.is_file():
                    path.unlink(missing_ok=True)
                path.write_bytes(data)
    dist.barrier()
    training.checkpoints.load()
    assert_equal(full_states(training.model, training.optimizer), before)


def break_values(folder: Path) -> None:
    training = Training(folder, 3, "adamw")
    training.checkpoints.save(1).wait()
    values = folder / "step-00000001" / "__0_1.distcp"
    if dist.get_rank() == 0:
        values.write_bytes(values.read_bytes()[:-1] + b"x")
    dist.barrier()
    with pytest.raises(COMMON, match=r"__0_1\.distcp is damaged"):
        zerocore.Checkpoints(folder, training.model).load()  # whose ranks need no options


def bytes_asked() -> int:
    """The bytes that this process has asked the system to read so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def save_large(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Saves 60 MiB of each of 2 ranks, a third of it weights; the first one has of no bias any."""
    model = zerocore.shard(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    zerocore.Checkpoints(folder, model, optimizer).save(1).wait()
    return model, optimizer


def read_once(folder: Path) -> None:
    model, optimizer = save_large(folder)
    own = sum(param.nbytes for param in model.parameters()) // dist.get_world_size()
    found, rest = [], []

    def load_rest(state: Any, contents: Contents) -> None:
        rest.append(state)
        load_tensors(state, contents)

    path = folder / "step-00000001" / f"__{dist.get_rank()}_0.distcp"
    for is_new, budget, is_cold in product((False, True), ("16MiB", "1GiB"), (False, True)):
        loaded = torch.optim.AdamW(model.parameters()) if is_new else optimizer
        (drop_from_cache if is_cold else Path.read_bytes)(path)
        before = bytes_asked()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "load_tensors", load_rest)
            zerocore.Checkpoints(folder, model, loaded, memory_budget=budget).load()
        found.append((bytes_asked() - before) / own)
    assert rest == []  # nothing is left to torch
    # The used ones of the 3 parts of 20 MiB, all or the weights, are read twice, but where it is
    # read past the page cache and may be kept beside the model.
    assert found == [pytest.approx(share, abs=0.1) for share in (6, 6, 6, 3, 4, 4, 4, 3)]
    assert_equal(full_states(model, loaded), full_states(model, optimizer))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count reads")
def test_what_a_rank_has_room_for_is_read_once(tmp_path: Path) -> None:
    if not can_bypass_cache(tmp_path):
        pytest.skip("the file system has no reads past the page cache")
    run_ranks(read_once, 2, tmp_path)


def break_cold(folder: Path) -> None:
    model, optimizer = save_large(folder)
    shards = [param.local().clone() for param in model.parameters()]  # type: ignore[operator]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    path = folder / "step-00000001" / "__1_0.distcp"
    size = path.stat().st_size
    for place, budget in ((5_000_000, "1GiB"), (size - 9_000_000, "16MiB"), (size - 1, "1GiB")):
        if dist.get_rank() == 0:
            flip_on_disk(path, place)
        dist.barrier()
        new = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            COMMON, match=r"__1_0\.distcp is damaged: checksum mismatch.*'(model|optim)"
        ):
            zerocore.Checkpoints(folder, model, new, memory_budget=budget).load()
        assert not new.state
        for param, shard in zip(model.parameters(), shards, strict=True):
            assert torch.equal(param.local(), shard + 1.0)  # type: ignore[operator]
        dist.barrier()
        if dist.get_rank() == 0:
            flip_on_disk(path, place)
        dist.barrier()
    zerocore.Checkpoints(folder, model, optimizer).load()
    for param, shard in zip(model.parameters(), shards, strict=True):
        assert torch.equal(param.local(), shard)  # type: ignore[operator]


def flip_on_disk(path: Path, place: int) -> None:
    """Flips a bit, and leaves nothing of the file in the page cache."""
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte ^ 16]), place)
    drop_from_cache(path)


def test_damage_in_what_is_read_past_the_cache_changes_nothing(tmp_path: Path) -> None:
    run_ranks(break_cold, 2, tmp_path)


def save_side_by_side(folder: Path) -> None:
    """The ranks' threads of two runs' saves must not meet: each run waits in another order."""
    model, optimizer = trained(3)
    runs = [zerocore.Checkpoints(folder / name, model, optimizer) for name in ("a", "b")]
    for step in range(1, 4):
        pending = [run.save(step) for run in runs]
        for each in pending[:: 1 if dist.get_rank() else -1]:
            each.wait()
        train(model, optimizer, 1)
    runs.append(zerocore.Checkpoints(folder / "c", model, optimizer, background=False))
    for run in runs:
        run.save(4)
    for run in runs:
        run.wait()
        assert run.steps() == [2, 3, 4][-3 if run is not runs[2] else -1 :]


def test_several_runs_of_one_model_save_at_once(tmp_path: Path) -> None:
    run_ranks(save_side_by_side, 2, tmp_path)


def test_damaged_files_are_found_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(break_files, 2, tmp_path / "read")
    run_ranks(break_values, 2, tmp_path / "unread")


def load_wrong(folder: Path) -> None:
    model, optimizer = trained(3)
    zerocore.Checkpoints(folder, model, optimizer).save(1).wait()
    other = zerocore.shard(nn.Sequential(nn.Linear(6, 4)))
    with pytest.raises(COMMON, match=r"step-00000001.*missing \['model\.0\.bias'.*'model\.conv"):
        zerocore.Checkpoints(folder, other).load()
    net = make(None)
    net.head.bias = nn.Parameter(torch.zeros(7))  # type: ignore[union-attr]
    wrong_shape = zerocore.shard(net)
    with pytest.raises(COMMON, match=r"step-00000001.*'model\.head\.bias' has shape \(6,\)"):
        zerocore.Checkpoints(folder, wrong_shape).load()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(COMMON, match=r"another kind of optimizer.*momentum_buffer"):
        zerocore.Checkpoints(folder, model, sgd).load()
    halves = torch.optim.AdamW([{"params": list(model.parameters())[:2]}])
    with pytest.raises(COMMON, match="parameter groups of"):
        zerocore.Checkpoints(folder, model, halves).load()
    with pytest.raises(COMMON, match=r"no state for \['loader'\]; it has"):
        zerocore.Checkpoints(folder, model, optimizer, stateful={"loader": Loader()}).load()
    with pytest.raises(FileNotFoundError, match="is one checkpoint, expected the folder that"):
        zerocore.Checkpoints(folder / "step-00000001", model, optimizer).load()
    new = torch.optim.AdamW(model.parameters(), lr=5.0)
    new.param_groups[0]["added_later"] = 7
    zerocore.Checkpoints(folder, model, new).load()
    assert new.param_groups[0]["lr"] == 1e-2 and new.param_groups[0]["added_later"] == 7
    train(model, new, 1)


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(load_wrong, 2, tmp_path)
