"""Checks options that set some of the ranks apart: ``regather`` and ``replicas_share``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerocore.model.ranks import Ranks, group_of, members_of
from zerocore.sharding.builder import Sharding


def with_near(ranks: Ranks, regather: Any) -> Ranks:
    """Adds the near ranks, from which later gathers of a step come; communicates nothing.

    ``regather``: a process group or 1-D DeviceMesh of ranks that share the state, or a number
    of consecutive ranks. Raises TypeError for anything else, ValueError for other ranks, or a
    number that does not divide the ranks that share the state.
    """
    is_number = isinstance(regather, int) and not isinstance(regather, bool)
    group = None if is_number else group_of(regather, "regather")
    num = regather if group is None else group.size()
    if num < 1 or ranks.num_shards % num != 0:
        raise ValueError(
            f"regather: {num} ranks do not divide the {ranks.num_shards} that share the state"
        )
    if num in (1, ranks.num_shards):
        return ranks  # no rank is nearer than another
    strangers = set() if group is None else members_of(group) - members_of(ranks.shard)
    if strangers:
        raise ValueError(
            f"regather: ranks {sorted(strangers)} of its group do not share the state with this "
            "rank; pass a part of group="
        )
    return replace(ranks, near=group, num_near=num)


def _check_levels(ranks: Ranks, stage: int) -> None:
    """Rejects ranks whose replicas cannot share the optimizer's states."""
    if ranks.shard is None or ranks.replicas is None or stage == 0:
        raise ValueError(
            f"replicas_share='optimizer': stage {stage} on {ranks.text} ranks has no "
            "replicas whose ranks share states; pass group= a 2-D DeviceMesh of replicas by shards "
            "and stage= 1 to 3, or leave replicas_share out"
        )
    if list(ranks.members) != sorted(ranks.members):
        raise ValueError(
            f"replicas_share='optimizer': the mesh has ranks {list(ranks.members)}; pass a mesh "
            "with its ranks in ascending order"
        )


def check_shared(sharding: Sharding) -> None:
    """Rejects ``replicas_share`` with an option or ranks that it does not support."""
    ranks, config = sharding.ranks, sharding.config
    near = None if ranks.num_near == 1 else ranks.num_near
    options: dict[str, Any] = {"groups=": sharding.parts or None, "offload=": config.offload}
    options |= {"regather": near, "tensor parallelism": sharding.tensor_ranks}
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"replicas_share='optimizer' does not support {name}; leave one of them out"
            )
    _check_levels(ranks, config.stage)
