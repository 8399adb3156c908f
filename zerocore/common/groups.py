"""Process groups that ranks make together, whatever other groups they are in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# By default group: the ranks of another one have not made the same groups before.
_num_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


_shared: dict[tuple[str, Any], dist.ProcessGroup] = {}


def shared_group(key: Any, members: Sequence[int], what: str, **options: Any) -> dist.ProcessGroup:
    """As :func:`new_group`; the group of that key and description as long as it exists."""
    group = _shared.get((what, key))
    existing = dist.distributed_c10d._world.pg_map
    if group is None or group not in existing:
        for destroyed in [each for each in _shared if _shared[each] not in existing]:
            del _shared[destroyed]
        group = _shared[what, key] = new_group(members, what, **options)
    return group


def new_group(members: Sequence[int], what: str, **options: Any) -> dist.ProcessGroup:
    """A group of these ranks, in ascending order; collective of them alone.

    Torch names such a group by the number of groups that its rank is in. Where these numbers
    differ, as after ``dist.new_group([0])``, ranks would wait for each other for ever.

    Args:
        members: numbers of the ranks in the default group.
        what: the group's description.
        options: more arguments of ``torch.distributed.new_group``; the default timeout is that of
            the default group, not torch's.
    """
    options["timeout"] = options.get("timeout") or timeout_of(dist.group.WORLD)
    c10d: Any = dist.distributed_c10d
    ranks = "_".join(map(str, members))
    label = f"{what}_{hashlib.sha256(ranks.encode()).hexdigest()}"
    made = _num_made.setdefault(dist.group.WORLD, Counter())
    made[label] += 1
    name = f"{label}_{made[label]}"
    named_by_torch = c10d._process_group_name
    c10d._process_group_name = lambda *_, **__: name
    try:
        return dist.new_group(
            list(members), use_local_synchronization=True, group_desc=what, **options
        )
    finally:
        c10d._process_group_name = named_by_torch


def timeout_of(group: Any) -> timedelta | None:
    """The shortest of its backends'; None if they have none."""
    backends = (group._get_backend(device) for device in group._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    found = [getattr(each, "_timeout", None) for each in options]
    return min(filter(None, found), default=None)
