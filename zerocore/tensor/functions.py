"""Classifies torch functions by name: which may see a shard, and how.

All aliases of a function count as one. Torch's tags and schemas tell which are element-wise, and
which arguments they change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Always read or change the shard itself, never the full tensor.
ON_THE_SHARD = _names(
    """
    grad grad= requires_grad requires_grad= requires_grad_ is_leaf grad_fn detach detach_ data data=
    register_hook register_post_accumulate_grad_hook retains_grad retain_grad output_nr
    _version _backward_hooks _backward_hooks= _post_accumulate_grad_hooks
    _post_accumulate_grad_hooks= dtype device layout is_cuda is_cpu is_meta is_xpu is_mps
    is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mtia is_maia is_hpu is_ipu
    is_vulkan is_xla is_ort is_complex get_device is_floating_point is_signed is_inference
    is_neg is_conj is_pinned is_shared element_size itemsize names name _base _is_view
    has_names _has_compatible_shallow_copy_type __hash__ _python_dispatch volatile
    is_same_size is_distributed can_cast result_type promote_types record_stream
    __setstate__ _grad _grad= _cdata _is_zerotensor grad_dtype grad_dtype=
    """
)
# Read the shape; the answer is the full tensor's.
SHAPES = _names(
    """
    shape size dim ndimension ndim numel nelement stride storage_offset is_contiguous nbytes
    __len__ is_non_overlapping_and_dense
    """
)
# Read addresses and storages, which a full value does not have outside a call.
MEMORY = _names(
    """
    data_ptr const_data_ptr untyped_storage storage _typed_storage storage_type share_memory_
    __dlpack__ __cuda_array_interface__ swap_tensors to_dlpack _to_dlpack set_
    """
)
# Share memory with the tensor, in a class that would not know it as a shard.
CLASSES = _names("as_subclass _make_subclass")
# Make plain tensors of a given shape; they read only the shard's dtype and device.
FACTORIES = _names("new_zeros new_empty new_ones new_full new_tensor new_empty_strided")
# Read only a tensor's shape, dtype and device; autograd records none of them.
_DRAWN = "rand_like randn_like randint_like"
LIKES = _names(f"zeros_like ones_like empty_like full_like {_DRAWN}")
RANDOM = _names(f"normal uniform bernoulli exponential geometric cauchy log_normal random {_DRAWN}")
GLOBAL = _names(
    """
    sum mean prod max min amax amin any all count_nonzero var std nansum nanmean dot vdot
    inner matmul equal allclose norm linalg_norm linalg_vector_norm item tolist
    _amp_foreach_non_finite_check_and_unscale
    """
)
# Show the same elements, in the same order, in another shape.
VIEWS = _names("flatten ravel view reshape")
# Return the same values, perhaps in other memory.
CLONES = _names("clone contiguous cpu cuda to half bfloat16 float double detach data")
# Read only the dtype and device of another tensor among their arguments.
COPIES = _names("to type_as")
# Element-wise functions that torch does not tag: aliases, compositions, casts, copies and fills.
LISTED = VIEWS | COPIES | _names(
    """
    absolute alias arccos arccosh arcsin arcsinh arctan arctan2 arctanh bfloat16 bool byte char
    contiguous copy cpu cuda divide double empty_like expit fill fix float floor_divide full_like
    greater greater_equal half hardswish int isclose isreal leaky_relu less less_equal logsigmoid
    long multiply negative not_equal ones_like pin_memory short softsign subtract tanhshrink type
    where zero zeros_like
    """
)  # fmt: skip
_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "mod": "remainder",
    "floordiv": "floor_divide", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
_DUNDERS = {
    **{f"__{mark}{name}__": base for name, base in _OPERATORS.items() for mark in ("", "r", "i")},
    **{f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge", "abs")},
    "__neg__": "neg", "__pos__": "positive", "__invert__": "bitwise_not", "__matmul__": "matmul",
    "__deepcopy__": "clone", "__setitem__": "__setitem__", "__bool__": "item", "__float__": "item",
    "__int__": "item", "__index__": "item", "__complex__": "item",
}  # fmt: skip
_IN_PLACE = frozenset({f"__i{name}__" for name in _OPERATORS} | {"__setitem__"})


@cache
def name_of(func: Function) -> str:
    """Returns the function's name; ``name`` and ``name=`` for reads and writes of a property."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        owner: Any = getattr(func, "__self__", None)
        prop = getattr(owner, "__name__", None) or getattr(owner.fget, "__name__", "")
        return f"{prop}=" if name != "__get__" else str(prop)
    # Operators and functions of other libraries keep their full names.
    schema = getattr(func, "_schema", None)
    full = getattr(func, "_qualified_op_name", "aten") if schema is None else schema.name
    if full.partition("::")[0] not in ("aten", "prims"):
        return str(full)
    if isinstance(func, FunctionType) and func.__module__.partition(".")[0] != "torch":
        return f"{func.__module__}.{name}"
    return name.partition(".")[0]  # without the overload


@cache
def base_of(name: str) -> str:
    """Returns the function that ``name`` is an in-place, foreach or Python-operator variant of."""
    if name.startswith("__"):
        return _DUNDERS.get(name, name)
    base = name if name.startswith("_amp_") else name.removeprefix("_foreach_")
    return base.removeprefix("special_").removesuffix("_")


@cache
def is_in_place(name: str) -> bool:
    """Whether the function changes its first argument, by its name. Operators have a schema."""
    named = name.endswith("_") and not name.endswith("__") and "::" not in name
    return name in _IN_PLACE or named


def is_foreach(name: str) -> bool:
    return name.startswith(("_foreach_", "_amp_foreach_"))


@cache
def is_pointwise(base: str) -> bool:
    """Whether each element of a result is computed only from the elements at the same index.

    A tag belongs to an overload: ``max`` of two tensors has one, and so has ``rrelu``, which draws.
    So no overload may take a dimension or a generator, or return anything but one tensor.
    """
    schemas = _overloads(f"aten::{base}") or _overloads(f"aten::special_{base}")
    ops = [torch._C._get_operation_overload(s.name, s.overload_name) for s in schemas]
    is_tagged = any(op is not None and torch.Tag.pointwise in op[2] for op in ops)
    takes_more = any(kind in str(s) for s in schemas for kind in (" dim", "Generator"))
    gives_one = all([str(value.type) for value in s.returns] == ["Tensor"] for s in schemas)
    return base in LISTED or (is_tagged and gives_one and not takes_more)


# Full names of operators, and function objects without a name.
_elementwise: set[Any] = {
    *(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")),
    "bitsandbytes::optimizer_update_32bit",
}


def register_elementwise(operator: Callable[..., Any] | str) -> None:
    """Declares that an operator computes each element only from the elements at the same index.

    On shards it then runs on the local elements of all its tensors, and may change them. It gets a
    one-element tensor unchanged. An operator that takes norms, rows or blocks is not elementwise.

    Args:
        operator: ``torch.ops.mylib.update``, a result of ``torch.library.custom_op``, a full name
            such as ``"mylib::update"``, or a Python function that calls ``has_torch_function``.

    Raises:
        TypeError: ``operator`` is something else.
        ValueError: it is a collective, which would add up other elements of each rank.
    """
    if not (callable(operator) or "::" in str(operator)):
        raise TypeError(
            f"register_elementwise: expected an operator such as torch.ops.mylib.update, or its "
            f"name 'mylib::update', got {operator!r}"
        )
    name = operator if isinstance(operator, str) else _key(operator)
    if is_collective(name):
        raise ValueError(
            f"register_elementwise: {name} is a collective, and each rank holds other elements: "
            "call dist.all_reduce(parameter.data), which sees the full values"
        )
    _elementwise.add(name)


def is_collective(name: Any) -> bool:
    """Whether an operator of this name communicates."""
    return isinstance(name, str) and name.startswith(("c10d", "_c10d_functional"))


def is_elementwise(func: Function | str) -> bool:
    """Whether ``func``, or the operator of this name, is declared element-wise."""
    return _key(func) in _elementwise


@cache
def _key(func: Any) -> Any:
    """Returns the operator's full name; the function itself if it has none."""
    func = getattr(func, "_opoverload", func)  # a result of torch.library.custom_op has it
    if isinstance(func, OpOverload):
        return func._schema.name
    if isinstance(func, OpOverloadPacket):
        return func._qualified_op_name
    is_builtin = getattr(torch, getattr(func, "__name__", ""), None) is func
    return f"aten::{func.__name__}" if is_builtin else func


def changed_by(func: Function, args: Args, kwargs: Kwargs) -> list[Any]:
    """Returns the arguments that ``func`` changes: by its name, by ``out=`` and by its schema."""
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
    """Returns position and name of the arguments that an overload changes; -1 for keyword-only."""
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
    if isinstance(func, FunctionType):
        return []
    name = f"aten::{getattr(func, '__name__', '')}"
    return _overloads(getattr(func, "_qualified_op_name", name))  # a packet of overloads has one


def _overloads(name: str) -> list[Any]:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    # TorchScript's own overloads, which take lists, have no kernel.
    names = [f"{schema.name}.{schema.overload_name}".removesuffix(".") for schema in schemas]
    has_kernel = map(torch._C._dispatch_has_kernel, names)
    return [schema for schema, has in zip(schemas, has_kernel, strict=True) if has]
