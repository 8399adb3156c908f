"""Types of ``_C_testing``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zerocore._C import CallEvent, Layout, PoolStats, Range, ShardOptions

def crc32_by_tables(data: np.ndarray, crc: int = 0) -> int: ...

class SegmentChunk:
    """The elements that one block of a kernel works on."""

    segment: int
    elements: Range

class VectorSplit:
    """How a run of elements is cut for wide accesses: single ones, vectors, single ones."""

    head: int
    num_vectors: int

def kernel_chunks(numels: Sequence[int], chunk_numel: int) -> list[SegmentChunk]: ...
def kernel_run_chunks(numel: int, run: int, chunk_numel: int) -> list[SegmentChunk]: ...

_Runs = tuple[int, int, int, int]

def wire_runs(layout: Layout, region: int) -> tuple[list[_Runs], list[_Runs]]: ...
def kernel_vector_split(
    dst: int, dst_itemsize: int, src: int, src_itemsize: int, numel: int
) -> VectorSplit: ...

class Slot:
    """A block of pool memory."""

    nbytes: int
    address: int

class CpuBucketPool:
    """A bucket pool on the CPU, for tests."""

    def acquire(self, unit: int, nbytes: int) -> Slot: ...
    def set_apart(self, apart: bool) -> None: ...
    def release(self, slot: Slot) -> None: ...
    def forget_recent_peak(self) -> None: ...
    stats: PoolStats

class PassCall:
    unit: int
    made: bool

class CallHandle:
    """One forward call of a unit."""

    unit: int

class Action:
    """A change of a unit: "unshard", "reshard" or "reduce"."""

    kind: str
    unit: int

class ScheduledExit:
    """The call that ended, and what follows."""

    call: CallHandle
    actions: list[Action]

class Schedule:
    """When units are unsharded, resharded and reduced; methods return the actions."""

    def __init__(
        self, num_units: int, prefetch: int, gathers: bool, releases: bool, order: list[CallEvent]
    ) -> None: ...
    def begin_pass(self, grad: bool) -> list[Action]: ...
    def enter(self, unit: int, grad: bool = True) -> list[Action]: ...
    def exit(self, unit: int, needs_backward: bool = True, reads: bool = True) -> ScheduledExit: ...
    def end_pass(self) -> list[Action]: ...
    def is_expected(self, unit: int) -> bool: ...
    def finish_order(self) -> list[Action]: ...
    def serve(self, unit: int) -> list[Action]: ...
    def close_pass(self) -> list[Action]: ...
    def changed(self) -> bool: ...
    def calls(self) -> list[PassCall]: ...
    def settle_pass(self, ranks: list[list[PassCall]], own: int) -> None: ...
    def abort(self) -> list[Action]: ...
    def begin_backward(self) -> None: ...
    def set_muted(self, unit: int, muted: bool) -> None: ...
    def pre_backward(self, call: CallHandle) -> list[Action]: ...
    def ready(self, unit: int) -> list[Action]: ...
    def end_backward(self) -> list[Action]: ...
    def invalidate(self, unit: int) -> list[Action]: ...
    def is_resident(self, unit: int) -> bool: ...
    order: list[CallEvent]

class GradStep:
    """One step of a region's reduction; which fields mean something depends on the kind."""

    kind: str
    unit: int
    region: int
    source: str
    target: str
    nbytes: int
    parts: int
    adds: bool
    param: int
    op: str
    scale: str
    axis: str
    last_use: str
    added: list[Range]

class ReductionOptions:
    """How gradients are reduced."""

    def __init__(
        self,
        sharding: ShardOptions,
        *,
        world_size: int,
        num_replicas: int = 1,
        backend: str = "nccl",
        on_host: bool = False,
        rank: int = 0,
    ) -> None: ...

class Reduction:
    """Where gradients are packed, added and reduced; methods return the steps."""

    def __init__(self, options: ReductionOptions, layouts: Sequence[Layout]) -> None: ...
    def reduce(self, unit: int, sync: bool = True) -> list[GradStep]: ...
    def finish(self) -> list[GradStep]: ...
    def reset(self) -> list[GradStep]: ...
    def set_trainable(self, unit: int, region: int, trainable: bool) -> None: ...
    def drop(self, unit: int, param: int) -> None: ...
    def is_valid(self, unit: int, param: int) -> bool: ...
    def kept_nbytes(self, unit: int) -> int: ...

class SwapStep:
    """A transfer that begins ("read", "write") between a buffer and a file, or its "await"."""

    kind: str
    unit: int
    buffer: int

class SwapRing:
    """Which units are in which buffers; methods return the steps."""

    def __init__(self, unit_nbytes: Sequence[int], num_buffers: int, alignment: int) -> None: ...
    file_nbytes: int
    buffer_nbytes: int
    num_buffers: int
    def range(self, unit: int) -> Range: ...
    def expect(self, order: Sequence[int]) -> list[SwapStep]: ...
    def acquire(self, unit: int) -> tuple[int, list[SwapStep]]: ...
    def release(self, unit: int, changed: bool) -> list[SwapStep]: ...
    def finish(self) -> list[SwapStep]: ...

class MessageKind:
    Pass: MessageKind
    AnyFlags: MessageKind
    Calls: MessageKind
    Different: MessageKind

class ControlMessage:
    def __init__(self, kind: MessageKind, words: Sequence[int]) -> None: ...
    @staticmethod
    def of_flags(flags: Sequence[bool]) -> ControlMessage: ...
    def flags(self, count: int) -> list[bool]: ...
    @property
    def kind(self) -> MessageKind: ...
    @property
    def words(self) -> list[int]: ...

class Dissemination:
    def __init__(self, rank: int, size: int, own: ControlMessage) -> None: ...
    @staticmethod
    def num_hops(size: int) -> int: ...
    @staticmethod
    def peers(rank: int, size: int) -> list[int]: ...
    @staticmethod
    def connections(rank: int, size: int) -> list[tuple[int, bool]]: ...
    def to(self, hop: int) -> int: ...
    def source(self, hop: int) -> int: ...
    def hop(self) -> int: ...
    def is_done(self) -> bool: ...
    def heard(self) -> ControlMessage: ...
    def hear(self, message: ControlMessage) -> None: ...

class KnownSequence:
    def advance(self, collective: int) -> bool: ...

def exchange(backend: Any, own: ControlMessage) -> ControlMessage: ...

class CountingStore:
    def __init__(self) -> None: ...
    num_requests: int
    num_bytes: int

class RollCall:
    def __init__(self, store: CountingStore, rank: int, size: int) -> None: ...
    def step(self, wants: bool, waiting: int, unit: str) -> str | None: ...
    def note_end(self, error: str) -> None: ...

class RankState:
    Silent: RankState
    Lives: RankState
    Ended: RankState

class RankReport:
    def __init__(
        self, model: int, waiting: int, next: int, state: RankState = ...
    ) -> None: ...

def is_deadlock(reports: list[RankReport]) -> bool: ...

DISK_ALIGNMENT: int
"""Offsets, sizes and addresses of requests to a disk file are multiples of it."""

class DiskFile:
    """A file without a name in a folder, of a fixed size, that memory is swapped to and from.

    ``read`` and ``write`` return a ticket, to ``wait`` for once; the tensor is to live until then.
    Raises OSError that names the file, the offset and the request's label; ValueError for requests
    that are not aligned.
    """

    def __init__(self, folder: str, name: str, nbytes: int) -> None: ...
    def read(self, offset: int, tensor: Tensor, label: str) -> int: ...
    def write(self, offset: int, tensor: Tensor, label: str) -> int: ...
    def wait(self, ticket: int) -> None: ...
    nbytes: int
    path: str
    is_direct: bool
    descriptor: int

class SwappedUnits:
    """Units in a file, of which some are in memory; zeros at first.

    ``acquire`` gives the first elements of a unit as a 1-D tensor, good until ``release``. Raises
    OSError when the disk fails, which names file and unit, and again in every call afterwards.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        unit_names: Sequence[str],
        unit_nbytes: Sequence[int],
        num_buffers: int = 3,
    ) -> None: ...
    def expect(self, order: Sequence[int]) -> None: ...
    def acquire(self, unit: int, numel: int, dtype: torch.dtype) -> Tensor: ...
    def release(self, unit: int, changed: bool) -> None: ...
    def finish(self) -> None: ...
    file_nbytes: int
    descriptor: int
