"""Mixed precision: in which dtype a parameter is computed with, updated, reduced and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zerocore._C import UnitParam

CAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Floating-point dtypes that are cast from and to."""
GATHER_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Numbers of one byte that gathers move."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype", "wire_dtype")


@dataclass(frozen=True)
class ParamTypes:
    """The dtypes of one parameter."""

    model: torch.dtype  # what layers compute with and all-gathers move
    main: torch.dtype  # what the optimizer updates; a copy of its own where it is not ``model``
    reduce: torch.dtype  # gradients on their way between the ranks
    grad: torch.dtype  # gradients as they are kept and accumulated
    gather: torch.dtype | None = None  # of one byte, moved with scales; None for ``model``

    @property
    def has_main(self) -> bool:
        """Whether the optimizer has a copy of its own."""
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
    """A parameter of the engine, of the shape, strides and ``requires_grad`` of ``like``."""
    return UnitParam(
        fqn, like, main=types.main, reduce=types.reduce, grad=types.grad, gather=types.gather,
        lacks_main=lacks_main, is_gathered=is_gathered, is_kept=is_kept,
    )  # fmt: skip


@dataclass(frozen=True)
class MixedPrecision:
    """Layers compute in a narrow dtype, the optimizer updates main weights in a wide one.

    Attributes:
        param_dtype: floating-point dtype that layers compute in and parameters are gathered in;
            None leaves both as they are.
        reduce_dtype: dtype that gradients are reduced in; None takes ``param_dtype``.
        output_dtype: dtype that floating-point outputs of the model are cast to; None leaves them.
        cast_inputs: cast floating-point inputs of the model and of its units to ``param_dtype``.
        keep_fp32: names of modules or parameters that are not cast, neither they nor their
            gradients. A name matches where it is a part of a fully qualified name: ``"norm"``
            matches ``"layers.0.norm.weight"``, ``"*norm"`` also ``"layers.0.input_norm.bias"``.
            One that matches no parameter is an error of ``shard``. They keep the dtype that they
            have, which in a bfloat16 model without ``main_dtype`` is bfloat16.
            A module that holds nothing else gets its floating-point inputs in the dtype of its
            parameters, and its outputs are cast back.
        main_dtype: dtype of the main weights; None takes that of the model at ``shard``.
        wire_dtype: dtype that gradients travel in, in the place of ``reduce_dtype``. Each rank
            receives its part of them from all others and adds these in the order of ranks, in the
            dtype that gradients are kept in; sums that travel, over replicas and at stage 0, are
            in that dtype, too. A gradient's value then depends on the ranks' gradients alone, not
            on units, their order or the backend's algorithm, and is exact where layers compute in
            ``wire_dtype``. None leaves the sum to the backend.
        gather_dtype: at stage 3, numbers of one byte that parameters are gathered in:
            ``torch.float8_e4m3fn`` or ``torch.int8``, with a float32 scale for each 128 of a
            shard. All ranks compute with the values that these stand for; main weights, saves and
            full values outside of the model are exact.
        gather_exact: names, as those of ``keep_fp32``, of parameters that are gathered as they
            are. None leaves out embeddings and parameters of fewer than two dimensions, such as
            those of norms. Parameters in ``keep_fp32`` are left out in any case.
        grad_dtype: dtype that gradients are kept and accumulated in; None takes that of the main
            weights, which every optimizer of torch needs. ``zerocore.optim`` can do with a
            narrower one.

    Parameters that do not require grad when the model is sharded have no main weights: they are
    kept in the dtype that they are computed with.

    Raises:
        TypeError: a dtype is no floating-point ``torch.dtype``, or a name no string.
        ValueError: a dtype that is not float32, float16 or bfloat16 (``gather_dtype``: not
            float8_e4m3fn or int8), or both ``wire_dtype`` and ``reduce_dtype``.
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
        """Whether ranks sum gradients themselves, in their order."""
        return self.wire_dtype is not None

    def keeps(self, fqn: str) -> bool:
        """Whether the parameter of that name is not cast."""
        return any(_matches(name, fqn) for name in self.keep_fp32)

    def encodes(self, fqn: str, dims: int, owners: Iterable[tuple[nn.Module, str]]) -> bool:
        """Whether gathers move a parameter, of a module of ``owners``, in ``gather_dtype``."""
        if self.gather_dtype is None or self.keeps(fqn):
            return False
        if self.gather_exact is not None:
            return not any(_matches(name, fqn) for name in self.gather_exact)
        return dims > 1 and not any(isinstance(owner, _EMBEDDINGS) for owner, _ in owners)

    def check_names(self, fqns: Sequence[str]) -> None:
        """Raises ValueError for a name that matches none of the parameters."""
        named = {"keep_fp32": self.keep_fp32, "gather_exact": self.gather_exact or ()}
        for option, name in ((o, name) for o, names in named.items() for name in names):
            if not any(_matches(name, fqn) for fqn in fqns):
                raise ValueError(
                    f"{option}: {name!r} matches no parameter of the model, such as "
                    f"{', '.join(repr(fqn) for fqn in fqns[:3])}; a name is a whole part of a "
                    f"fully qualified name, '*{name}*' matches within one"
                )


def check_cast(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless an option is a dtype of :data:`CAST_DTYPES` or None."""
    if value is None:
        return
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating-point torch.dtype, got {value!r}")
    if value not in CAST_DTYPES:
        raise ValueError(f"{name} must be one of {CAST_DTYPES}, got {value}")


def check_wire(wire: torch.dtype | None, reduce: torch.dtype | None, gather: object) -> None:
    """Raises TypeError or ValueError for dtypes that a policy cannot have: both of the first two,
    or a ``gather`` that is no dtype of :data:`GATHER_DTYPES`."""
    check_cast("wire_dtype", wire)
    if wire is not None and reduce is not None:
        raise ValueError(
            f"wire_dtype={wire} with reduce_dtype={reduce}: gradients that travel in wire_dtype "
            "are summed in the dtype that they are kept in; leave reduce_dtype out"
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
    """Raises TypeError unless it is a MixedPrecision or None."""
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
    """The same with what gathers move; raises ValueError if they cannot."""
    if not types.model.is_floating_point or not mixed.encodes(fqn, dims, owners):
        return types
    if types.model not in CAST_DTYPES:
        raise ValueError(
            f"parameter '{fqn}' is {types.model}, which cannot be gathered as "
            f"{mixed.gather_dtype}; name it in gather_exact or convert it to one of {CAST_DTYPES} "
            "before"
        )
    return replace(types, gather=mixed.gather_dtype)


def param_types(
    mixed: MixedPrecision | None, fqn: str, own: torch.dtype, requires_grad: bool
) -> ParamTypes:
    """The dtypes of a parameter of dtype ``own``; raises ValueError if it cannot be cast."""
    if mixed is None or not own.is_floating_point:
        return ParamTypes(own, own, own, own)
    base = (mixed.main_dtype or own) if requires_grad else own
    kept = mixed.keeps(fqn)
    model = base if kept else mixed.param_dtype or own
    if not requires_grad:
        types = ParamTypes(model, model, model, model)
    else:
        reduce = base if kept else mixed.wire_dtype or mixed.reduce_dtype or model
        types = ParamTypes(model, base, reduce, mixed.grad_dtype or base)
    wanted = {types.model, types.main, types.reduce, types.grad}
    if wanted != {own} and own not in CAST_DTYPES:
        raise ValueError(
            f"parameter '{fqn}' is {own}, which mixed precision cannot cast; name it in keep_fp32 "
            f"or convert it to one of {CAST_DTYPES} before"
        )
    return types
