"""How a model is sharded: frozen dataclasses, validated when built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from zerocore._C import ShardOptions
from zerocore.common.checks import require_int
from zerocore.options.offload import Offload, place_of
from zerocore.options.precision import MixedPrecision, check_mixed
from zerocore.options.stages import STAGES, Placements, placements_of

ACCUMULATE_MODES = ("sharded", "full")


@dataclass(frozen=True)
class Communication:
    """When and how ranks communicate in a step; for :func:`zerocore.shard` and ``plan``.

    Attributes:
        prefetch: units gathered ahead of the one that computes, at stage 3.
        reductions_in_flight: units whose gradients are reduced at a time while the backward goes
            on, at stages 2 and 3; each holds a unit's full gradients in the pool until it is done.
        accumulate: ``"sharded"`` reduces gradients in every backward (stages 2 and 3, also under
            ``no_sync``); ``"full"`` holds full gradients under ``no_sync`` and communicates once.
        regather: at stage 3, ranks with fast links between them, such as those of a node: a process
            group or 1-D DeviceMesh of a part of ``group``, or how many that follow each other. The
            first gather after a change of the weights comes from all ranks; each of these k then
            keeps a k-th of the unit (in memory beside its shard), and all later gathers, in the
            backward, in further micro-batches and in evaluation, come from these k alone (hpZ of
            ZeRO++, https://arxiv.org/abs/2306.10209; ``reshard_after_forward=k`` of FSDP2).
        replicas_share: with a 2-D mesh at stages 1 to 3, ``"optimizer"`` shards the optimizer's
            states over the replicas, too (HFSDP; ``outer_dp_sharding_strategy="optim"`` of
            Megatron-FSDP). Gradients are reduce-scattered over the replicas in place of the
            all-reduce, each rank updates its part of its replica's shard, and the first gather
            after a step brings the updated parts together. Parameters are gathered within a
            replica otherwise, from a copy of its shard beside the rank's own part.
        overlap_reductions: at stage 3, reductions have a communicator of their own where one runs
            its collectives one after the other (NCCL), so that none waits for a gather. It takes
            device memory of its own; off, reductions and gathers share one.
        retain_last: at stage 3, the unit that a forward leaves last stays gathered for its
            backward, which needs it first; off, it is gathered again, and the loss is computed
            without its full parameters in memory.
        static_graph: a promise: in each pass all ranks call the same units and use the same
            parameters, and none raises alone. Ranks then exchange no control messages once they
            have agreed on a pass; a rank that breaks the promise gets the error of the alarm.
        gradient_divide_factor: of the sum of the ranks' gradients; None averages them, 1 sums.
        sync_buffers: buffers take rank 0's values, in one broadcast, before the calls before which
            DistributedDataParallel sends them: the first one, and one behind a call that recorded
            gradients outside of ``no_sync``. Names in the model's
            ``_ddp_params_and_buffers_to_ignore`` are left out, and a model without buffers sends
            nothing. Off, each rank keeps its own (``broadcast_buffers=False``).
        registered: the group's backend allocates the bucket pool's arena, parameters and kept
            gradients and registers them with its communicator, so that collectives copy less (NCCL
            on GPUs with multicast; other backends offer none). At stage 3 reductions need
            ``overlap_reductions=False`` for it. NCCL's pool keeps what ``parked`` frees.

    Raises:
        ValueError: an option is out of range.
        TypeError: ``prefetch`` or ``reductions_in_flight`` is no int.
    """

    prefetch: int = 1
    reductions_in_flight: int = 1
    accumulate: str = "sharded"
    regather: Any = None
    replicas_share: str | None = None
    overlap_reductions: bool = True
    retain_last: bool = True
    static_graph: bool = False
    gradient_divide_factor: float | None = None
    sync_buffers: bool = True
    registered: bool = False

    @property
    def num_near(self) -> int:
        """Ranks of ``regather``; 1 where all gathers come from all ranks."""
        near = self.regather
        return 1 if near is None else near.size() if hasattr(near, "size") else near

    def __post_init__(self) -> None:
        if require_int("prefetch", self.prefetch) < 0:
            raise ValueError(f"prefetch must be 0 or more, got {self.prefetch}")
        if require_int("reductions_in_flight", self.reductions_in_flight) < 1:
            raise ValueError(
                f"reductions_in_flight must be 1 or more, got {self.reductions_in_flight}"
            )
        if self.accumulate not in ACCUMULATE_MODES:
            raise ValueError(
                f"accumulate must be one of {ACCUMULATE_MODES}, got {self.accumulate!r}"
            )
        if self.replicas_share not in (None, "optimizer"):
            raise ValueError(
                f"replicas_share must be None or 'optimizer', got {self.replicas_share!r}"
            )
        factor = self.gradient_divide_factor
        if factor is not None and not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"gradient_divide_factor must be positive or None, got {factor!r}")


def shard_options(
    stage: int,
    communication: Communication,
    offload: Offload | None,
    by_rows: bool,
    sums_in_order: bool,
) -> ShardOptions:
    """The options that an engine and its plan share."""
    return ShardOptions(
        stage=stage,
        prefetch=communication.prefetch,
        reductions=communication.reductions_in_flight,
        hold_full=communication.accumulate == "full",
        by_rows=by_rows,
        shard_across=communication.replicas_share is not None,
        retain_last=communication.retain_last,
        sums_in_order=sums_in_order,
        states=place_of(offload, "states"),
        gradients=place_of(offload, "gradients"),
        parameters=place_of(offload, "parameters"),
    )


@dataclass(frozen=True)
class ShardConfig:
    """Options of :func:`zerocore.shard`, which explains them; raises ValueError for one that is out
    of range, TypeError for one of the wrong type."""

    stage: int = 3
    communication: Communication = field(default_factory=Communication)
    sync_params: bool = True
    mixed_precision: MixedPrecision | None = None
    offload: Offload | None = None
    has_wire_dtype: bool = False  # zerocore.fsdp has a policy with a ``wire_dtype``

    @property
    def sums_in_order(self) -> bool:
        """Whether ranks sum gradients themselves, in their order."""
        mixed = self.mixed_precision
        return self.has_wire_dtype or (mixed is not None and mixed.sums_in_order)

    @property
    def placements(self) -> Placements:
        """The state that ranks share between them."""
        return placements_of(self.stage)

    def leaves(self, part: str) -> bool:
        """Whether a part of the state, named as in :class:`Offload`, leaves the device."""
        return self.place_of(part) != "device"

    def place_of(self, part: str) -> str:
        """``"device"``, ``"cpu"`` or ``"disk"``: where a part of the state is."""
        return place_of(self.offload, part)

    def _check_gather(self, dtype: torch.dtype) -> None:
        shares, where = self.communication.replicas_share, self.place_of("parameters")
        for other, given in (
            (f"stage={self.stage}", not self.placements.parameters),
            (f"replicas_share={shares!r}", shares is not None),
            (f"parameters on {where}", where != "device"),
        ):
            if given:
                raise ValueError(
                    f"gather_dtype={dtype} with {other} is not built; it is for stage=3 with "
                    "parameters on the device"
                )

    def __post_init__(self) -> None:
        if not isinstance(self.communication, Communication):
            raise TypeError(
                f"communication must be a zerocore.Communication, got {self.communication!r}"
            )
        check_mixed(self.mixed_precision)
        if require_int("stage", self.stage) not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {self.stage}")
        mixed = self.mixed_precision
        if mixed is not None and mixed.gather_dtype is not None:
            self._check_gather(mixed.gather_dtype)
        if self.offload is not None:
            if not isinstance(self.offload, Offload):
                raise TypeError(f"offload must be a zerocore.Offload, got {self.offload!r}")
            self.offload.check_stage(self.stage)
