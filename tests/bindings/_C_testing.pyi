"""Types of ``_C_testing``."""

from collections.abc import Sequence

import numpy as np

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

def kernel_chunks(numels: Sequence[int]) -> list[SegmentChunk]: ...
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
    def gather_ahead(self, unit: int) -> list[Action]: ...
    def drop_ahead(self, unit: int) -> list[Action]: ...
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
