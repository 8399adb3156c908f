"""Plain values of a checkpoint, beside its tensors: checks that loads can read them."""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zerocore.tensor.placed import Placed

_VALUE = "zerocore.value"  # first item of a tuple in a file
_PLAIN: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
)
MAPPINGS = (dict, OrderedDict)
LISTS = (list, tuple)


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def readable(value: Any, where: str) -> Any:
    """Returns ``value`` as a load will return it, with Python's numbers for numpy's. Raises
    TypeError for a value that a load cannot read without running code."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind in MAPPINGS:
        items = [(readable(k, f"a key of {where}"), k, v) for k, v in value.items()]
        return kind((new, readable(v, f"{where}[{k!r}]")) for new, k, v in items)
    if kind in LISTS:
        return kind(readable(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", 0) == ():
        return readable(value.item(), where)
    if not isinstance(value, Tensor):
        return _tried(value, where)
    if isinstance(value, Placed) or (value.layout is torch.strided and kind is Tensor):
        return value
    return _tried(value, where)


def _tried(value: Any, where: str) -> Any:
    from zerocore.checkpoint.safe_pickles import load_plain  # late: most saves read nothing

    try:
        data = saved_bytes(value)
        load_plain(io.BytesIO(data), len(data))
    except Exception as error:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a load "
            "cannot read without running code; expected tensors, numbers, text, None, and "
            "lists, tuples and dicts of them. Let state_dict() return these"
        ) from error
    return value


def tensors_in(value: Any) -> Iterator[Any]:
    """Yields the tensors in a value and its containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from tensors_in(item)


def text_key(key: Any, where: str) -> str:
    """Returns a key of text; raises TypeError for others, which a file would turn into text."""
    if isinstance(key, str):
        return key
    raise TypeError(f"{where} has the key {key!r}: a checkpoint keeps keys of text only")


def as_leaf(value: Any, where: str) -> Any:
    """Returns a value that torch saves as one entry: containers and tensors in a marked tuple."""
    value = readable(value, where)
    for tensor in tensors_in(value):
        if isinstance(tensor, Placed):
            raise TypeError(
                f"{where} holds the shard of '{tensor.fqn}' outside the state of a parameter: "
                "keep it in optimizer.state[parameter]"
            )
    is_nested = isinstance(value, Mapping | list | Tensor)
    return (_VALUE, value) if is_nested else value


def leaf_value(leaf: Any) -> Any:
    """Returns the value from which :func:`as_leaf` made ``leaf``."""
    return leaf[1] if is_marked(leaf, _VALUE) else leaf


def is_marked(value: Any, mark: str) -> bool:
    """Whether a value of a file is a pair that begins with the mark."""
    return type(value) is tuple and len(value) == 2 and value[0] == mark
