"""Measures checkpoints on one rank: in a round each system saves and loads."""

from __future__ import annotations

import gc
import importlib
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

from bench.checkpoint.raw_disk import WAYS, WAYS_INTO_NEW, RawDisk, filled_memory
from bench.lib.models import BlockStack
from bench.lib.systems import apply_fsdp2, import_zerocore, is_installed

OWN, PEER, DEEPSPEED = "zerocore", "FSDP2 + DCP", "DeepSpeed ZeRO-3"
WIDTH, HEADS = 1024, 16
_CACHED_NBYTES = 4 << 20  # bytes of a read
BLOCK_NUMEL = 12 * WIDTH * WIDTH + 13 * WIDTH


@dataclass(frozen=True)
class CheckpointCell:
    """The size of a checkpoint of all ranks: blocks of a model with AdamW's two moments."""

    folder: str
    num_blocks: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        return self.nbytes_of(self.num_blocks)

    @property
    def small_blocks(self) -> int:
        """Blocks of a smaller model, which shows the constant part of a stall."""
        return max(self.num_blocks // 3, 1)

    def nbytes_of(self, num_blocks: int) -> int:
        """Returns the bytes of weights and moments of some blocks."""
        return 3 * 4 * BLOCK_NUMEL * num_blocks


@dataclass
class Figures:
    """Seconds of each round by system and call, and this rank's other figures."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, seconds: float) -> None:
        """Adds a round."""
        self.seconds.setdefault(key, []).append(seconds)


def together(action: Callable[[], Any]) -> float:
    """Runs the action; returns the seconds from the common start until all ranks have ended."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def drop_from_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache, so that the next read is from the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def bring_into_cache(folder: Path) -> None:
    """Reads a folder's files into the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(_CACHED_NBYTES):
                    pass


def io_counts() -> dict[str, int]:
    """Returns the bytes that this process has read (rchar), and read from disk (read_bytes)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


class _Peer:
    """FSDP2 and torch's writer with fsync, used as in torch's manual."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)

    def forget(self) -> None:
        self._optimizer = new_optimizer(self._model)

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
    """zerocore.Checkpoints, which verifies checksums before loading."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def open(self, folder: Path, **options: Any) -> Any:
        return import_zerocore().Checkpoints(folder, self._model, self._optimizer, **options)

    def save(self, folder: Path) -> None:
        self.open(folder, background=False).save(1)

    def forget(self) -> None:
        self._optimizer = new_optimizer(self._model)

    def load(self, folder: Path) -> None:
        self.open(folder).load()


class _DeepSpeed:
    """DeepSpeed's own files of each rank, with an fsync that its writer lacks.

    Its first run compiles shared-memory collectives for minutes. If it is killed, it leaves a file
    `lock` in `~/.cache/torch_extensions`, for which all later runs wait.
    """

    def __init__(self, num_blocks: int) -> None:
        torch.manual_seed(0)
        deepspeed: Any = importlib.import_module("deepspeed")
        model = BlockStack(num_blocks, WIDTH, HEADS)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=new_optimizer(model),
            config=config,
            dist_init_required=not dist.is_initialized(),
        )
        self._engine.backward(self._engine(torch.ones(1, 16, WIDTH)).sum())
        self._engine.step()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="1")
        for path in folder.rglob(f"*_rank_{dist.get_rank()}_*"):
            fsync_file(path)

    def forget(self) -> None:
        """Does nothing: its states stay in memory."""

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="1")


def fsync_file(path: Path) -> None:
    """Flushes a file to the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def trained(system: str, num_blocks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model under a system, and its optimizer after one step."""
    torch.manual_seed(0)
    model: nn.Module = BlockStack(num_blocks, WIDTH, HEADS)
    if system == PEER:
        apply_fsdp2(model, model.blocks, reshard=True)  # type: ignore[arg-type]
    else:
        model = import_zerocore().shard(model, stage=3)
    optimizer = new_optimizer(model)
    step(model, optimizer)
    return model, optimizer


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Makes an optimizer without states, as in a process that resumes."""
    return torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes one training step."""
    model(torch.ones(1, 16, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _contestants(cell: CheckpointCell) -> Iterator[tuple[str, Any]]:
    memory = filled_memory(cell.nbytes // dist.get_world_size())
    for way in (*WAYS, *WAYS_INTO_NEW):
        yield way.name, RawDisk(way, memory)
    yield OWN, _Own(*trained(OWN, cell.num_blocks))
    yield PEER, _Peer(*trained(PEER, cell.num_blocks))
    if is_installed("deepspeed"):
        yield DEEPSPEED, _DeepSpeed(cell.num_blocks)


def _make_ready(system: Any, cache: Callable[[Path], None], folder: Path) -> None:
    """Prepares a load as in a process that resumes; ``cache`` fills or drops the page cache."""
    system.forget()
    gc.collect()  # several systems' objects are in this process
    if dist.get_rank() == 0:
        cache(folder)


def measure(cell: CheckpointCell) -> Figures:
    """Measures each system's save, cold load and warm load, in turns."""
    figures = Figures()
    contestants = list(_contestants(cell))
    for index in range(cell.rounds):
        first = index % len(contestants)
        for name, system in contestants[first:] + contestants[:first]:
            folder = Path(cell.folder) / name.replace(" ", "-")
            figures.add(f"{name}: save", together(partial(system.save, folder)))
            _make_ready(system, drop_from_cache, folder)
            before = io_counts()
            figures.add(f"{name}: cold load", together(partial(system.load, folder)))
            for count in ("rchar", "read_bytes"):
                figures.nbytes[f"{name}: {count}"] = io_counts()[count] - before[count]
            _make_ready(system, bring_into_cache, folder)
            figures.add(f"{name}: warm load", together(partial(system.load, folder)))
            if dist.get_rank() == 0 and (name != OWN or index + 1 < cell.rounds):
                shutil.rmtree(folder)
            dist.barrier()
    own = dict(contestants)[OWN]
    _measure_stall(cell, own, "", figures)
    _measure_stall(cell, _Own(*trained(OWN, cell.small_blocks)), "small: ", figures)
    return figures


def _measure_stall(cell: CheckpointCell, own: _Own, label: str, figures: Figures) -> None:
    """Measures background saves between training steps."""
    folder = Path(cell.folder) / f"background{label.strip(': ')}"
    checkpoints = own.open(folder, keep=1, memory_budget=max(cell.nbytes // 4, 16 << 20))
    for index in range(max(cell.rounds, 3)):
        began = time.perf_counter()
        step(own._model, own._optimizer)
        figures.add(f"{label}step", time.perf_counter() - began)
        dist.barrier()
        pending = checkpoints.save(index)
        figures.add(f"{label}stall in save", pending.stall_seconds)
        step(own._model, own._optimizer)
        figures.add(f"{label}stall in all", pending.stall_seconds)
        pending.wait()
        figures.nbytes["held"] = max(pending.held_nbytes, figures.nbytes.get("held", 0))


def load_elsewhere(cell: CheckpointCell, verify: bool) -> dict[str, int]:
    """Returns the bytes that this rank reads of a checkpoint of another number of ranks."""
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
