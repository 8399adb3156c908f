"""The "bf16" and "fp16" of trainers, as mixed precision of a sharded model."""

from __future__ import annotations

import torch

from zerocore.model.precision import MixedPrecision
from zerocore.model.state import ShardState

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
