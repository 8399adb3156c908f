"""Helpers for trainers: mixed precision from their "bf16", and shards in their folders."""

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
    """Returns the mixed precision for a trainer's ``"no"``, ``"bf16"`` or ``"fp16"``.

    Layers compute in the narrow dtype, and gradients are reduced in float32. Outputs are float32,
    as under a trainer's autocast.

    Raises:
        ValueError: the name is another one, such as ``"fp8"``.
    """
    dtype = _dtype_of(name)
    if dtype is None:
        return None
    return MixedPrecision(dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)


def check_precision(state: ShardState, name: str, trainer: str) -> None:
    """Raises ValueError if the precision of ``trainer`` is not the sharded model's.

    Autocast in a sharded model would gather parameters in their wide dtype and cast them in each
    forward. So ``shard`` must know the precision.
    """
    wanted = _dtype_of(name)
    mixed = state.config.mixed_precision
    if wanted is None or (mixed is not None and mixed.param_dtype == wanted):
        return
    raise ValueError(
        f"{trainer} is set to {name}, which would have no effect: the model is sharded with "
        f"mixed_precision={mixed}. Shard it with mixed_precision=zerocore.MixedPrecision("
        f"{wanted}, reduce_dtype=torch.float32)"
    )


def _dtype_of(name: str) -> torch.dtype | None:
    if name not in _DTYPES:
        raise ValueError(f"mixed precision must be one of {tuple(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


class ShardFolders:
    """Folders in which one model and its optimizer are saved under ``name``, and loaded again.

    The trainer saves everything else in its own files, also the states of random generators.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, name: str = "zerocore"):
        # One object serves all folders, because each Checkpoints has its own process group.
        self._checkpoints = Checkpoints(name, model, optimizer, keep=1, background=False, rng=False)
        self._name = name

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves both; a second save to a folder replaces the first. All ranks must call."""
        self._checkpoints.folder = Path(folder, self._name)
        steps = self._checkpoints.steps()
        self._checkpoints.save(steps[-1] + 1 if steps else 0)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Loads a save of any number of ranks; all ranks must call."""
        self._checkpoints.folder = Path(folder, self._name)
        if self._checkpoints.load() is None:
            raise FileNotFoundError(f"no checkpoint of shards in {self._checkpoints.folder}")

    @staticmethod
    def exist(folder: str | os.PathLike[str]) -> bool:
        return Path(folder, "zerocore").exists()
