"""Explains OutOfMemory errors: where memory ran out, what holds it, and which changes save some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerocore.hooks.optimizer_steps import optimizers_of
from zerocore.model.state import ShardState, state_of
from zerocore.model.units import Unit
from zerocore.planning.candidates import Candidate, candidates, fitting
from zerocore.planning.prediction import division_of, planner_of
from zerocore.reporting.memory_usage import usage_of
from zerocore.reporting.unlike_dtypes import explain_types
from zerocore.tensor.rows import shard_of

NUM_BUCKETS = 3  # the message lists so many
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Diagnosis:
    """Where memory ran out on this rank and what held it, in bytes.

    Attributes:
        unit: names of the units in use; empty between units, and where nothing is gathered.
        phase: ``forward``, ``backward``, ``recomputed forward``, ``optimizer step``, or
            ``optimizer step or other`` in :func:`explain_out_of_memory`.
        requested: the bytes that could not be allocated; None if the error does not say.
        held: bytes by category.
        buckets: gathered units and their bytes, largest first.
        changes: changes of options, with the bytes that each would save, predicted.
    """

    unit: str
    phase: str
    requested: int | None
    held: dict[str, int]
    buckets: tuple[tuple[str, int], ...]
    changes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        where = f" of unit '{self.unit}'" if self.unit else ""
        what = "memory" if self.requested is None else f"{self.requested:,} bytes"
        lines = [f"zerocore: no room for {what} in the {self.phase}{where}. On this rank, bytes:"]
        lines += [f"  {nbytes:>18,}  {name}" for name, nbytes in self.held.items()]
        if self.buckets:
            listed = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.buckets)
            lines.append(f"Largest gathered units: {listed}.")
        lines.append("Changes that save memory (predicted; activations are not counted):")
        for text, nbytes in self.changes:
            enough = "; enough for this request" if 0 < (self.requested or 0) <= nbytes else ""
            lines.append(f"  {text}: saves {nbytes:,}{enough}")
        lines.append("  a smaller micro-batch, or torch.utils.checkpoint: saves activations")
        return "\n".join(lines)


class OutOfMemory(torch.OutOfMemoryError):
    """A torch.OutOfMemoryError that says what held the memory; see ``diagnosis``."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(f"{message}\n{diagnosis}")
        self.diagnosis = diagnosis


@contextmanager
def explain_out_of_memory(model: nn.Module) -> Iterator[None]:
    """Explains OutOfMemory errors raised in the block.

    Forward, backward and ``zerocore.optim.AdamW.step`` do so by themselves. Use this for other
    code: the first step of another optimizer, which makes its states, and code between steps. It
    costs nothing without an error.

    Raises:
        ValueError: the model is not sharded.
        OutOfMemory: instead of a torch.OutOfMemoryError, a MemoryError, or a RuntimeError of the
            CPU allocator.
    """
    state = state_of(model)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explained = _explain(error, state, "optimizer step or other", _units_in_use(state))
        if explained is None:
            raise
        raise explained from error


def explain_forward(
    error: BaseException, state: ShardState, units: tuple[int, ...]
) -> Exception | None:
    """Returns an explanation of an error in the forward of ``units``; None for unknown errors."""
    if (explained := explain_types(error, [state.units[unit] for unit in units])) is not None:
        return explained
    recomputed = torch._C._current_graph_task_id() != -1
    phase = "recomputed forward" if recomputed else "forward"
    return _explain(error, state, phase, [state.units[unit] for unit in units])


def explain_step(error: BaseException, params: Sequence[Any]) -> OutOfMemory | None:
    """Returns an explanation of an error in an optimizer's step; None for unknown errors."""
    shards = (shard_of(param) for param in params)
    state = next((shard.state_ref() for shard in shards if shard is not None), None)
    return None if state is None else _explain(error, state, "optimizer step", [])


def explain_backward(error: BaseException, state: ShardState) -> OutOfMemory | None:
    """Returns an explanation of an error in a backward; None if the model was not reached."""
    if not state.engine.in_backward_pass:
        return None
    return _explain(error, state, "backward", _units_in_use(state))


def _explain(
    error: BaseException, state: ShardState, phase: str, units: list[Unit]
) -> OutOfMemory | None:
    if isinstance(error, OutOfMemory) or not _is_out_of_memory(error):
        return None
    name = ", ".join(unit.name for unit in units)
    message = str(error).partition("\nException raised from")[0]
    requested = _requested_nbytes(message)
    diagnosis = Diagnosis(
        name, phase, requested, _held(state), _buckets(state), tuple(_savings(state))
    )
    return OutOfMemory(message, diagnosis)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _requested_nbytes(message: str) -> int | None:
    match = re.search(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)", message, re.IGNORECASE)
    return int(float(match[1]) * _UNITS[match[2].replace("bytes", "")]) if match else None


def _held(state: ShardState) -> dict[str, int]:
    usage, stats = usage_of(state, optimizers_of(state)), state.engine.pool_stats
    held = {
        "parameters": usage.parameters,
        "gradients": usage.gradients,
        "optimizer state": usage.optimizer,
        "main weights": usage.main_weights,
        "bucket pool, in use": stats.in_use_nbytes,
        "bucket pool, free": stats.reserved_nbytes - stats.in_use_nbytes,
    }
    if state.device.type == "cuda":
        allocated = torch.cuda.memory_allocated(state.device)
        held["activations and the rest"] = max(0, allocated - sum(held.values()))
        reserved = torch.cuda.memory_reserved(state.device)
        held["free in torch's allocator"] = reserved - allocated
    if usage.host > 0:
        held["on the host, by offload"] = usage.host
    if usage.disk > 0:
        held["on disk, by offload"] = usage.disk
    return held


def _units_in_use(state: ShardState) -> list[Unit]:
    """Returns the units that hold full parameters for now, in place of shards."""
    return [unit for unit in state.units if any(_shows_full(unit))]


def _shows_full(unit: Unit) -> Iterator[bool]:
    for param in unit.params:
        if param.is_whole:
            continue
        yield param.is_full
        for owner, name in param.owners:
            current = owner._parameters.get(name)  # it may be a view of the full one
            yield current is not None and current is not param.object


def _buckets(state: ShardState) -> tuple[tuple[str, int], ...]:
    if not division_of(state).gathers:
        return ()
    gathered = [
        (unit.name, state.engine.layout(unit.index).nbytes)
        for unit in state.units
        if _is_gathered(unit)
    ]
    return tuple(sorted(gathered, key=lambda bucket: -bucket[1])[:NUM_BUCKETS])


def _is_gathered(unit: Unit) -> bool:
    try:
        return any(param.full.untyped_storage().data_ptr() != 0 for param in unit.params)
    except RuntimeError:  # the storage of a sharded unit has no memory
        return False


def _savings(state: ShardState) -> Iterator[tuple[str, int]]:
    now = Candidate(planner_of(state), division_of(state))
    for change in fitting(candidates(now), lambda nbytes: nbytes < now.nbytes):
        yield change.text, now.nbytes - change.nbytes
