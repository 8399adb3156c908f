"""Folders of checkpoints that survive a crash: written aside, then renamed when all is on disk."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.commit import fsync_file, fsync_folder, fsync_tree, on_all_ranks, same_id
from zerocore.checkpoint.snapshot import snapshot
from zerocore.common.agreement import is_simulated
from zerocore.model.state import ShardState, state_of
from zerocore.tensor.place import Placed

_NAME = re.compile(r"step-(\d{8,})")


class PendingSave:
    """A save that a thread carries out.

    Attributes:
        step: what is saved.
        stall_seconds: how long ``save`` kept the training waiting.
    """

    def __init__(self, step: int, write: Callable[[], None], background: bool) -> None:
        self.step = step
        self.stall_seconds = 0.0
        self._error: BaseException | None = None
        self._write = write
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}")
        if background:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
        finally:
            del self._write  # and with it the copy of the state

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is on disk under its name; raises what went wrong."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class Checkpoints:
    """Checkpoints of a sharded model, its optimizer and what else training needs, in one folder.

    Each is a folder ``step-00000100`` that ``torch.distributed.checkpoint`` reads, too: any number
    of ranks, any stage. It has its name when all of it is on disk; what a crash leaves besides is
    not looked at, and deleted by the next save. All ranks make it, save and load together, and see
    one file system.

    Args:
        folder: made if need be; one training writes to it.
        model: sharded.
        optimizer: of its parameters; None saves none.
        keep: how many checkpoints stay; older ones are deleted after a save. None keeps all.
        background: ``save`` copies the state and returns; a thread writes it. Takes the memory of
            the copy, on the CPU.
        verify: before loading, compare the checksums of all files.
        rng: save and load the random streams of each rank. With another number of ranks each rank
            begins a new stream, which a warning says.
        stateful: objects with ``state_dict`` and ``load_state_dict`` (schedulers, scalers, data
            loaders), saved by every rank for itself, of plain values and tensors. With another
            number of ranks all load the first one's.

    Raises:
        ValueError: the model is not sharded, or ``keep`` is below 1.
        TypeError: one of ``stateful`` has no ``state_dict`` and ``load_state_dict``.
        RuntimeError: this process was forked from the one that sharded the model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        keep: int | None = 3,
        background: bool = True,
        verify: bool = True,
        rng: bool = True,
        **stateful: Any,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be 1 or more, or None for all, got {keep}")
        for name, value in stateful.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise TypeError(
                    f"{name}: expected an object with state_dict and load_state_dict, got "
                    f"{type(value)}"
                )
        self.folder = Path(folder)
        self._model, self._optimizer, self._stateful = model, optimizer, stateful
        self._keep, self._background, self._verify, self._rng = keep, background, verify, rng
        self._state = state_of(model)
        self._group = _own_group(self._state)
        self._pending: PendingSave | None = None

    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, in order."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted(
            int(match[1])
            for match in found
            if match is not None and (self.folder / match[0] / ".metadata").exists()
        )

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def save(self, step: int) -> PendingSave:
        """Saves the state as that of ``step``; waits for the save before, if that is under way.

        Raises:
            FileExistsError: there is a checkpoint of this step.
            Exception: what went wrong in the save before.
        """
        began = time.perf_counter()
        self.wait()
        final = self._path(step)
        temporary = final.with_name(f"{final.name}.tmp-{same_id(self._state.ranks.groups)}")

        def prepare() -> None:
            if final.exists():
                raise FileExistsError(f"{final} exists; checkpoints are never overwritten")
            if self._state.rank == 0:
                self._delete_remains()
                temporary.mkdir(parents=True)

        on_all_ranks(self._state, prepare)
        state, own = self._collect(step)

        def write() -> None:
            self._write(temporary, final, state, own)

        self._pending = PendingSave(step, write, self._background)
        self._pending.stall_seconds = time.perf_counter() - began
        return self._pending

    def load(self, step: int | None = None) -> int | None:
        """Loads the newest checkpoint, or that of ``step``.

        Returns its step, or None if there are no checkpoints. Everything is compared before a byte
        reaches the model: names, shapes, dtypes, sizes and checksums of files.

        Raises:
            FileNotFoundError: there is no checkpoint of this step.
            ValueError: it does not fit or is damaged; names file and key, on every rank.
        """
        self.wait()
        found: list[Any] = [self.steps()]
        for group in reversed(self._state.ranks.groups):
            dist.broadcast_object_list(found, group=group, group_src=0)
        steps: list[int] = found[0]
        if step is None and not steps:
            return None
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise FileNotFoundError(f"no checkpoint of step {chosen} in {self.folder}: {steps}")
        self._load(self._path(chosen))
        return chosen

    def _path(self, step: int) -> Path:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number, 0 or more, got {step!r}")
        return self.folder / f"step-{step:08}"

    def _collect(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        from zerocore.checkpoint.training_state import random_state, training_state

        state = training_state(self._model, self._optimizer)
        buffers = {key: v for key, v in state["model"].items() if not isinstance(v, Placed)}
        if self._state.rank > 0:  # those of the first rank, for all numbers of ranks
            state["model"] = {k: v for k, v in state["model"].items() if k not in buffers}
        own = {
            "step": step,
            "buffers": {key: v for key, v in buffers.items() if isinstance(v, Tensor)},
            "world_size": self._state.world_size,
            "stateful": {name: value.state_dict() for name, value in self._stateful.items()},
            "rng": random_state() if self._rng else None,
        }
        return (snapshot(state), snapshot(own)) if self._background else (state, own)

    def _write(
        self, temporary: Path, final: Path, state: dict[str, Any], own: dict[str, Any]
    ) -> None:
        from zerocore.checkpoint.torch_files import save_tensors
        from zerocore.checkpoint.verify import check_files, read_metadata

        def write_own() -> None:
            path = temporary / f"rank-{self._state.rank}.pt"
            torch.save(own, path)
            fsync_file(path)

        self._together(write_own)
        save_tensors(state, temporary, self._group)

        def commit() -> None:
            if self._state.rank == 0:
                check_files(temporary, read_metadata(temporary))
                fsync_tree(temporary)
                os.rename(temporary, final)
                fsync_folder(self.folder)
                self._delete_old()

        self._together(commit)

    def _together(self, action: Callable[[], None]) -> None:
        """As ``on_all_ranks``, in the group of the writing threads."""
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        messages = [None if error is None else f"{type(error).__name__}: {error}"]
        if self._group is not None:
            messages = [None] * self._group.size()
            own = None if error is None else f"{type(error).__name__}: {error}"
            dist.all_gather_object(messages, own, group=self._group)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")

    def _delete_old(self) -> None:
        for step in self.steps()[: -self._keep] if self._keep is not None else []:
            path = self._path(step)
            doomed = path.with_name(f"{path.name}.deleted")
            os.rename(path, doomed)  # half of it must not look like a checkpoint
            shutil.rmtree(doomed)

    def _delete_remains(self) -> None:
        """Deletes the folders of saves and deletions that did not come to their end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("step-*.tmp-*", "step-*.deleted"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)

    def _load(self, folder: Path) -> None:
        from zerocore.checkpoint.loading import (
            load_training_state,
            read_own,
            restore_buffers,
            restore_own,
        )

        own: dict[str, Any] = {}

        def check() -> None:
            own.update(read_own(folder, self._state.rank))
            missing = sorted(set(self._stateful) - set(own["stateful"]))
            if missing:
                raise ValueError(f"{folder} has no state of {missing}")

        on_all_ranks(self._state, check)
        load_training_state(
            folder, self._state, self._model, self._optimizer, self._group, self._verify
        )
        for name, value in self._stateful.items():
            value.load_state_dict(own["stateful"][name])
        if own["world_size"] == self._state.world_size:  # each rank its own, as it was
            restore_buffers(self._model, own["buffers"])
        if self._rng:
            restore_own(own, self._state.rank, self._state.world_size)


def _own_group(state: ShardState) -> dist.ProcessGroup | None:
    """A gloo group of the model's ranks: a thread's collectives must not meet the training's."""
    groups = [group for group in state.ranks.groups if not is_simulated(group)]
    if state.world_size > 1 and not groups:
        raise ValueError("an emulated model has one rank's shards only: there is nothing to save")
    ranks: list[int] = [dist.get_rank()] if groups else []
    for group in groups:
        gathered: list[list[int]] = [[] for _ in range(group.size())]
        dist.all_gather_object(gathered, ranks, group=group)
        ranks = sorted(rank for part in gathered for rank in part)
    if not groups:
        return None
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
