"""Saves containers with tensors in an optimizer's state: as outlines in a file, and back."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerocore.checkpoint.plain_values import LISTS, MAPPINGS, is_marked, leaf_value, readable

CONTAINER = "zerocore.container"  # first item of an outline's tuple in a file


def outline(value: Any, key: str, where: str, flat: dict[str, Any]) -> Any:
    """Moves the tensors of a container to keys of their own in ``flat``, which begin with ``key``.
    Returns the outline that replaces the container."""
    kind = type(value)
    if isinstance(value, Tensor):
        while key in flat:
            key += "_"
        flat[key] = value
        return ("tensor", key)
    if kind in MAPPINGS:
        items = [(k, outline(v, f"{key}.{k}", where, flat)) for k, v in value.items()]
        return (kind.__name__, items)
    if kind in (*LISTS, deque):
        outlines = [outline(v, f"{key}.{i}", where, flat) for i, v in enumerate(value)]
        return (kind.__name__, outlines, getattr(value, "maxlen", None))
    return ("value", readable(value, where))


def put_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state whose containers :func:`outline` took apart."""
    used: set[str] = set()
    outlines = {k: v[1] for k, v in state.items() if is_marked(v, CONTAINER)}
    containers = {key: _container(outline, state, used) for key, outline in outlines.items()}
    return {
        key: containers[key] if key in containers else leaf_value(value)
        for key, value in state.items()
        if key not in used
    }


def _container(outline: Any, state: Mapping[str, Any], used: set[str]) -> Any:
    kind, value, *rest = outline
    if kind == "value":
        return value
    if kind == "tensor":
        used.add(value)
        return state[value]
    if kind in ("dict", "OrderedDict"):
        items = [(k, _container(v, state, used)) for k, v in value]
        return dict(items) if kind == "dict" else OrderedDict(items)
    parts = [_container(item, state, used) for item in value]
    return tuple(parts) if kind == "tuple" else deque(parts, rest[0]) if kind == "deque" else parts
