"""What one rank does in a round: each system saves, and loads what the disk alone has."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.lib.models import BlockStack
from bench.lib.systems import apply_fsdp2, import_zerocore

OWN, PEER, RAW = "zerocore", "FSDP2 + DCP", "the disk alone"
WIDTH, HEADS = 1024, 16
BLOCK_NUMEL = 12 * WIDTH * WIDTH + 13 * WIDTH
_RAW_BLOCK = 1 << 20


@dataclass(frozen=True)
class CheckpointCell:
    """How much is saved: blocks of a model with AdamW's two moments, of all ranks together."""

    folder: str
    num_blocks: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Of weights and moments."""
        return 3 * 4 * BLOCK_NUMEL * self.num_blocks


@dataclass
class Figures:
    """Seconds of each round by (system, what), and what else was found on this rank."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, seconds: float) -> None:
        """One more round."""
        self.seconds.setdefault(key, []).append(seconds)


def together(action: Callable[[], Any]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def drop_from_cache(folder: Path) -> None:
    """Makes the next read of a folder's files come from the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def io_counts() -> dict[str, int]:
    """Bytes that this process has asked for (rchar), and that came from the disk (read_bytes)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


class _Raw:
    """This rank's share of the bytes, in one file."""

    def __init__(self, nbytes: int) -> None:
        self._data = memoryview(bytearray(os.urandom(_RAW_BLOCK)) * (nbytes // _RAW_BLOCK))

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        for begin in range(0, len(self._data), _RAW_BLOCK):
            yield begin, self._data[begin : begin + _RAW_BLOCK]

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        file = os.open(folder / f"{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)
        for begin, block in self._blocks():
            os.pwrite(file, block, begin)
        os.fsync(file)
        os.close(file)

    def load(self, folder: Path) -> None:
        file = os.open(folder / f"{dist.get_rank()}", os.O_RDONLY)
        for begin, block in self._blocks():
            os.preadv(file, [block], begin)
        os.close(file)


class _Peer:
    """FSDP2 and torch's own writer, as its manual has it, with fsync."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, states = get_state_dict(self._model, self._optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


class _Own:
    """zerocore.Checkpoints, checksums compared before loading."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def open(self, folder: Path, **options: Any) -> Any:
        return import_zerocore().Checkpoints(folder, self._model, self._optimizer, **options)

    def save(self, folder: Path) -> None:
        self.open(folder, background=False).save(1)

    def load(self, folder: Path) -> None:
        self.open(folder).load()


def trained(system: str, num_blocks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under a system and its optimizer after one step."""
    torch.manual_seed(0)
    model: nn.Module = BlockStack(num_blocks, WIDTH, HEADS)
    if system == PEER:
        apply_fsdp2(model, model.blocks, reshard=True)  # type: ignore[arg-type]
    else:
        model = import_zerocore().shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One of training."""
    model(torch.ones(1, 16, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _contestants(cell: CheckpointCell) -> Iterator[tuple[str, Any]]:
    yield RAW, _Raw(cell.nbytes // dist.get_world_size())
    yield OWN, _Own(*trained(OWN, cell.num_blocks))
    yield PEER, _Peer(*trained(PEER, cell.num_blocks))


def measure(cell: CheckpointCell) -> Figures:
    """Save and cold load of each system, in turns."""
    figures = Figures()
    contestants = list(_contestants(cell))
    for index in range(cell.rounds):
        for name, system in contestants[index % 3 :] + contestants[: index % 3]:
            folder = Path(cell.folder) / name.replace(" ", "-")
            figures.add(f"{name}: save", together(partial(system.save, folder)))
            if dist.get_rank() == 0:
                drop_from_cache(folder)
            before = io_counts()
            figures.add(f"{name}: cold load", together(partial(system.load, folder)))
            for count in ("rchar", "read_bytes"):
                figures.nbytes[f"{name}: {count}"] = io_counts()[count] - before[count]
            if dist.get_rank() == 0 and (name != OWN or index + 1 < cell.rounds):
                shutil.rmtree(folder)
            dist.barrier()
    _measure_stall(cell, contestants[1][1], figures)
    return figures


def _measure_stall(cell: CheckpointCell, own: _Own, figures: Figures) -> None:
    """Background saves with steps of training around them."""
    folder = Path(cell.folder) / "background"
    checkpoints = own.open(folder, keep=1, memory_budget=max(cell.nbytes // 4, 16 << 20))
    for index in range(cell.rounds):
        began = time.perf_counter()
        step(own._model, own._optimizer)
        figures.add("step", time.perf_counter() - began)
        dist.barrier()
        pending = checkpoints.save(index)
        figures.add("stall in save", pending.stall_seconds)
        step(own._model, own._optimizer)
        figures.add("stall in all", pending.stall_seconds)
        pending.wait()
        figures.nbytes["held"] = max(pending.held_nbytes, figures.nbytes.get("held", 0))


def load_elsewhere(cell: CheckpointCell, verify: bool) -> dict[str, int]:
    """Bytes that this rank reads of a checkpoint of another number of ranks."""
    own = _Own(*trained(OWN, cell.num_blocks))
    folder = Path(cell.folder) / OWN
    if dist.get_rank() == 0:
        drop_from_cache(folder)
    checkpoints = own.open(folder, verify=verify)
    dist.barrier()
    before = io_counts()
    checkpoints.load()
    after = io_counts()
    return {name: after[name] - before[name] for name in ("rchar", "read_bytes")}
