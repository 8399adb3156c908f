"""Torch's own writer and reader of checkpoints, in a group of the caller's or without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zerocore.checkpoint.safe_reader import SafePlanner, SafeReader


def save_tensors(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes every rank's parts; raises on all ranks what one of them raised. Collective."""
    # With one file a rank it writes without threads, whose errors would be lost.
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with quiet():
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)


def load_tensors(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Reads into the tensors of ``state``. Collective."""
    with quiet():
        load(
            state,
            storage_reader=SafeReader(folder),
            planner=SafePlanner(),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns where one process saves for itself, as it is told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
