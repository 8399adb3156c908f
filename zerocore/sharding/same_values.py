"""Compares the ranks' parameters before the first rank's values overwrite those of the others.

That is what most programs want: they set no seed, or load on the first rank only. It is not where
ranks hold parts of their own: experts, or parts of matrices. See docs/behaviour.md for the rule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zerocore.common.agreement import bits_of, checksum, differing, gather_objects, ranks_by_value
from zerocore.model.parts import choices_on
from zerocore.model.ranks import Ranks
from zerocore.model.units import ParamChoice
from zerocore.sharding.request import ShardRequest

_log = logging.getLogger("zerocore")


def check_same_values(request: ShardRequest) -> None:
    """Says which parameters have other values on other ranks; collective.

    Raises:
        ValueError: groups of ranks hold values of their own; names parameters and ranks.
    """
    own = {mesh: choices_on(request.planned, mesh) for mesh in range(len(request.meshes))}
    plain = [choice for choice in own[0] if choice.spec is None]
    own[0] = [choice for choice in own[0] if choice.spec is not None]
    for ranks, choices in (
        (request.all_ranks, plain),
        *zip(request.meshes, own.values(), strict=True),
    ):
        chosen = [choice for choice in choices if not choice.tensor.is_meta]
        if ranks.groups and chosen:
            _check(ranks, chosen, request.device)


def _check(ranks: Ranks, chosen: Sequence[ParamChoice], device: torch.device) -> None:
    with torch.no_grad():
        numbers = torch.stack([checksum(choice.tensor).to(device) for choice in chosen])
    if not (places := differing(ranks.groups, numbers)):
        return
    own = [int(numbers[place]) for place in places]
    tables = gather_objects(ranks.groups, [own], device)
    same = [choice for place, choice in enumerate(chosen) if place not in set(places)]
    if all(_is_constant(choice.tensor) for choice in same):
        return  # nothing was the same but by its rule: the ranks have drawn all numbers
    classes = {
        chosen[place].fqns[0]: ranks_by_value(enumerate(column))
        for place, column in zip(places, zip(*tables, strict=True), strict=True)
    }
    _refuse_parts(classes)
    # Where the others agree with each other, the first rank has loaded what they have not.
    ambiguous = [name for name, parts in classes.items() if parts[0] != [0] or len(parts) != 2]
    if len(tables) == 2:
        ambiguous = list(classes)
    if ambiguous and ranks.rank == 0:
        _log.warning(
            "the ranks have different values of %s, and the same of others, as '%s'. Rank 0's are "
            "taken. Parts of a model that each rank has by itself (experts, tensor parallelism) "
            "would be lost: name them in groups=. Otherwise set one seed on all ranks",
            _listed(ambiguous),
            next(choice.fqns[0] for choice in same if not _is_constant(choice.tensor)),
        )


def _refuse_parts(classes: dict[str, list[list[int]]]) -> None:
    parts = {
        name: ranks
        for name, ranks in classes.items()
        if len(ranks[0]) > 1 and len({len(each) for each in ranks}) == 1
    }
    if parts:
        first = next(iter(parts.values()))
        raise ValueError(
            f"group: ranks {', '.join(map(str, first[0]))} have other values of {_listed(parts)} "
            f"than ranks {', '.join(map(str, first[1]))}, and the same of other parameters: parts "
            "of a model that several ranks share (experts, tensor parallelism) cannot be sharded "
            "over all of them. Name them in groups=, with the ranks that hold the same values. If "
            "rank 0's are meant for all, set one seed on all ranks before the model is built"
        )


def _listed(names: Sequence[str] | dict[str, list[list[int]]]) -> str:
    shown = ", ".join(f"'{name}'" for name in list(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is_constant(param: torch.Tensor) -> bool:
    """Whether all elements are equal, as biases and norms are when they are made."""
    bits = bits_of(param)
    return bool((bits == bits[:1]).all())
