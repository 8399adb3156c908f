"""The ranks of parameters that only some of a model's ranks share, as a program names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterMesh:
    """The ranks of parameters that not all ranks of a model share.

    Their gradients are summed over ``mesh`` and divided as those of all other parameters are: by
    the number of the model's ranks, whose tokens reach them.

    Attributes:
        mesh: ranks that hold the same values: as ``group=`` of :func:`zerocore.shard`.
        of: ranks that hold the other parts of the same tensors: a process group or 1-D DeviceMesh.
            A norm of gradients counts all parts. None where the ranks outside of ``mesh`` hold
            the same tensor, so that a norm counts it once.
        dim: dimension along which the parts follow each other, in the order of ``of``.
    """

    mesh: Any
    of: Any = None
    dim: int = 0
