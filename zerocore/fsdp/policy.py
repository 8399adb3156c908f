"""FSDP2's mixed precision, with dtypes for gathers and for gradients on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch

from zerocore.options.precision import check_wire


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


def wire_dtype_of(policy: PolicyOfTorch) -> torch.dtype | None:
    """Returns the dtype that gradients travel in; None for a policy of torch."""
    return policy.wire_dtype if isinstance(policy, MixedPrecisionPolicy) else None
