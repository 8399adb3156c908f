"""FSDP2's mixed precision, with a dtype for the wire alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch

from zerocore.model.precision import check_cast, check_wire


@dataclass(frozen=True)
class MixedPrecisionPolicy(PolicyOfTorch):
    """Torch's policy, which ``fully_shard`` takes, too, and one more dtype.

    Attributes:
        wire_dtype: as of :class:`zerocore.MixedPrecision`; the policies of a model have one, or
            none of them.

    Raises:
        TypeError: it is no floating-point ``torch.dtype``.
        ValueError: it is not float32, float16 or bfloat16, or ``reduce_dtype`` is given, too.
    """

    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        check_cast("wire_dtype", self.wire_dtype)
        check_wire(self.wire_dtype, self.reduce_dtype)


def wire_dtype_of(policy: PolicyOfTorch) -> torch.dtype | None:
    """The dtype that gradients travel in; None for a policy of torch."""
    return policy.wire_dtype if isinstance(policy, MixedPrecisionPolicy) else None
