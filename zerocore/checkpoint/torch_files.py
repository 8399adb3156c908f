"""Torch's own reader of checkpoints, for one rank by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from zerocore.checkpoint.safe_reader import SafePlanner, SafeReader


def load_tensors(state: dict[str, Any], folder: Path) -> None:
    """Reads into the tensors of ``state``, what this rank needs of them; asks no other rank.

    Raises:
        ValueError: a file cannot be read; ``state`` may hold some of it.
    """
    try:
        with quiet():
            load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    except CheckpointException as error:  # no Exception: other ranks would wait for this one
        ((cause, _),) = error.failures.values()
        raise ValueError(f"{folder} cannot be read: {cause}") from cause


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns where one process saves for itself, as it is told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
