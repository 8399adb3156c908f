"""Measures a model with all of its blocks."""

from __future__ import annotations

from typing import Any

from zerocore.planning.activations import Activations, record


def measure(*args: Any, **kwargs: Any) -> Activations:
    """As ``zerocore.planning.repeats.measure``; equal blocks are run, too."""
    return record(*args, **kwargs)
