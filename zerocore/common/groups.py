"""Process groups that ranks make together, whatever other groups they are in."""

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

# By default group: the ranks of another one have not made the same groups before.
_num_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
_name: ContextVar[str] = ContextVar("name", default="")  # of the group that is being made

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
    ranks = "_".join(map(str, members))
    label = f"{what}_{hashlib.sha256(ranks.encode()).hexdigest()}"
    made = _num_made.setdefault(dist.group.WORLD, Counter())
    made[label] += 1
    before = _name.set(f"{label}_{made[label]}")
    try:
        return dist.new_group(
            list(members), use_local_synchronization=True, group_desc=what, **options
        )
    finally:
        _name.reset(before)


@around
def named_by_thread(original: Any, *args: Any, **kwargs: Any) -> str:
    """The name of a new group: :func:`new_group`'s in the thread that runs it, else torch's."""
    return _name.get() or original(*args, **kwargs)


def check_exists(group: Any) -> None:
    """Raises RuntimeError if the group was destroyed."""
    if group is not None and group not in dist.distributed_c10d._world.pg_map:
        raise RuntimeError(
            "the process group of this model's ranks was destroyed, so they cannot tell each other "
            "anything: call torch.distributed.destroy_process_group() behind the last use of the "
            "model (saves in the background end with Checkpoints.wait()), or shard a new model in "
            "a new group"
        )


def timeout_of(group: Any) -> timedelta | None:
    """The shortest of its backends'; None if they have none."""
    backends = (group._get_backend(device) for device in group._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    found = [getattr(each, "_timeout", None) for each in options]
    return min(filter(None, found), default=None)
