"""Types of the C++ runtime; the Python functions that call it document shapes and errors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend

from zerocore._C_io import *  # noqa: F403
from zerocore._C_io import HostMemory
from zerocore._C_plan import *  # noqa: F403
from zerocore._C_plan import CallEvent, HostBytes, Layout, ParamSpec, ShardOptions

build: str  # the compiler, torch's version, whether CUDA code was built, and flags

CHUNK_NUMEL: int
"""Elements of a chunk, which one block of a CUDA kernel works on."""
HAS_CUDA_KERNELS: bool
"""Whether this build has the kernels for CUDA devices."""

class RegisteredStats:
    """Memory that a group's backend has registered: whether it offers that, and how many bytes."""

    backend: str
    is_offered: bool
    num_windows: int
    nbytes: int

class PoolStats:
    """Figures of a bucket pool; sizes are in bytes."""

    in_use_nbytes: int
    peak_nbytes: int
    recent_peak_nbytes: int
    reserved_nbytes: int
    peak_reserved_nbytes: int
    num_allocations: int

class AllocatorCounts:
    """How often torch's allocator has called a device's own allocator in this process."""

    num_retries: int
    num_device_allocations: int

def note_end(how: str) -> None: ...
def connect_control(group: str) -> None: ...
def watch_group(group: str, *, beside: str) -> None: ...
def check_not_capturing(device: torch.device, what: str) -> None: ...

class Waiting:
    def __init__(self, what: str, key: str, group: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

def allocator_counts(device: str) -> AllocatorCounts | None: ...

class Traffic:
    """The kind of a collective, which decides how many of its bytes cross the link."""

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
    bandwidth: float
    latency: float
    sms: int
    def duration_ns(self, traffic: Traffic, nbytes: int, world_size: int) -> int: ...

class EmulatedGroup(Backend):
    """A c10d backend on an emulated link; `timeout` in seconds."""

    link: LinkModel
    def __init__(self, rank: int, size: int, link: LinkModel, timeout: float) -> None: ...
    def beside(self) -> EmulatedGroup:
        """Returns another communicator of the same ranks, over the same link."""
    def shutdown(self) -> None: ...
    @staticmethod
    def waited_ns() -> int: ...
    @staticmethod
    def shut_down_all() -> None: ...

def define_grad(type: type) -> None: ...
def counted(tensor: Tensor) -> Tensor: ...  # see csrc/engine/unit/unit_param.h
def counted_view(leaf: Tensor, view: Tensor) -> Tensor: ...
def count_as_data(tensor: Tensor, alias: Tensor) -> None: ...
def count_view_as_data(view: Tensor, alias: Tensor) -> None: ...
def take_node_hooks(from_: Tensor, to: Tensor) -> object:
    """Moves hooks from the node that accumulates one leaf's gradient to the node of another leaf.
    The returned object keeps the latter alive."""

def exchange_impls(first: Tensor, second: Tensor) -> None:
    """Exchanges the tensors of two objects; their classes and attributes stay."""

def show_grad(param: Tensor, grad: Tensor) -> None: ...
def window_on(memory: Tensor) -> Tensor: ...
def move_window(window: Tensor, memory: Tensor) -> None: ...
def free_memory(tensor: Tensor, message: str) -> None:
    """Frees a tensor's storage. From torch 2.13 on reading it raises ``message``."""

def take_memory(tensor: Tensor) -> None:
    """Gives a tensor's freed storage memory again, not initialised."""

def same_objects(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    """Returns whether two dicts, and the dicts in them, have the same objects in order."""

def replace_in_modules(replaced: list[tuple[Any, Any]]) -> None:
    """Replaces the first object of each pair by the second, wherever a module has it."""

def ask_before_typed(
    types: Iterable[type], ask: Callable[[type, tuple[Any, ...]], Tensor | None]
) -> None:
    """Makes ``types``, such as ``torch.FloatTensor``, call ``ask`` before they make a tensor."""

def note_backward_call(roots: Any) -> None: ...
def forget_backward_call() -> None: ...

class GroupNames:
    """Names of a mesh's c10d groups: ranks to shard over, replicas, and near ranks.

    ``reductions``: a second group of the ranks of ``shard``, for reductions; None for ``shard``.
    ``first_rank``: the number of the mesh's first rank in the default group.
    """

    def __init__(
        self,
        *,
        shard: str | None,
        replicas: str | None,
        near: str | None,
        reductions: str | None = None,
        first_rank: int = 0,
    ) -> None: ...

class EngineOptions:
    """How an engine shards, over which groups, and how long it waits for other ranks.

    The first of ``meshes`` has all ranks of the model; ``control`` is a group of them on the CPU.
    """

    def __init__(
        self,
        *,
        sharding: ShardOptions,
        meshes: Sequence[GroupNames],
        control: str | None,
        log_hand_overs: bool = False,
        static_graph: bool = False,
        registered: bool = False,
        alarm_name: str = "",
        stall_seconds: float | None = 0.0,
        host_threads: int = 1,
    ) -> None: ...

class UnitParam:
    """A parameter to be sharded.

    ``like`` is the model weight as a meta tensor. ``main``, ``reduce`` and ``grad`` are the dtypes
    of the main weight, of gradients in a reduction and of kept gradients. A frozen parameter that
    is cast ``lacks_main``. Gathers move numbers of dtype ``gather`` with their scales. For a
    parameter that is not ``is_gathered`` the unit has the gradient and, if ``is_kept``, the main
    weight.
    """

    def __init__(
        self,
        fqn: str,
        like: Tensor,
        *,
        main: torch.dtype,
        reduce: torch.dtype,
        grad: torch.dtype,
        lacks_main: bool,
        is_gathered: bool = True,
        is_kept: bool = True,
        gather: torch.dtype | None = None,
    ) -> None: ...

class UnitSpec:
    """A unit to be sharded."""

    def __init__(
        self,
        name: str,
        params: Sequence[UnitParam],
        stays: bool = False,
        near: bool = True,
        mesh: int = 0,
    ) -> None: ...

class UpdatedUnit:
    """A unit that an optimizer updates, and which of its parameters; None for all trained."""

    def __init__(self, unit: int, params: Sequence[int] | None = None) -> None: ...

class TraceRecord:
    """An operation of the runtime; :class:`zerocore.reporting.events.Event` explains the fields."""

    op: str
    unit: int
    nbytes: int
    pool_nbytes: int
    issued_ns: int
    done_ns: int
    wait_ns: int

class HostUpdate:
    """A step of AdamW for parameters of one unit, whose states are on the host.

    ``casts`` are pairs of tensors: the first is written after the step, from the second.
    """

    def __init__(
        self,
        unit: int,
        params: Sequence[int],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        model_weights: Sequence[Tensor],
        casts: Sequence[tuple[Tensor, Tensor]],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...

class UnitSettings:
    """Settings of an engine's unit; an assignment holds from then on.

    Attributes:
        gradient_scale: factor of the sum of the ranks' gradients.
        syncs: whether a backward reduces gradients.
        gather, reduce: the program's own collectives over the ranks that share the state.
        after_reduce: is called with each reduced gradient before it is added to the kept one.
    """

    gradient_scale: float
    syncs: bool
    gather: Callable[[Tensor, Tensor], Any] | None
    reduce: Callable[[Tensor, Tensor], Any] | None
    after_reduce: Callable[[Tensor], None] | None

class OpCounter:
    """How often an operation ran, and the bytes of its buckets."""

    count: int
    nbytes: int

def set_device_timer(timer: Any) -> None:
    """Lends the emulated link a ``DeviceTimer`` (``emulation/device_timer.h``) in a capsule."""

def set_device_loops(loops: Any) -> None:
    """Lends ``Loops`` (``kernels/loops.h``) of a device that was added to torch, in a capsule."""

def set_logged_compute_stream(stream: int) -> None:
    """Sets the compute stream's number in logs of hand-overs; it is 0 at first."""

class HandOver:
    """An access of a stream to memory, or an event that orders two streams.

    ``kind`` is ``read`` or ``write`` (of addresses ``begin`` to ``end``, for ``what`` and
    ``unit``), ``record`` or ``wait`` (for ``event``, a number, of stream ``source``).
    """

    kind: str
    stream: str
    source: str
    event: int
    begin: int
    end: int
    what: str
    unit: str

class Exchange:
    """An all-to-all under way; ``wait`` returns the received bytes, 1-D."""

    def wait(self) -> Tensor: ...

class Engine:
    """The runtime of one sharded model."""

    sync: bool
    def __init__(
        self,
        options: EngineOptions,
        *,
        device: torch.device,
        units: Sequence[UnitSpec],
        order: Sequence[CallEvent],
    ) -> None: ...
    def make_full(self, unit: int, param: int) -> Tensor: ...
    def make_shard(self, unit: int, param: int) -> Tensor: ...
    def make_model_shard(self, unit: int, param: int) -> Tensor | None: ...
    def make_grad(self, unit: int, param: int) -> Tensor: ...
    def bind_grad(self, unit: int, param: int, grad: Tensor) -> None: ...
    def make_sums(self, unit: int, param: int) -> Tensor: ...
    def bind_sums(self, unit: int, param: int, sums: Tensor) -> None: ...
    def has_sums(self, unit: int, param: int) -> bool: ...
    shows_sums: bool
    def spec(self, unit: int, param: int) -> ParamSpec: ...
    def materialize(self, unit: int, full: Sequence[Tensor | None], broadcast: bool) -> None: ...
    def full_values(self, unit: int) -> list[Tensor]: ...
    def follow(self, unit: int) -> None:
        """Lets the shards of whole parameters follow memory that programs have set as ``data``."""

    def holds_values(self, unit: int, param: int) -> bool: ...
    def bind(
        self,
        unit: int,
        param: int,
        full: Tensor,
        shard: Tensor,
        grad: Tensor | None,
        local: Tensor | None = None,
        is_seen: bool = True,
        is_whole: bool = False,
    ) -> None:
        """Binds a parameter's tensors. Programs hold ``shard``, unless it is not ``is_seen``; if it
        ``is_whole``, they hold ``full``."""

    def set_view(self, unit: int, param: int, show: Callable[[bool], None]) -> None:
        """Makes ``show(full)`` show the full parameter or the shard."""

    def unshard(self, unit: int) -> None: ...
    def reshard(self, unit: int) -> None: ...
    def show(self, unit: int) -> None: ...
    def set_staying(self, unit: int, *, after_forward: bool, after_backward: bool) -> None: ...
    def settings(self, unit: int) -> UnitSettings: ...
    def start(self, consistent: bool) -> None: ...
    def begin_pass(self) -> None: ...
    def end_pass(self, outputs: Any) -> None: ...
    def fail_pass(self) -> None: ...
    def enter(self, unit: int) -> None: ...
    def exit(self, unit: int, value: Any, keep: bool = False, reads: bool = True) -> None: ...
    def adopt(self, unit: int) -> None: ...
    in_call: bool
    def hold_unsharded(self, units: Sequence[int]) -> None: ...
    def release_unsharded(self, units: Sequence[int], write_back: bool) -> list[str]:
        """Returns the names of changed parameters that are not written back."""
    def set_hiding(self, hides: bool) -> None:
        """While set, modules show shards, also within calls."""

    def begin_hold(self, unit: int) -> None:
        """Begins to gather a unit for reads outside of calls, until ``release_unsharded``."""

    def wait_held(self, unit: int) -> None: ...
    def set_recycling(self, recycling: bool) -> None: ...
    def set_parked(self, parked: bool) -> None: ...
    def device_memory(self, unit: int) -> list[Tensor]: ...
    def take_memory(self, tensor: Tensor) -> None: ...
    def mark_forked(self) -> None: ...
    def check_process(self) -> None: ...
    def begin_update(self, units: Sequence[int], casts: bool) -> None: ...
    def end_update(self, units: Sequence[UpdatedUnit], casts: bool) -> bool: ...
    def finish_gathers(self) -> None: ...
    def is_updated_on_host(self, unit: int, param: int) -> bool: ...
    def update_on_host(self, update: HostUpdate) -> None: ...
    def send_weights(self, unit: int) -> None: ...
    def known_squares(self, unit: int, param: int) -> Tensor | None: ...
    def map_host_memory(self) -> None: ...
    def open_disk(self, folder: str, name: str) -> None: ...
    def make_moments(self, unit: int, param: int) -> list[Tensor]: ...
    def arrived_gradient(self, unit: int, param: int) -> Tensor: ...
    def synchronize(self) -> None: ...
    def fail_backward(self) -> None: ...
    in_backward_pass: bool

    def finalize_backward(self) -> None:
        """Reduces gradients that backwards without sync have held back. Collective."""

    defers_reductions: bool
    holds_back: bool
    """Whether gradients are yet to be reduced."""

    def begin_deferred(self) -> None:
        """Defers reductions, and keeps gathered units, until :meth:`end_deferred`."""

    def end_deferred(self, drops: bool) -> None: ...
    @property
    def takes_notes(self) -> bool:
        """Whether ranks compare writes to shards; not within an optimizer's step."""

    def note_write(self, unit: int, param: int, number: int) -> None:
        """Notes that a function wrote to a shard; ``number`` is a checksum of its arguments."""

    def any_rank(self, flags: Sequence[bool]) -> list[bool]: ...
    def exchange(
        self,
        mesh: int,
        across: bool,
        sent: Tensor,
        sent_nbytes: Sequence[int],
        received_nbytes: Sequence[int],
        total_nbytes: int,
    ) -> Exchange: ...
    def reset(self) -> None: ...
    def layout(self, unit: int) -> Layout: ...
    def releases(self, unit: int) -> bool: ...
    def shards_version(self, unit: int) -> int: ...
    def param_version(self, unit: int, param: int) -> int: ...
    order: list[CallEvent]
    pool_stats: PoolStats
    registered: RegisteredStats | None
    def forget_recent_peak(self) -> None: ...
    parameter_nbytes: int
    main_nbytes: int
    gradient_nbytes: int
    lands_gradients: bool
    host_bytes: HostBytes
    host_memory_nbytes: int
    host_memory: HostMemory | None
    def start_trace(self, align: bool = True) -> None: ...
    def pause_trace(self) -> None: ...
    def stop_trace(self) -> list[TraceRecord]: ...
    agreed: dict[str, int]
    counters: dict[str, OpCounter]
