"""Types of the C++ runtime; shapes and errors are said where the Python face uses it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend

build: str  # the compiler, and the torch that it was built against

class ParamSpec:
    """A parameter as the planner sees it.

    ``main``, ``reduce`` and ``grad`` are ``(dtype, itemsize)`` of the optimizer's copy, of
    gradients on their way and of gradients as they are kept; None for the parameter's own.
    """

    def __init__(
        self,
        fqn: str,
        shape: Sequence[int],
        dtype: int,
        itemsize: int,
        requires_grad: bool = True,
        main: tuple[int, int] | None = None,
        reduce: tuple[int, int] | None = None,
        grad: tuple[int, int] | None = None,
    ) -> None: ...
    @property
    def fqn(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def numel(self) -> int: ...

class Region:
    """Part of a unit's buffer that one collective moves."""

    dtype: int
    itemsize: int
    requires_grad: bool
    shard_numel: int
    params: list[int]
    @property
    def numel(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shard_nbytes(self) -> int: ...

class ParamPlace:
    """Offset and size of a parameter in its region, in elements."""

    region: int
    offset: int
    numel: int

class Layout:
    """Where a unit's parameters lie, and which elements each shard owns."""

    @staticmethod
    def build(params: Sequence[ParamSpec], num_shards: int) -> Layout: ...
    def of_shard(self, shard: int) -> Layout: ...
    @property
    def regions(self) -> list[Region]: ...
    @property
    def places(self) -> list[ParamPlace]: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shard_nbytes(self) -> int: ...
    @property
    def param_nbytes(self) -> int: ...
    def owned(self, param: int, shard: int) -> tuple[int, int]: ...
    def offset_in_shard(self, param: int, shard: int) -> int: ...

class CallEvent:
    """A unit entered or left in a forward."""

    def __init__(self, enter: bool, unit: int, needs_backward: bool = True) -> None: ...
    @property
    def enter(self) -> bool: ...
    @property
    def unit(self) -> int: ...
    @property
    def needs_backward(self) -> bool: ...

class CallHandle:
    """One forward call of a unit."""

    @property
    def unit(self) -> int: ...

_Actions = list[tuple[str, int]]

class Schedule:
    """When units are unsharded, resharded and reduced; methods return the actions."""

    def __init__(
        self, num_units: int, prefetch: int, gathers: bool, releases: bool, order: list[CallEvent]
    ) -> None: ...
    def begin_pass(self, grad: bool) -> _Actions: ...
    def enter(self, unit: int, grad: bool = True) -> _Actions: ...
    def exit(self, unit: int, needs_backward: bool = True) -> tuple[CallHandle, _Actions]: ...
    def end_pass(self) -> _Actions: ...
    def abort(self) -> _Actions: ...
    def begin_backward(self) -> None: ...
    def pre_backward(self, call: CallHandle) -> _Actions: ...
    def ready(self, unit: int) -> _Actions: ...
    def end_backward(self) -> _Actions: ...
    def invalidate(self, unit: int) -> _Actions: ...
    def is_resident(self, unit: int) -> bool: ...
    @property
    def order(self) -> list[CallEvent]: ...

class PlanOptions:
    """How the plan's model is sharded."""

    def __init__(
        self,
        *,
        stage: int,
        world_size: int,
        prefetch: int,
        exchanges: bool,
        num_replicas: int = 1,
        first_order: Sequence[CallEvent] = (),
        backward: Sequence[tuple[bool, int]] = (),
    ) -> None: ...
    @property
    def stage(self) -> int: ...
    @property
    def world_size(self) -> int: ...

class MemoryPlan:
    """Predicted bytes on one rank."""

    parameters: int
    main_weights: int
    gradients: int
    optimizer: int
    pool: int
    pool_reserved: int
    @property
    def total(self) -> int: ...

def plan_layouts(units: Sequence[Sequence[ParamSpec]], options: PlanOptions) -> list[Layout]: ...
def plan_events(
    units: Sequence[Sequence[ParamSpec]], order: Sequence[CallEvent], options: PlanOptions
) -> list[tuple[str, int, int, int, int]]: ...
def plan_memory(
    units: Sequence[Sequence[ParamSpec]],
    order: Sequence[CallEvent],
    options: PlanOptions,
    *,
    rank: int,
    optimizer_states: int,
    unused: Sequence[Sequence[int]] = (),
) -> MemoryPlan: ...

CHUNK_NUMEL: int
"""Elements that a block of a kernel works on."""
HAS_CUDA_KERNELS: bool
"""Whether this build has the kernels for CUDA devices."""

def kernel_chunks(numels: Sequence[int]) -> list[tuple[int, int, int]]: ...
def kernel_vector_split(
    dst: int, dst_itemsize: int, src: int, src_itemsize: int, numel: int
) -> tuple[int, int]: ...

class PoolStats:
    """Figures of a bucket pool, bytes."""

    in_use_nbytes: int
    peak_nbytes: int
    reserved_nbytes: int
    num_allocations: int

class Slot:
    """A block of pool memory."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...

class CpuBucketPool:
    """A bucket pool on the CPU, for tests."""

    def acquire(self, nbytes: int) -> Slot: ...
    def release(self, slot: Slot) -> None: ...
    @property
    def stats(self) -> PoolStats: ...

class Traffic:
    """What kind of collective; decides how many of its bytes cross the link."""

    ALL_GATHER: Traffic
    REDUCE_SCATTER: Traffic
    ALL_REDUCE: Traffic
    ALL_TO_ALL: Traffic
    GATHER: Traffic
    SCATTER: Traffic
    BROADCAST: Traffic
    REDUCE: Traffic
    BARRIER: Traffic

class LinkModel:
    """An emulated link: bytes per second, seconds per call, multiprocessors."""

    def __init__(self, bandwidth: float, latency: float, sms: int) -> None: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def latency(self) -> float: ...
    @property
    def sms(self) -> int: ...
    def duration_ns(self, traffic: Traffic, nbytes: int, world_size: int) -> int: ...

class EmulatedGroup(Backend):
    """A c10d backend on an emulated link; `timeout` in seconds."""

    link: LinkModel
    def __init__(self, rank: int, size: int, link: LinkModel, timeout: float) -> None: ...
    def shutdown(self) -> None: ...
    @staticmethod
    def shut_down_all() -> None: ...

# fqn, model weight on meta, dtypes of main weight, reduction, gradient; frozen and cast
_ParamArg = tuple[str, Tensor, torch.dtype, torch.dtype, torch.dtype, bool]

class Engine:
    """The runtime of one sharded model."""

    sync: bool
    def __init__(
        self,
        *,
        stage: int,
        prefetch: int,
        hold_full: bool,
        exchange_used: bool,
        log_hand_overs: bool = False,
        group_name: str | None,
        replicas_name: str | None = None,
        device: torch.device,
        units: Sequence[tuple[str, Sequence[_ParamArg]]],
        order: Sequence[CallEvent],
    ) -> None: ...
    def make_full(self, unit: int, param: int) -> Tensor: ...
    def make_shard(self, unit: int, param: int) -> Tensor: ...
    def make_model_shard(self, unit: int, param: int) -> Tensor | None: ...
    def make_grad(self, unit: int, param: int) -> Tensor: ...
    def spec(self, unit: int, param: int) -> ParamSpec: ...
    def materialize(self, unit: int, full: Sequence[Tensor | None], broadcast: bool) -> None: ...
    def full_values(self, unit: int) -> list[Tensor]: ...
    def bind(
        self,
        unit: int,
        param: int,
        full: Tensor,
        shard: Tensor,
        grad: Tensor | None,
        owners: Sequence[tuple[dict[str, Any], str]],
    ) -> None: ...
    def start(self, consistent: bool) -> None: ...
    def begin_pass(self) -> None: ...
    def end_pass(self, outputs: Any) -> None: ...
    def fail_pass(self) -> None: ...
    def enter(self, unit: int) -> None: ...
    def exit(self, unit: int, outputs: Any) -> None: ...
    def pin(self, units: Sequence[int]) -> None: ...
    def unpin(self, units: Sequence[int], write_back: bool) -> None: ...
    def mark_updated(self, unit: int) -> None: ...
    def begin_update(self, unit: int) -> None: ...
    def end_update(self, unit: int) -> None: ...
    def reset(self) -> None: ...
    def layout(self, unit: int) -> Layout: ...
    @property
    def order(self) -> list[CallEvent]: ...
    @property
    def pool_stats(self) -> PoolStats: ...
    @property
    def parameter_nbytes(self) -> int: ...
    @property
    def main_nbytes(self) -> int: ...
    @property
    def gradient_nbytes(self) -> int: ...
    def start_trace(self, align: bool = True) -> None: ...
    def pause_trace(self) -> None: ...
    def stop_trace(self) -> list[tuple[str, int, int, int, int, int, int]]: ...
    @property
    def counters(self) -> list[tuple[str, int, int]]: ...
