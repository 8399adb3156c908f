"""FSDP2's mixed precision, with dtypes for the wire alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch

from zerocore.fsdp.group import RowParam
from zerocore.options.precision import MixedPrecision, ParamTypes, check_wire, gathered_types


@dataclass(frozen=True)
class MixedPrecisionPolicy(PolicyOfTorch):
    """Torch's policy, which ``fully_shard`` takes, too, and dtypes of the wire.

    Attributes:
        wire_dtype: as of :class:`zerocore.MixedPrecision`; the policies of a model have one, or
            none of them.
        gather_dtype: as there; embeddings and parameters of fewer than two dimensions are gathered
            as they are.

    Raises:
        TypeError, ValueError: as of :class:`zerocore.MixedPrecision`.
    """

    wire_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        check_wire(self.wire_dtype, self.reduce_dtype, self.gather_dtype)


def types_of(param: RowParam) -> ParamTypes:
    """The dtypes of a parameter under its group's policy. Raises ValueError if gathers cannot move
    it so, NotImplementedError for a ``gather_dtype`` of parameters on the host."""
    own, policy = param.shard.dtype, param.group.policy
    if not own.is_floating_point:
        return ParamTypes(own, own, own, own)
    model = policy.param_dtype or own
    main = own if param.extension is None else model  # it is its own main weight
    grad = param.shard.grad_dtype or own
    reduce = wire_dtype_of(policy) or policy.reduce_dtype or (model if grad == own else grad)
    types, gather = ParamTypes(model, main, reduce, grad), getattr(policy, "gather_dtype", None)
    if gather is None or param.extension is not None:
        return types
    if param.group.offloads:
        raise NotImplementedError(
            f"parameter '{param.fqn}': gather_dtype={gather} is not built for parameters on the "
            "host; leave it or offload_policy= out"
        )
    mixed = MixedPrecision(gather_dtype=gather)
    return gathered_types(types, mixed, param.fqn, len(param.rows.shape), param.owners)


def wire_dtype_of(policy: PolicyOfTorch) -> torch.dtype | None:
    """The dtype that gradients travel in; None for a policy of torch."""
    return policy.wire_dtype if isinstance(policy, MixedPrecisionPolicy) else None
