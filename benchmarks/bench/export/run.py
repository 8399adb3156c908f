"""Measures exports of full weights by each library, and parking of state."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from bench.lib.systems import Recipe, System, import_zerocore, wrap_model

SHARD = System("zerocore", 3, "zerocore.export, shard")
FULLY_SHARD = System("fully_shard", 3, "zerocore.export, fsdp")
FSDP2 = System("fsdp2", 3, "FSDP2")
PER_PARAM, STATE_DICT = "FSDP2, full_tensor()", "FSDP2, get_model_state_dict"
LABELS = (SHARD.label, FULLY_SHARD.label, PER_PARAM, STATE_DICT)
RAW = "all-gathers alone, a block each"
MIB = 2**20


class Block(nn.Module):
    """A block with the parameters of a Llama's: seven matrices and two vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Gives `x` back."""
        return x


class Blocks(nn.Module):
    """A chain of blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Calls each block in turn."""
        for block in self.blocks:
            x = block(x)
        return x


def _take(model: nn.Module, max_bytes: int) -> None:
    for bucket in import_zerocore().export(model, max_bytes=max_bytes):
        bucket.release()


def _take_tensors(model: nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        full.to(dtype)


def _take_state_dict(model: nn.Module, dtype: torch.dtype) -> None:
    options = StateDictOptions(full_state_dict=True)
    for full in get_model_state_dict(model, options=options).values():
        full.to(dtype)


def _gather_blocks(parts: list[Tensor], full: Tensor) -> None:
    """Gathers the bytes of all blocks into one buffer."""
    for part in parts:
        dist.all_gather_into_tensor(full, part)


@torch.no_grad()
def export_on_this_rank(
    width: int, depth: int, dtype: str, max_bytes: int, num_rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns each way's milliseconds of an export, and the MiB of resident memory at its peak.

    In a round each way takes its turn, and the turns rotate. Ranks begin together.
    """
    recipe = Recipe(dtype)
    target = recipe.compute_dtype or torch.float32
    models = {}
    for system in (SHARD, FULLY_SHARD, FSDP2):
        model = Blocks(width, depth)
        models[system.label] = wrap_model(system, model, model.blocks, recipe=recipe)
        models[system.label](torch.zeros(1))
    ways: dict[str, Callable[[], None]] = {
        SHARD.label: lambda: _take(models[SHARD.label], max_bytes),
        FULLY_SHARD.label: lambda: _take(models[FULLY_SHARD.label], max_bytes),
        PER_PARAM: lambda: _take_tensors(models[FSDP2.label], target),
        STATE_DICT: lambda: _take_state_dict(models[FSDP2.label], target),
    }
    count = sum(param.numel() for param in Block(width).parameters())
    full = torch.empty(count, dtype=target)
    parts = list(torch.zeros(depth, count // dist.get_world_size(), dtype=target))
    ways[RAW] = lambda: _gather_blocks(parts, full)
    found: dict[str, list[tuple[float, float]]] = {label: [] for label in ways}
    labels = list(ways)
    for index in range(num_rounds + 1):
        first = index % len(ways)
        for label in [*labels[first:], *labels[:first]]:
            measured = _measure(ways[label])
            if index > 0:
                found[label].append(measured)
    return found


def planned_peak(width: int, depth: int, dtype: str, max_bytes: int) -> list[float]:
    """Returns the MiB at the peak of one rank's export, by the plan and by the pool."""
    zerocore = import_zerocore()
    model = Blocks(width, depth)
    wrapped = wrap_model(SHARD, model, model.blocks, recipe=Recipe(dtype))
    from zerocore.model.state import state_of

    engine = state_of(wrapped).engine
    engine.forget_recent_peak()
    _take(wrapped, max_bytes)
    planned = zerocore.weights.export_info(wrapped).peak_nbytes(max_bytes)
    return [planned / MIB, engine.pool_stats.recent_peak_nbytes / MIB]


def _measure(way: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    begin = time.perf_counter()
    way()
    return 1e3 * (time.perf_counter() - begin), _status("VmHWM") - before


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def park_on_this_rank(nbytes: int, num_rounds: int) -> dict[str, list[float]]:
    """Measures the milliseconds of parking a model with `nbytes` of state and of restoring it, and
    of plain copies of as many bytes: into existing memory, and into new memory."""
    zerocore = import_zerocore()
    numel = nbytes // 4 // 4  # parameters, gradients and two moments
    width = 1024
    layers = [nn.Linear(width, numel // 8 // width, bias=False) for _ in range(8)]
    model = zerocore.shard(nn.Sequential(*layers), stage=3, units=["Linear"])
    optimizer = zerocore.optim.AdamW(model.parameters())
    sum(layer(torch.ones(1, width)).sum() for layer in model).backward()
    optimizer.step()
    found: dict[str, list[float]] = {name: [] for name in ("park", "copy", "return", "copy to new")}
    source, there = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    for index in range(num_rounds + 1):
        times = [time.perf_counter()]
        with zerocore.parked(model, optimizer):
            times.append(time.perf_counter())
            pause = time.perf_counter()
            there.copy_(source)
            copied = time.perf_counter() - pause
            pause = time.perf_counter()
            new = torch.empty(nbytes, dtype=torch.uint8).copy_(source)
            copied_to_new = time.perf_counter() - pause
            del new
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        if index > 0:
            taken = (times[1] - times[0], copied, times[3] - times[2], copied_to_new)
            for name, seconds in zip(found, taken, strict=True):
                found[name].append(1e3 * seconds)
    return found
