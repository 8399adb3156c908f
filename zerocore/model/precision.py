"""Mixed precision: in which dtype a parameter is computed with, updated, reduced and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

CAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Floating-point dtypes that are cast from and to."""


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype", "wire_dtype")


@dataclass(frozen=True)
class ParamTypes:
    """The dtypes of one parameter.

    Attributes:
        model: what layers compute with and all-gathers move.
        main: what the optimizer updates; a copy of its own where it is not ``model``.
        reduce: gradients on their way between the ranks.
        grad: gradients as they are kept and accumulated.
    """

    model: torch.dtype
    main: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype

    @property
    def has_main(self) -> bool:
        """Whether the optimizer has a copy of its own."""
        return self.main != self.model


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
        grad_dtype: dtype that gradients are kept and accumulated in; None takes that of the main
            weights, which every optimizer of torch needs. ``zerocore.optim`` can do with a
            narrower one.

    Parameters that do not require grad when the model is sharded have no main weights: they are
    kept in the dtype that they are computed with.

    Raises:
        TypeError: a dtype is no floating-point ``torch.dtype``, or a name no string.
        ValueError: a dtype that is not float32, float16 or bfloat16, or both ``wire_dtype`` and
            ``reduce_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()
    main_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in _DTYPES:
            check_cast(name, getattr(self, name))
        check_wire(self.wire_dtype, self.reduce_dtype)
        names = self.keep_fp32
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"keep_fp32 must be names of modules or parameters, got {names!r}")
        object.__setattr__(self, "keep_fp32", tuple(names))

    def keeps(self, fqn: str) -> bool:
        """Whether the parameter of that name is not cast."""
        return any(_matches(name, fqn) for name in self.keep_fp32)

    def check_names(self, fqns: Sequence[str]) -> None:
        """Raises ValueError for a name in ``keep_fp32`` that matches none of the parameters."""
        for name in self.keep_fp32:
            if not any(_matches(name, fqn) for fqn in fqns):
                raise ValueError(
                    f"keep_fp32: {name!r} matches no parameter of the model, such as "
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


def check_wire(wire: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """Raises ValueError if a policy has both dtypes."""
    if wire is not None and reduce is not None:
        raise ValueError(
            f"wire_dtype={wire} with reduce_dtype={reduce}: gradients that travel in wire_dtype "
            "are summed in the dtype that they are kept in; leave reduce_dtype out"
        )


def check_mixed(mixed: object) -> None:
    """Raises TypeError unless it is a MixedPrecision or None."""
    if mixed is not None and not isinstance(mixed, MixedPrecision):
        raise TypeError(
            "mixed_precision must be a zerocore.MixedPrecision, such as "
            f"zerocore.MixedPrecision(torch.bfloat16), got {mixed!r}"
        )


def _matches(name: str, fqn: str) -> bool:
    return fnmatchcase(f".{fqn}.", f"*.{name}.*")


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
