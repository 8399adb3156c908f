"""Torch's own reader of checkpoints, for one rank by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from zerocore.checkpoint.contents import Contents
from zerocore.checkpoint.safe_reader import SafePlanner, SafeReader


def load_tensors(state: dict[str, Any], contents: Contents) -> None:
    """Reads into the tensors of ``state``, what this rank needs of them; asks no other rank.

    Raises:
        OSError, ValueError: a file cannot be read; names it, and the key.
    """
    with quiet():
        try:
            load(state, storage_reader=SafeReader(contents), planner=SafePlanner(), no_dist=True)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                raise cause from None


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns where one process saves for itself, as it is told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
