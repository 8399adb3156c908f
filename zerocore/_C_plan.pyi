"""Types of the C++ plan; at run time they are in ``zerocore._C``."""

from collections.abc import Sequence

class ElementType:
    """A dtype as a number, which the plan only compares, and an element's bytes."""

    def __init__(self, dtype: int, itemsize: int) -> None: ...

class ParamSpec:
    """A parameter as the planner sees it.

    ``main``, ``reduce`` and ``grad`` are the types of the main weight, of gradients in a reduction
    and of kept gradients; by default the parameter's own. Gathers move numbers of ``gather``, a
    type of one byte, with their scales.
    """

    def __init__(
        self,
        fqn: str,
        shape: Sequence[int],
        dtype: int,
        itemsize: int,
        requires_grad: bool = True,
        main: ElementType = ...,
        reduce: ElementType = ...,
        grad: ElementType = ...,
        gather: ElementType = ...,
    ) -> None: ...
    fqn: str
    shape: list[int]
    requires_grad: bool
    numel: int

class Region:
    """Part of a unit's buffer that one collective moves."""

    dtype: int
    itemsize: int
    requires_grad: bool
    is_gathered: bool
    is_encoded: bool
    shard_numel: int
    num_across: int
    params: list[int]
    numel: int
    nbytes: int
    shard_nbytes: int

class ParamPlace:
    """Offset and size of a parameter in its region, in elements."""

    region: int
    offset: int
    numel: int

class Range:
    """The half-open range of elements [``begin``, ``end``)."""

    def __init__(self, begin: int, end: int) -> None: ...
    begin: int
    end: int

class Layout:
    """Where a unit's parameters lie, and which elements each shard owns."""

    @staticmethod
    def build(params: Sequence[ParamSpec], num_shards: int, by_rows: bool = False) -> Layout: ...
    def of_shard(self, shard: int) -> Layout: ...
    regions: list[Region]
    places: list[ParamPlace]
    num_shards: int
    by_rows: bool
    copies_out: bool
    received_nbytes: int  # bytes that a gather receives and copies out; 0 if it copies nothing
    nbytes: int
    shard_nbytes: int
    param_nbytes: int
    def owned(self, param: int, shard: int) -> Range: ...
    def offset_in_shard(self, param: int, shard: int) -> int: ...

class CallEvent:
    """A forward enters or leaves a unit."""

    def __init__(
        self, enter: bool, unit: int, needs_backward: bool = True, reads: bool = True
    ) -> None: ...
    enter: bool
    unit: int
    needs_backward: bool
    reads: bool

class ShardOptions:
    """Options that an engine and its plan share: stage, prefetch, sums, rows, tiers."""

    def __init__(
        self,
        *,
        stage: int,
        prefetch: int = 1,
        reductions: int = 1,
        hold_full: bool = False,
        by_rows: bool = False,
        shard_across: bool = False,
        retain_last: bool = True,
        sums_in_order: bool = False,
        states: str = "device",
        gradients: str = "device",
        parameters: str = "device",
    ) -> None: ...

class PlanOptions:
    """How the plan's model is sharded, seen from ``rank``, counted replica by replica.

    ``parts`` are further meshes: ranks that share the state, replicas, and this rank's shard.
    """

    def __init__(
        self,
        sharding: ShardOptions,
        *,
        world_size: int,
        backend: str = "nccl",
        micro_batches: int = 1,
        num_replicas: int = 1,
        num_near: int = 1,
        rank: int = 0,
        parts: Sequence[tuple[int, int, int]] = (),
        sums_on_host: bool = False,
        first_order: Sequence[CallEvent] = (),
        backward: Sequence[BackwardEvent] = (),
    ) -> None: ...

class UnitPlan:
    """A unit as the planner sees it; ``unused`` are indices of parameters without a gradient."""

    def __init__(
        self,
        params: Sequence[ParamSpec],
        unused: Sequence[int] = (),
        stays: bool = False,
        near: bool = True,
        mesh: int = 0,
    ) -> None: ...

class BackwardEvent:
    """A call's outputs get their gradient; or, if ``ready``, a unit has all its gradients.

    ``index`` is the call's exit in the order, or the unit.
    """

    def __init__(self, ready: bool, index: int) -> None: ...

class PlannedEvent:
    """An operation of a rank in a step.

    Attributes:
        op: ``all_gather``, ``gather_near``, ``reduce_scatter``, ``all_reduce``, ``gather_sums``,
            ``unshard``, ``reshard``, ``to_host`` or ``to_device``.
        unit: index of the unit.
        nbytes: bytes of the full bucket.
        pool_nbytes: bytes of the bucket pool in use right after.
        moment: when, counted by the forward's calls and mirrored in the backward; the last is the
            optimizer's step.
        axis: the ranks that communicate: ``state``, which share the state, ``replicas``, which
            hold the same shard, or ``near``, which gather again from each other.
        num_ranks: how many ranks communicate.
    """

    op: str
    unit: int
    nbytes: int
    pool_nbytes: int
    moment: int
    axis: str
    num_ranks: int

class HostBytes:
    """Predicted bytes of one rank on the host, and in its file."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    disk: int
    total: int

class MemoryPlan:
    """Predicted bytes on one rank."""

    parameters: int
    main_weights: int
    gradients: int
    optimizer: int
    pool: int
    pool_reserved: int
    host: HostBytes
    total: int

def plan_layouts(units: Sequence[UnitPlan], options: PlanOptions) -> list[Layout]: ...
def plan_events(
    units: Sequence[UnitPlan], order: Sequence[CallEvent], options: PlanOptions
) -> list[PlannedEvent]: ...
def plan_memory(
    units: Sequence[UnitPlan],
    order: Sequence[CallEvent],
    options: PlanOptions,
    *,
    optimizer_states: int,
) -> MemoryPlan: ...
