"""Mixed precision: the dtypes in which parameters are computed with, updated, reduced and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zerocore._C import UnitParam

CAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Floating-point dtypes that casts support."""
GATHER_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""One-byte dtypes that gathers support."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype", "wire_dtype")


@dataclass(frozen=True)
class ParamTypes:
    """The dtypes of one parameter."""

    model: torch.dtype  # dtype of the weights that layers compute with and all-gathers move
    main: torch.dtype  # dtype of the weights that the optimizer updates: a copy if not ``model``
    reduce: torch.dtype  # dtype of gradients on the wire
    grad: torch.dtype  # dtype of gradients as they are kept and accumulated
    gather: torch.dtype | None = None  # one-byte dtype, gathered with scales; None for ``model``

    @property
    def has_main(self) -> bool:
        """Whether there are main weights beside the ones that layers compute with."""
        return self.main != self.model


BYTES = ParamTypes(*[torch.uint8] * 4)


def unit_param(
    fqn: str,
    like: Tensor,
    types: ParamTypes,
    *,
    lacks_main: bool = False,
    is_gathered: bool = True,
    is_kept: bool = True,
) -> UnitParam:
    """Describes a parameter to the engine: shape, strides and ``requires_grad`` from ``like``."""
    return UnitParam(
        fqn, like, main=types.main, reduce=types.reduce, grad=types.grad, gather=types.gather,
        lacks_main=lacks_main, is_gathered=is_gathered, is_kept=is_kept,
    )  # fmt: skip


@dataclass(frozen=True)
class MixedPrecision:
    """Mixed precision: layers compute in a narrow dtype, the optimizer updates wide main weights.

    Attributes:
        param_dtype: floating-point dtype that layers compute in and parameters are gathered in;
            None keeps each parameter's.
        reduce_dtype: dtype that gradients are reduced in; None takes ``param_dtype``.
        output_dtype: dtype that floating-point outputs of the model are cast to; None casts none.
        cast_inputs: cast floating-point inputs of the model and of its units to ``param_dtype``.
        keep_fp32: names of modules or parameters; neither these parameters nor their gradients are
            cast. A name matches a whole part of a fully qualified name: ``"norm"`` matches
            ``"layers.0.norm.weight"``, ``"*norm"`` also ``"layers.0.input_norm.bias"``. ``shard``
            rejects a name that matches no parameter. They keep their dtype, which is bfloat16 in a
            bfloat16 model without ``main_dtype``. If a module holds no other parameters, its
            floating-point inputs are cast to their dtype, and its outputs are cast back.
        main_dtype: dtype of the main weights; None takes the model's dtype at ``shard``.
        wire_dtype: dtype that gradients travel in, instead of ``reduce_dtype``. Each rank receives
            the others' gradients of its part and adds them in rank order, in the dtype that
            gradients are kept in. Sums that travel, over replicas and at stage 0, have that dtype,
            too. A gradient then depends only on the ranks' gradients, not on units, their order or
            the backend's algorithm; it is exact if layers compute in ``wire_dtype``. None leaves
            the sum to the backend.
        gather_dtype: at stage 3, the one-byte dtype that parameters are gathered in,
            ``torch.float8_e4m3fn`` or ``torch.int8``, with a float32 scale per 128 elements of a
            shard. All ranks compute with the decoded values. Main weights, saves and full values
            outside the model are exact.
        gather_exact: names, as in ``keep_fp32``, of parameters that are gathered in their own
            dtype. None names embeddings and parameters of fewer than two dimensions, such as those
            in norms. Parameters in ``keep_fp32`` are always gathered in their own dtype.
        grad_dtype: dtype that gradients are kept and accumulated in; None takes the main weights'
            dtype, which torch's optimizers need. ``zerocore.optim`` supports a narrower one.

    Parameters that do not require grad when the model is sharded have no main weights: they are
    kept in the dtype that they are computed with.

    Raises:
        TypeError: a dtype is not a floating-point ``torch.dtype``, or a name is not a string.
        ValueError: a dtype is not float32, float16 or bfloat16 (``gather_dtype``: not
            float8_e4m3fn or int8), or both ``wire_dtype`` and ``reduce_dtype`` are set.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()
    main_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    gather_exact: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in _DTYPES:
            check_cast(name, getattr(self, name))
        check_wire(self.wire_dtype, self.reduce_dtype, self.gather_dtype)
        object.__setattr__(self, "keep_fp32", _names("keep_fp32", self.keep_fp32))
        if self.gather_exact is not None:
            object.__setattr__(self, "gather_exact", _names("gather_exact", self.gather_exact))

    @property
    def sums_in_order(self) -> bool:
        """Whether ranks sum gradients themselves, in rank order."""
        return self.wire_dtype is not None

    def keeps(self, fqn: str) -> bool:
        """Whether ``keep_fp32`` matches a parameter, which is then not cast."""
        return any(_matches(name, fqn) for name in self.keep_fp32)

    def encodes(self, fqn: str, dims: int, owners: Iterable[tuple[nn.Module, str]]) -> bool:
        """Whether gathers move a parameter in ``gather_dtype``; ``owners`` are its modules."""
        if self.gather_dtype is None or self.keeps(fqn):
            return False
        if self.gather_exact is not None:
            return not any(_matches(name, fqn) for name in self.gather_exact)
        return dims > 1 and not any(isinstance(owner, _EMBEDDINGS) for owner, _ in owners)

    def check_names(self, fqns: Sequence[str]) -> None:
        """Rejects a name that matches no parameter (ValueError)."""
        named = {"keep_fp32": self.keep_fp32, "gather_exact": self.gather_exact or ()}
        for option, name in ((o, name) for o, names in named.items() for name in names):
            if not any(_matches(name, fqn) for fqn in fqns):
                raise ValueError(
                    f"{option}: {name!r} matches no parameter of the model, such as "
                    f"{', '.join(repr(fqn) for fqn in fqns[:3])}; a name matches a whole part of a "
                    f"fully qualified name, '*{name}*' matches within a part"
                )


def check_cast(name: str, value: object) -> None:
    """Rejects an option unless it is a dtype of :data:`CAST_DTYPES` or None."""
    if value is None:
        return
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating-point torch.dtype, got {value!r}")
    if value not in CAST_DTYPES:
        raise ValueError(f"{name} must be one of {CAST_DTYPES}, got {value}")


def check_wire(wire: torch.dtype | None, reduce: torch.dtype | None, gather: object) -> None:
    """Rejects dtypes that a policy cannot have: both ``wire`` and ``reduce``, or a ``gather`` that
    is not in :data:`GATHER_DTYPES`."""
    check_cast("wire_dtype", wire)
    if wire is not None and reduce is not None:
        raise ValueError(
            f"wire_dtype={wire} with reduce_dtype={reduce}: gradients that travel in wire_dtype "
            "are summed in the dtype that they are kept in; leave out reduce_dtype"
        )
    if gather is not None and not isinstance(gather, torch.dtype):
        raise TypeError(f"gather_dtype must be a torch.dtype, got {gather!r}")
    if gather is not None and gather not in GATHER_DTYPES:
        raise ValueError(f"gather_dtype must be one of {GATHER_DTYPES}, got {gather}")


def _names(option: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{option} must be names of modules or parameters, got {names!r}")
    return tuple(names)


def check_mixed(mixed: object) -> None:
    """Rejects a value that is neither a MixedPrecision nor None (TypeError)."""
    if mixed is not None and not isinstance(mixed, MixedPrecision):
        raise TypeError(
            "mixed_precision must be a zerocore.MixedPrecision, such as "
            f"zerocore.MixedPrecision(torch.bfloat16), got {mixed!r}"
        )


def _matches(name: str, fqn: str) -> bool:
    return fnmatchcase(f".{fqn}.", f"*.{name}.*")


def gathered_types(
    types: ParamTypes,
    mixed: MixedPrecision,
    fqn: str,
    dims: int,
    owners: Iterable[tuple[nn.Module, str]],
) -> ParamTypes:
    """Returns a parameter's dtypes with ``gather_dtype``, if it applies; may raise ValueError."""
    if not types.model.is_floating_point or not mixed.encodes(fqn, dims, owners):
        return types
    if types.model not in CAST_DTYPES:
        raise ValueError(
            f"parameter '{fqn}' is {types.model}, which cannot be gathered as "
            f"{mixed.gather_dtype}; name it in gather_exact, or first convert it to one of "
            f"{CAST_DTYPES}"
        )
    return replace(types, gather=mixed.gather_dtype)


def param_types(
    mixed: MixedPrecision | None, fqn: str, dtype: torch.dtype, requires_grad: bool
) -> ParamTypes:
    """Returns the dtypes of a parameter of ``dtype``; ValueError if it cannot be cast."""
    if mixed is None or not dtype.is_floating_point:
        return ParamTypes(dtype, dtype, dtype, dtype)
    base = (mixed.main_dtype or dtype) if requires_grad else dtype
    kept = mixed.keeps(fqn)
    model = base if kept else mixed.param_dtype or dtype
    if not requires_grad:
        types = ParamTypes(model, model, model, model)
    else:
        reduce = base if kept else mixed.wire_dtype or mixed.reduce_dtype or model
        types = ParamTypes(model, base, reduce, mixed.grad_dtype or base)
    wanted = {types.model, types.main, types.reduce, types.grad}
    if wanted != {dtype} and dtype not in CAST_DTYPES:
        raise ValueError(
            f"parameter '{fqn}' is {dtype}, which mixed precision cannot cast; name it in "
            f"keep_fp32, or first convert it to one of {CAST_DTYPES}"
        )
    return types
