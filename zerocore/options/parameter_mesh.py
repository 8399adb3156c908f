"""The option that names the ranks of parameters which only some of a model's ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterMesh:
    """The ranks of parameters that not all ranks of a model share.

    The tokens of all ranks reach these parameters. So their gradients are summed over ``mesh``, but
    divided like all others, by the number of the model's ranks.

    Attributes:
        mesh: the ranks that share these parameters, as ``group=`` of :func:`zerocore.shard`.
        of: the ranks that hold the other parts of the same tensors: a process group or 1-D
            DeviceMesh. A norm of gradients counts all parts. None if the ranks outside ``mesh``
            hold the same tensor; a norm then counts it once.
        dim: the dimension along which the parts are concatenated, in the order of ``of``.
    """

    mesh: Any
    of: Any = None
    dim: int = 0
