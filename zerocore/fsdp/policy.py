"""FSDP2's mixed precision, with dtypes for gathers and for gradients on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch

from zerocore.options.precision import MixedPrecision, ParamTypes, check_wire, gathered_types

if TYPE_CHECKING:
    from zerocore.fsdp.group import RowParam


@dataclass(frozen=True)
class MixedPrecisionPolicy(PolicyOfTorch):
    """Torch's policy with two more dtypes; ``fully_shard`` takes both classes.

    Attributes:
        wire_dtype: as in :class:`zerocore.MixedPrecision`; all policies of a model have one, or
            none has.
        gather_dtype: as in :class:`zerocore.MixedPrecision`; embeddings and parameters of fewer
            than two dimensions are gathered in their own dtype.

    Raises:
        TypeError, ValueError: as :class:`zerocore.MixedPrecision`.
    """

    wire_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        check_wire(self.wire_dtype, self.reduce_dtype, self.gather_dtype)


def types_of(param: RowParam) -> ParamTypes:
    """Returns a parameter's dtypes under its group's policy. Raises ValueError if ``gather_dtype``
    cannot hold it, NotImplementedError for a ``gather_dtype`` of parameters on the host."""
    dtype, policy = param.shard.dtype, param.group.policy
    if not dtype.is_floating_point:
        return ParamTypes(dtype, dtype, dtype, dtype)
    model = policy.param_dtype or dtype
    main = dtype if param.extension is None else model  # the shard is the main weight
    grad = param.shard.grad_dtype or dtype
    reduce = wire_dtype_of(policy) or policy.reduce_dtype or (model if grad == dtype else grad)
    types, gather = ParamTypes(model, main, reduce, grad), getattr(policy, "gather_dtype", None)
    if gather is None or param.extension is not None:
        return types
    if param.group.offloads:
        raise NotImplementedError(
            f"parameter '{param.fqn}': gather_dtype={gather} does not support parameters on the "
            "host; leave out gather_dtype= or offload_policy="
        )
    mixed = MixedPrecision(gather_dtype=gather)
    return gathered_types(types, mixed, param.fqn, len(param.rows.shape), param.owners)


def wire_dtype_of(policy: PolicyOfTorch) -> torch.dtype | None:
    """Returns the dtype that gradients travel in; None for a policy of torch."""
    return policy.wire_dtype if isinstance(policy, MixedPrecisionPolicy) else None
