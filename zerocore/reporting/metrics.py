"""Returns the last step's figures for loggers, by flat names."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerocore.hooks.optimizer_steps import optimizers_of
from zerocore.model.state import state_of
from zerocore.reporting.memory_usage import usage_of
from zerocore.reporting.report import recent_report

PREFIX = "zerocore/"
"""Begins all names, so that loggers show them together."""

_STEP = (
    *("step_ms", "outside_ms", "tokens_per_s", "mfu", "gathered_nbytes", "reduced_nbytes"),
    *("exchanged_nbytes", "num_collectives", "pool_nbytes", "num_retries"),
)
_TRACED = ("all_gather_ms", "reduce_ms", "exchange_ms", "exposed_ms", "overlap")
_STATE = ("parameters", "main_weights", "gradients", "optimizer", "host", "disk")
_PEAKS = ("pool_reserved", "allocated_peak", "reserved_peak", "resident_peak")


def metrics(
    model: nn.Module,
    *,
    tokens: int | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """Returns figures of the last step on this rank, for any logger, without communication.

    Names are the attributes of :class:`StepFigures`, of :class:`CommunicationTimes` for the last
    traced step and, after ``memory/``, of :class:`MemoryBytes` and :class:`MemoryFigures`; all
    begin with ``zerocore/``. Units are milliseconds, bytes, and shares from 0 to 1. Unknown figures
    are left out, so the result is empty before the first step is complete.

    Args:
        model: a sharded model.
        tokens, flops_per_token, peak_flops: as for :func:`zerocore.report`.

    Raises:
        ValueError, TypeError: as :func:`zerocore.report`.
    """
    recent = recent_report(model, tokens, flops_per_token, peak_flops)
    if not recent.steps:
        return {}
    last, state = recent.steps[-1], state_of(model)
    traced = next((s.communication for s in recent.steps[::-1] if s.communication), None)
    usage = usage_of(state, optimizers_of(state))
    values: dict[str, Any] = {"step": last.number}
    values |= {name: getattr(last, name) for name in _STEP}
    values |= {name: getattr(traced, name, None) for name in _TRACED}
    values |= {f"memory/{name}": getattr(usage, name) for name in _STATE}
    values |= {f"memory/{name}": getattr(recent.memory, name) for name in _PEAKS}
    return {f"{PREFIX}{name}": value for name, value in values.items() if value is not None}
