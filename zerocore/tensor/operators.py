"""The arguments that an operator's schema says it changes; elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from zerocore.tensor.functions import Args, Function, Kwargs, is_in_place, name_of

# Full names of operators, and functions that have none.
_elementwise: set[Any] = {
    *(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")),
    "bitsandbytes::optimizer_update_32bit",
}


def register_elementwise(operator: Callable[..., Any] | str) -> None:
    """Declares that an operator computes each element from the elements at its place alone.

    On shards it then runs on the local elements of all its tensors, and may change them. A tensor
    of one element is given as it is. One that takes norms, rows or blocks is not elementwise.

    Args:
        operator: ``torch.ops.mylib.update``, what ``torch.library.custom_op`` returns, a full name
            such as ``"mylib::update"``, or a Python function that asks ``has_torch_function``.

    Raises:
        TypeError: ``operator`` is none of these.
    """
    if isinstance(operator, str) and "::" in operator:
        _elementwise.add(operator)
    elif callable(operator):
        _elementwise.add(_key(operator))
    else:
        raise TypeError(
            f"register_elementwise: expected an operator such as torch.ops.mylib.update, or its "
            f"name 'mylib::update', got {operator!r}"
        )


def is_elementwise(func: Function | str) -> bool:
    """Whether ``func``, or the operator of this name, was declared to work element by element."""
    return _key(func) in _elementwise


@cache
def _key(func: Any) -> Any:
    """The operator's full name; the function itself if it has none."""
    func = getattr(func, "_opoverload", func)  # of torch.library.custom_op
    if isinstance(func, OpOverload):
        return func._schema.name
    if isinstance(func, OpOverloadPacket):
        return func._qualified_op_name
    is_builtin = getattr(torch, getattr(func, "__name__", ""), None) is func
    return f"aten::{func.__name__}" if is_builtin else func


def changed_by(func: Function, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that ``func`` changes: by its name, ``out=``, and by its schema."""
    changed = [args[0]] if args and is_in_place(name_of(func)) else []
    if "out" in kwargs:
        changed.append(kwargs["out"])
    for position, name in _changed_arguments(func):
        if 0 <= position < len(args):
            changed.append(args[position])
        elif name in kwargs:
            changed.append(kwargs[name])
    return changed


@cache
def returns_nothing(func: Function) -> bool:
    """Whether ``func`` is an operator that only changes its arguments."""
    schemas = _schemas(func)
    return bool(schemas) and not any(schema.returns for schema in schemas)


@cache
def _changed_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name of all arguments that an overload changes; -1 for those without one."""
    return list(
        dict.fromkeys(
            (-1 if arg.kwarg_only else position, arg.name)
            for schema in _schemas(func)
            for position, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        )
    )


def _schemas(func: Any) -> list[Any]:
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        name = func._qualified_op_name
    elif isinstance(func, FunctionType):
        return []
    else:
        name = f"aten::{getattr(func, '__name__', '')}"
    found = torch._C._jit_get_schemas_for_operator(name)
    # TorchScript's own overloads, those of lists, have no kernel.
    names = [f"{schema.name}.{schema.overload_name}".removesuffix(".") for schema in found]
    has_kernel = map(torch._C._dispatch_has_kernel, names)
    return [schema for schema, has in zip(found, has_kernel, strict=True) if has]
