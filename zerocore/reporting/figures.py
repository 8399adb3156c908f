"""Figures of the last step for loggers: flat names, and lines of JSON in a run's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from zerocore.hooks.optimizer_steps import optimizers_of
from zerocore.model.state import state_of
from zerocore.reporting.memory_usage import usage_of
from zerocore.reporting.report import Report, recent_report

PREFIX = "zerocore/"
"""Of all names, so that loggers show them together."""

_STEP = (
    *("step_ms", "outside_ms", "tokens_per_s", "mfu", "gathered_nbytes", "reduced_nbytes"),
    *("exchanged_nbytes", "num_collectives", "pool_nbytes", "num_retries"),
)
_TRACED = ("all_gather_ms", "reduce_ms", "exchange_ms", "exposed_ms", "overlap")
_STATE = ("parameters", "main_weights", "gradients", "optimizer", "host", "disk")
_PEAKS = ("pool_reserved", "allocated_peak", "reserved_peak", "resident_peak")


def figures(
    model: nn.Module,
    *,
    tokens: int | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """Figures of the last step on this rank, for any logger; no communication.

    The names are those of :class:`StepFigures`, :class:`Communication` of the last traced step and,
    under ``memory/``, of :class:`MemoryBytes` and :class:`MemoryFigures`, all behind ``zerocore/``.
    Milliseconds, bytes, and shares from 0 to 1. An unknown figure is left out, so there are none
    before the first step is complete.

    Args:
        model: a sharded model.
        tokens, flops_per_token, peak_flops: as for :func:`zerocore.report`.

    Raises:
        ValueError, TypeError: as :func:`zerocore.report`.
    """
    return _flat(model, recent_report(model, tokens, flops_per_token, peak_flops))


def _flat(model: nn.Module, found: Report) -> dict[str, float]:
    if not found.steps:
        return {}
    last, state = found.steps[-1], state_of(model)
    traced = next((s.communication for s in found.steps[::-1] if s.communication), None)
    usage = usage_of(state, optimizers_of(state))
    values: dict[str, Any] = {"step": last.number}
    values |= {name: getattr(last, name) for name in _STEP}
    values |= {name: getattr(traced, name, None) for name in _TRACED}
    values |= {f"memory/{name}": getattr(usage, name) for name in _STATE}
    values |= {f"memory/{name}": getattr(found.memory, name) for name in _PEAKS}
    return {f"{PREFIX}{name}": value for name, value in values.items() if value is not None}


class FigureLog:
    """Appends the figures of steps to ``figures-RANK.jsonl`` in a folder, a line for each write.

    All ranks write, each a file of its own; ``python -m zerocore top FOLDER`` follows them.

    Args:
        model: a sharded model.
        folder: of the run; it is made.
        tokens, flops_per_token, peak_flops: as for :func:`zerocore.report`.

    Raises:
        ValueError: the model is not sharded.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        tokens: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        state = state_of(model)
        self._model, self._rates = model, (tokens, flops_per_token, peak_flops)
        self._place = {"rank": state.rank, "world_size": state.world_size}
        self._last = -1
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = open(  # noqa: SIM115  # until close()
            path / f"figures-{state.rank}.jsonl", "a", encoding="utf-8", buffering=1
        )

    def write(self) -> dict[str, float]:
        """Appends a line if a step was completed since the last one.

        Returns:
            The figures, as :func:`figures`; without a new step they are not written again.
        """
        found = recent_report(self._model, *self._rates)
        values = _flat(self._model, found)
        if values and found.steps[-1].number != self._last:
            self._last = found.steps[-1].number
            line = {"time": time.time(), **self._place, "model": found.title.split(",")[0]}
            units = {name: asdict(unit) for name, unit in found.units.items()}
            self._file.write(json.dumps({**line, **values, "units": units}) + "\n")
        return values

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> FigureLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
