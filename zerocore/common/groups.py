"""Makes process groups, even if the ranks are in different other groups."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zerocore.common.patching import around

# Counts per default group: a rank that joins a new one has not made the same groups before.
_num_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
_name: ContextVar[str] = ContextVar("name", default="")  # name of the group being made

_shared: dict[tuple[str, Any], dist.ProcessGroup] = {}


def shared_group(key: Any, members: Sequence[int], what: str, **options: Any) -> dist.ProcessGroup:
    """Returns the group of that key and description; calls :func:`new_group` if there is none."""
    group = _shared.get((what, key))
    existing = dist.distributed_c10d._world.pg_map
    if group is None or group not in existing:
        for destroyed in [old for old in _shared if _shared[old] not in existing]:
            del _shared[destroyed]
        group = _shared[what, key] = new_group(members, what, **options)
    return group


def new_group(members: Sequence[int], what: str, **options: Any) -> dist.ProcessGroup:
    """Makes a group of these ranks, in ascending order. All of them call, and no other rank.

    Torch names such a group by the number of groups that its rank is in. If these numbers differ,
    as after ``dist.new_group([0])``, ranks would wait for each other forever.

    Args:
        members: numbers of the ranks in the default group.
        what: the group's description.
        options: more arguments of ``torch.distributed.new_group``; the default timeout is the
            default group's, not torch's.
    """
    options["timeout"] = options.get("timeout") or timeout_of(dist.group.WORLD)
    ranks = "_".join(map(str, members))
    label = f"{what}_{hashlib.sha256(ranks.encode()).hexdigest()}"
    counts = _num_made.setdefault(dist.group.WORLD, Counter())
    counts[label] += 1
    before = _name.set(f"{label}_{counts[label]}")
    try:
        return dist.new_group(
            list(members), use_local_synchronization=True, group_desc=what, **options
        )
    finally:
        _name.reset(before)


@around
def named_by_thread(original: Any, *args: Any, **kwargs: Any) -> str:
    """Returns a new group's name: the one from :func:`new_group` in its thread, else torch's."""
    return _name.get() or original(*args, **kwargs)


def check_exists(group: Any) -> None:
    """Raises RuntimeError if the group was destroyed."""
    if group is not None and group not in dist.distributed_c10d._world.pg_map:
        raise RuntimeError(
            "the process group of this model's ranks was destroyed, so they cannot communicate: "
            "call torch.distributed.destroy_process_group() after the last use of the model "
            "(Checkpoints.wait() ends background saves), or shard a new model in a new group"
        )


def timeout_of(group: Any) -> timedelta | None:
    """Returns the shortest timeout of a group's backends; None if they have none."""
    backends = (group._get_backend(device) for device in group._device_types)
    all_options = (getattr(backend, "options", None) for backend in backends)
    timeouts = [getattr(options, "_timeout", None) for options in all_options]
    return min(filter(None, timeouts), default=None)
