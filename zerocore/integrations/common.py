"""Helpers of trainers: their "bf16" as mixed precision, shards in the folders that they make."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from zerocore.checkpoint.checkpoints import Checkpoints
from zerocore.model.state import ShardState
from zerocore.options.precision import MixedPrecision

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(name: str) -> MixedPrecision | None:
    """The mixed precision of a trainer's ``"no"``, ``"bf16"`` or ``"fp16"``.

    Layers compute in the narrow dtype, gradients are reduced in float32, and outputs are float32,
    as autocast in a trainer returns them.

    Raises:
        ValueError: another name, such as ``"fp8"``.
    """
    dtype = _dtype_of(name)
    if dtype is None:
        return None
    return MixedPrecision(dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)


def check_precision(state: ShardState, name: str, trainer: str) -> None:
    """Raises ValueError if ``trainer`` is told to compute in what the sharded model does not.

    Autocast inside of a sharded model would cast each parameter in each forward, after it was
    gathered in its wide dtype: the precision belongs to ``shard``.
    """
    wanted = _dtype_of(name)
    mixed = state.config.mixed_precision
    if wanted is None or (mixed is not None and mixed.param_dtype == wanted):
        return
    raise ValueError(
        f"{trainer} is told to use {name}, and the model was sharded with mixed_precision={mixed}: "
        f"{name} would have no effect. Shard it with mixed_precision=zerocore.MixedPrecision("
        f"{wanted}, reduce_dtype=torch.float32)"
    )


def _dtype_of(name: str) -> torch.dtype | None:
    if name not in _DTYPES:
        raise ValueError(f"mixed precision must be one of {tuple(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


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
    def exist(folder: str | os.PathLike[str]) -> bool:
        return Path(folder, "zerocore").exists()
