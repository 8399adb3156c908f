"""Rejects parameters that gather themselves where only the engine's gathers are supported."""

from __future__ import annotations

from collections.abc import Sequence

from zerocore.model.state import ShardState
from zerocore.model.units import Unit
from zerocore.tensor.rows import local_part
from zerocore.tensor.wrapped import PRE


def check_engine_gathers(units: Sequence[Unit], what: str) -> None:
    """Rejects parameters of zerocore.fsdp models that gather themselves."""
    for param in (param for unit in units for param in unit.params):
        if hasattr(param.shard, "_spec") and hasattr(local_part(param.shard), PRE):
            raise NotImplementedError(
                f"parameter '{param.fqn}' gathers itself, which {what} does not support for models "
                "of zerocore.fsdp; use the module's unshard(), or torch.distributed.checkpoint"
            )


def check_plain(state: ShardState, what: str) -> None:
    """Rejects a model with a parameter that consists of several tensors."""
    for name in state.several():
        raise NotImplementedError(
            f"parameter '{name}' consists of several tensors, which {what} cannot write; save the "
            "trained parameters (zerocore.full_state_dict, or an adapter's parameters)"
        )
