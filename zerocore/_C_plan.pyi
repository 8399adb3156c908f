"""Types of the C++ plan layer, all of them in ``zerocore._C``; nothing to import at run time."""

from collections.abc import Sequence

class ElementType:
    """A dtype as a number, which the plan only compares, and the bytes of an element."""

    def __init__(self, dtype: int, itemsize: int) -> None: ...

class ParamSpec:
    """A parameter as the planner sees it.

    ``main``, ``reduce`` and ``grad`` are the types of the optimizer's copy, of gradients on their
    way and of gradients as they are kept; None for the parameter's own. Gathers move numbers of
    ``gather``, of one byte, with their scales.
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
    """Elements from `begin` up to, and without, `end`."""

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
    received_nbytes: int  # of what a gather copies out; 0 for nothing
    nbytes: int
    shard_nbytes: int
    param_nbytes: int
    def owned(self, param: int, shard: int) -> Range: ...
    def offset_in_shard(self, param: int, shard: int) -> int: ...

class CallEvent:
    """A unit entered or left in a forward."""

    def __init__(
        self, enter: bool, unit: int, needs_backward: bool = True, reads: bool = True
    ) -> None: ...
    enter: bool
    unit: int
    needs_backward: bool
    reads: bool

class ShardOptions:
    """The options that an engine and its plan share: stage, gathers ahead, sums, rows, memories."""

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

    ``parts``: further meshes, as the ranks that share the state, replicas, and the rank's shard.
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
    """A call's outputs get their gradient, or, if ``ready``, all gradients of a unit exist.

    ``index`` is that of the call's exit in the order, or of the unit.
    """

    def __init__(self, ready: bool, index: int) -> None: ...

class PlannedEvent:
    """One thing that a rank does in a step.

    Attributes:
        op: ``all_gather``, ``gather_near``, ``reduce_scatter``, ``all_reduce``, ``gather_sums``,
            ``unshard`` or ``reshard``.
        unit: index of the unit.
        nbytes: bytes of the full bucket.
        pool_nbytes: bytes of the bucket pool in use right after.
        moment: when, counted by the calls of the forward; one after the backward's end is at the
            optimizer's step.
        axis: among which ranks: ``state``, those that share the state, ``replicas``, those that
            hold the same shard, or ``near``, those that gather again from each other.
        num_ranks: how many these are.
    """

    op: str
    unit: int
    nbytes: int
    pool_nbytes: int
    moment: int
    axis: str
    num_ranks: int

class HostBytes:
    """Predicted bytes on the host for one rank, and in its file."""

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
