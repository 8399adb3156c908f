"""The process group and the threads with which the ranks of one model save."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from weakref import WeakSet

import torch.distributed as dist

from zerocore._C import watch_group
from zerocore.common.agreement import gather_objects, real_groups
from zerocore.common.alarm import operation
from zerocore.common.groups import new_group
from zerocore.model.state import ShardState


class Writer:
    """The threads that run saves one after the other; all ranks start them in the same order."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        # A gloo group of the model's ranks; empty for one rank. Only the thread of ``writes``
        # communicates in it: its collectives must not mix with the training's.
        self.groups = groups
        # Kept, because a thread's start may wait 5 ms for others that hold the interpreter.
        self.writes = ThreadPoolExecutor(1, "checkpoint-write")
        self.copies = ThreadPoolExecutor(1, "checkpoint-copy")  # for the save being written
        _living.add(self)


_living: WeakSet[Writer] = WeakSet()  # a running save keeps its writer alive


def finish_writes() -> None:
    """Waits until all saves that this process has begun have ended, with or without errors."""
    wait([writer.writes.submit(int) for writer in _living])


@operation("Checkpoints")
def writer_of(state: ShardState) -> Writer:
    """Returns a model's writer, made by a collective; ValueError if other ranks are emulated."""
    if "writer" not in state.kept:
        state.kept["writer"] = Writer(_own_groups(state))
    writer: Writer = state.kept["writer"]
    return writer


def _own_groups(state: ShardState) -> list[dist.ProcessGroup]:
    groups = real_groups(state.ranks.groups)
    if state.world_size > 1 and not groups:
        raise ValueError("an emulated model has only one rank's shards: there is nothing to save")
    if not groups:
        return []
    ranks = sorted(gather_objects(groups, [dist.get_rank()], state.device))
    group = new_group(ranks, "zerocore_saves", backend="gloo")
    watch_group(group.group_name, beside=groups[0].group_name)
    return [group]
