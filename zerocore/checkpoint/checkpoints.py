"""Checkpoint folders that survive a crash: written under another name, renamed when complete."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint import training_state
from zerocore.checkpoint.checksums import METADATA, DamagedError
from zerocore.checkpoint.commit.folder import path_of, steps_in
from zerocore.checkpoint.commit.saving import Save
from zerocore.checkpoint.commit.writer import finish_writes, writer_of
from zerocore.checkpoint.dcp.saved_state import KeptPlan, SavedState, saved_state
from zerocore.checkpoint.dcp.snapshot import StreamedCopy
from zerocore.checkpoint.plain_values import readable, saved_bytes
from zerocore.common.agreement import from_rank, on_all_ranks
from zerocore.common.alarm import operation
from zerocore.common.parsing import parse_nbytes
from zerocore.model.extensions import check_plain
from zerocore.model.state import ShardState, ready_state_of
from zerocore.tensor.pickling import pickled_as_parts
from zerocore.tensor.placed import Placed

_log = logging.getLogger("zerocore")
_MIN_BUDGET = 16 << 20  # two parts: one is copied while the other is written

MEMORY_BUDGET = 2 << 30  # default bytes for the copies of a background save


class PendingSave:
    """A save that runs in threads.

    Attributes:
        step: the step whose state is saved.
        stall_seconds: how long training has waited for this save so far: in ``save``, and in an
            optimizer step that came before all tensors were copied.
        held_nbytes: the most bytes that its copies have taken at a time on this rank.
    """

    def __init__(self, step: int, written: Future[None], copy: StreamedCopy | None = None) -> None:
        self.step = step
        self.stall_seconds = 0.0
        self._written, self._copy = written, copy

    @property
    def held_nbytes(self) -> int:
        return 0 if self._copy is None else self._copy.peak_nbytes

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._written.done()

    def wait_read(self) -> None:
        """Waits until weights and optimizer states may change; they reach the disk later."""
        if self._copy is not None:
            began = time.perf_counter()
            self._copy.wait_read()
            self.stall_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Waits until the checkpoint is on disk under its name; raises the save's error, if any."""
        self._written.result()


class Checkpoints:
    """Checkpoints of a sharded model, its optimizer and other training state, in one folder.

    Each is a folder ``step-00000100`` that ``torch.distributed.checkpoint`` reads, too. It loads on
    any number of ranks and at any stage. It gets its name when all of it is on disk. Loads ignore
    the remains of a crash, and the next save deletes them. All ranks construct it, save and load
    together, and share a file system.

    Args:
        folder: made if need be. Only one training may write to it: ``save`` raises RuntimeError if
            another process of the first rank's host writes there.
        model: sharded.
        optimizer: one that updates the model's parameters, or a list of several for different
            parameters; None saves none.
        keep: how many checkpoints to keep. A save deletes older ones, and warns if it cannot. None
            keeps all.
        background: ``save`` returns at once; threads copy the state and write it. The next step of
            the optimizer waits until all is copied.
        memory_budget: bytes of CPU memory that the copies may take at a time. If the state is
            larger, the next step also waits until the excess is written. ``load`` keeps weights
            beside the model until all files are verified, and reads weights that exceed the budget
            twice. 2 GiB by default, at least 16 MiB.
        verify: before loading, compare the checksums of all files.
        rng: save and load the random streams of each rank. On another number of ranks, each rank
            begins a new stream, with a warning.
        stateful: objects by name, with ``state_dict`` and ``load_state_dict`` (schedulers, scalers,
            data loaders) of plain values and tensors. Each rank saves its own. On another number of
            ranks, all ranks load the first rank's.

    Raises:
        ValueError: the model is not sharded, ``keep`` is below 1, the budget is too small, or two
            optimizers hold the same parameter.
        TypeError: one of ``stateful`` lacks ``state_dict`` or ``load_state_dict``, or
            ``optimizer`` is not an optimizer.
        RuntimeError: this process was forked from the one that sharded the model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        keep: int | None = 3,
        background: bool = True,
        memory_budget: str | int = MEMORY_BUDGET,
        verify: bool = True,
        rng: bool = True,
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be 1 or more, or None for all, got {keep}")
        self._budget = parse_nbytes(memory_budget, "memory_budget")
        if self._budget < _MIN_BUDGET:
            raise ValueError(f"memory_budget must be 16 MiB or more, got {memory_budget!r}")
        self._stateful = dict(stateful or {})
        training_state.check_stateful(self._stateful)
        self.folder, self._model = Path(folder), model
        self._optimizers = training_state.optimizers_of(optimizer)
        self._keep, self._background, self._verify, self._rng = keep, background, verify, rng
        self._known: dict[Path, bool] = {}  # whether a checkpoint is good
        self._pending: PendingSave | None = None
        self._set_state(ready_state_of(model))

    def _set_state(self, state: ShardState) -> None:
        self._state_ref = ref(state)  # weak: a zerocore.fsdp model may drop its state
        self._writer, self._kept = writer_of(state), KeptPlan(state)

    def _ready_state(self) -> ShardState:
        """Waits for the last save, and returns the model's state, which may be a new one."""
        self.wait()
        if (state := ready_state_of(self._model)) is not self._state_ref():
            self._set_state(state)
        return state

    def steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, in order."""
        return steps_in(self.folder)

    def wait(self) -> None:
        """Waits until the last save is on disk; raises the save's error if the save failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            state = self._state_ref()
            if state is not None and pending.wait_read in state.readers:
                state.readers.remove(pending.wait_read)
            pending.wait()

    def save(self, step: int) -> PendingSave:
        """Saves the state under ``step``; first waits for a save that is still running.

        A background save does not wait for other ranks. ``wait`` and the next ``save`` raise the
        errors of other ranks, and an error if the ranks would save different tensors.

        Raises:
            FileExistsError: there is a good checkpoint of this step. If this object has neither
                saved nor loaded it, the first rank verifies it in the background.
            Exception: the error of the previous save.
        """
        began = time.perf_counter()
        state = self._ready_state()
        final = path_of(self.folder, step)
        try:
            if self._known.get(final) and final.exists():  # if unknown, the first rank verifies it
                raise FileExistsError(f"{final} exists and is never overwritten; delete it first")
            with changes_counted():
                saved, rank_values = self._collect(step, state)
            save = self._make_save(final, saved, rank_values)
        except Exception as error:  # the other ranks must not wait for this one
            wait([self._writer.writes.submit(self._fail, error)])
            raise
        self._pending = self._start(step, save, state)
        self._pending.stall_seconds += time.perf_counter() - began
        return self._pending

    def _make_save(self, final: Path, saved: SavedState, rank_values: bytes) -> Save:
        return Save(final, saved, rank_values, self._writer.groups, self._keep, self._known)

    def _fail(self, error: Exception) -> None:
        def fail() -> None:
            raise error

        on_all_ranks(self._writer.groups, fail)  # the other ranks' saves begin with the same call

    def _start(self, step: int, save: Save, state: ShardState) -> PendingSave:
        if not self._background:
            written = self._writer.writes.submit(save.write, None)
            wait([written])
            return PendingSave(step, written)
        watch = save.saved.watch_changes(state)
        copy = StreamedCopy(save.saved.parts(), self._budget, state.device, watch)
        # Started last: the threads would take the interpreter from this one.
        pending = PendingSave(step, self._writer.writes.submit(self._write, save, copy), copy)
        state.readers.append(pending.wait_read)
        return pending

    def _write(self, save: Save, copy: StreamedCopy) -> None:
        self._writer.copies.submit(copy.run)
        try:
            save.write(copy)
        finally:
            copy.close()  # else the next step would wait forever for a failed save

    @operation("Checkpoints.load")
    def load(self, step: int | None = None, *, fallback: bool = True) -> int | None:
        """Loads the newest checkpoint that can be read, or the one of ``step``.

        Waits for running saves, also those of other objects. Returns the step, or None if there are
        no checkpoints. Checks everything before a byte reaches the model: names, shapes, dtypes,
        sizes and checksums of files.

        Args:
            fallback: if the newest one is damaged for any rank, all ranks load the one before it,
                and a warning says what is damaged. Without it, raise DamagedError.

        Raises:
            FileNotFoundError: there is no checkpoint of this step, or ``folder`` is a checkpoint.
            DamagedError: a file cannot be read; a ValueError with file and key, on every rank.
            ValueError: the checkpoint does not fit the model; with file and key, on every rank.
        """
        state = self._ready_state()
        finish_writes()
        steps = from_rank(state.ranks.groups, self.steps(), state.device)
        if not steps and (self.folder / METADATA).exists():
            raise FileNotFoundError(
                f"{self.folder} is one checkpoint, expected the folder that holds it: "
                f"Checkpoints('{self.folder.parent}', ...).load()"
            )
        if step is not None and step not in steps:
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.folder}: {steps}")
        candidates = steps[::-1] if step is None else [step]
        while candidates:
            path = path_of(self.folder, chosen := candidates.pop(0))
            try:
                with no_collections():
                    self._load(path, state)
            except DamagedError as error:
                self._known[path] = False
                if not (candidates and fallback):
                    raise
                if state.rank == 0:
                    _log.warning("loading the checkpoint before %s: %s", path.name, error)
            else:
                self._known[path] = True
                return chosen
            gc.collect()  # the error's traceback holds the values that were read
        return None

    def _collect(self, step: int, state: ShardState) -> tuple[SavedState, bytes]:
        """Returns this rank's shards, and the bytes of the file with its other values."""
        check_plain(state, "Checkpoints")
        nested = training_state.training_state(self._model, self._optimizers)
        buffers = {k: v for k, v in nested["model"].items() if not isinstance(v, Placed)}
        rank_values = {
            "step": step,
            "buffers": {key: v for key, v in buffers.items() if isinstance(v, Tensor)},
            "world_size": state.world_size,
            "stateful": {
                name: readable(value.state_dict(), f"{name}.state_dict()")
                for name, value in self._stateful.items()
            },
            "rng": training_state.random_state() if self._rng else None,
        }
        with pickled_as_parts():
            own_bytes = saved_bytes(rank_values)
        return saved_state(self._kept, nested, copy=self._background), own_bytes

    def _load(self, folder: Path, state: ShardState) -> None:
        from zerocore.checkpoint.dcp.loading import TrainingLoad  # late: a first run never loads

        options = (self._model, self._optimizers, self._verify, self._budget)
        with changes_counted():
            TrainingLoad(folder, state, *options).run(self._stateful, self._rng)


@contextmanager
def changes_counted() -> Iterator[None]:
    """Gives new tensors version counters, also within ``torch.inference_mode``."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables automatic garbage collection: one takes a tenth of a second, with torch imported."""
    were_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_enabled:
            gc.enable()
