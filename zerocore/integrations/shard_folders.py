"""Checkpoints of a sharded model within the folders that a trainer makes and deletes."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from zerocore.checkpoint.checkpoints import Checkpoints


class ShardFolders:
    """Saves one model and its optimizer under ``name`` in any folder, and loads them.

    The trainer's own files hold the rest, random streams too.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, name: str = "zerocore"):
        # One object for all folders: each has a process group of its own.
        self._checkpoints = Checkpoints(name, model, optimizer, keep=1, background=False, rng=False)
        self._name = name

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves; of a folder that is saved to once more the newest is kept. All ranks call."""
        self._checkpoints.folder = Path(folder, self._name)
        steps = self._checkpoints.steps()
        self._checkpoints.save(steps[-1] + 1 if steps else 0)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Loads what ``save`` has saved, on any number of ranks; all must call."""
        self._checkpoints.folder = Path(folder, self._name)
        if self._checkpoints.load() is None:
            raise FileNotFoundError(f"no checkpoint of shards in {self._checkpoints.folder}")

    @staticmethod
    def exist(folder: str | os.PathLike[str], name: str = "zerocore") -> bool:
        return Path(folder, name).exists()
