"""Explains why parameters have other values on other ranks: warns, or rejects parts of tensors.

Most programs want the first rank's values: they set no seed, or load on the first rank only. But
ranks may hold parts of their own, such as experts or parts of matrices, which would be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zerocore.common.agreement import bits_of, gather_objects, ranks_by_value
from zerocore.model.ranks import Ranks
from zerocore.model.units import Param

_log = logging.getLogger("zerocore")


def explain(
    ranks: Ranks,
    chosen: Sequence[Param],
    checksums: Sequence[int],
    places: Sequence[int],
    device: torch.device,
) -> None:
    """Warns of parameters that differ; collective. Raises ValueError, with parameters and ranks, if
    groups of ranks hold values of their own. ``places``: indices of the parameters that differ."""
    tables = gather_objects(ranks.groups, [list(checksums)], device)
    same = [param for place, param in enumerate(chosen) if place not in set(places)]
    if all(_is_constant(param.tensor) for param in same):
        return  # only constants are the same: the ranks have drawn all their random numbers
    classes = {
        chosen[place].fqns[0]: ranks_by_value(enumerate(column))
        for place, column in zip(places, zip(*tables, strict=True), strict=True)
    }
    _refuse_parts(classes)
    # If all ranks but the first agree, the first has loaded weights that the others lack.
    ambiguous = [name for name, parts in classes.items() if parts[0] != [0] or len(parts) != 2]
    if len(tables) == 2:
        ambiguous = list(classes)
    if ambiguous and ranks.rank == 0:
        _log.warning(
            "the ranks have different values of %s, but equal values of others, such as '%s'. All "
            "ranks get rank 0's values. If each rank has its own experts or tensor-parallel parts, "
            "name them in groups=. Otherwise set one seed on all ranks",
            _listed(ambiguous),
            next(param.fqn for param in same if not _is_constant(param.tensor)),
        )


def _refuse_parts(classes: dict[str, list[list[int]]]) -> None:
    parts = {
        name: ranks
        for name, ranks in classes.items()
        if len(ranks[0]) > 1 and len({len(equal) for equal in ranks}) == 1
    }
    if parts:
        first = next(iter(parts.values()))
        raise ValueError(
            f"group: ranks {', '.join(map(str, first[0]))} have other values of {_listed(parts)} "
            f"than ranks {', '.join(map(str, first[1]))}, but all have equal values of other "
            "parameters. zerocore.shard cannot shard experts and tensor-parallel parts over all "
            "ranks. Name them in groups=, with the ranks that hold equal values. If all ranks "
            "need rank 0's values, set one seed on all ranks before building the model"
        )


def _listed(names: Sequence[str] | dict[str, list[list[int]]]) -> str:
    shown = ", ".join(f"'{name}'" for name in list(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is_constant(param: torch.Tensor) -> bool:
    """Whether all elements are equal, as in newly made biases and norms."""
    bits = bits_of(param)
    return bool((bits == bits[:1]).all())
