"""Warns if the names of a mesh's dimensions contradict their use."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("zerocore")
_SEQUENCE = {"cp", "sp", "context", "sequence"}
_MODEL = {"tp", "pp", "ep", "tensor", "pipeline", "expert"}


def note_names(group: Any, divides: bool) -> None:
    """Warns on the first rank if the names of a mesh's dimensions contradict their use here;
    ``divides``: the user has set the number that gradients are divided by."""
    names: tuple[str, ...] = group.mesh_dim_names
    words = {name: set(name.lower().split("_")) for name in names}
    if group.get_rank() != int(group.mesh.flatten()[0]):
        return
    for name in names:
        if words[name] & _MODEL:
            _log.warning(
                "group: the ranks of dimension '%s' seem to hold different parts of the model; "
                "pass the dimensions of data parallelism",
                name,
            )
    of_sequence = [name for name in names if words[name] & _SEQUENCE]
    if of_sequence and len(names) == 2:
        _log.warning(
            "group: the 2-D mesh %s is taken as %d replicas of %d shards (hybrid sharding). To "
            "divide the state over all ranks, pass mesh[%s]._flatten('%s')",
            names,
            *group.mesh.shape,
            ", ".join(f"'{name}'" for name in names),
            "_".join(names),
        )
    elif of_sequence and not divides:
        _log.warning(
            "group: gradients are averaged over '%s'. If each rank's loss is its share of the loss "
            "over all tokens, pass "
            "communication=zerocore.Communication(gradient_divide_factor=1), which sums them",
            of_sequence[0],
        )
