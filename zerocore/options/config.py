"""The options for sharding a model: frozen dataclasses that validate themselves."""

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
        prefetch: the number of units gathered ahead of the one that computes, at stage 3.
        reductions_in_flight: at stages 2 and 3, the number of units whose gradients are reduced at
            a time in the backward. The pool keeps a unit's full gradients until its reduction ends.
        accumulate: ``"sharded"`` reduces gradients in every backward (stages 2 and 3, also under
            ``no_sync``); ``"full"`` holds full gradients under ``no_sync`` and communicates once.
        regather: at stage 3, ranks with fast links, such as the ranks of a node: a process group or
            1-D DeviceMesh of a part of ``group``, or a number k of consecutive ranks. The first
            gather after a change of the weights comes from all ranks. Each of the k ranks then
            keeps a k-th of the unit (in memory beside its shard), and all later gathers come from
            these k ranks: in the backward, in further micro-batches and in evaluation (hpZ of
            ZeRO++, https://arxiv.org/abs/2306.10209; ``reshard_after_forward=k`` of FSDP2).
        replicas_share: with a 2-D mesh at stages 1 to 3, ``"optimizer"`` shards the optimizer's
            states over the replicas, too (HFSDP; ``outer_dp_sharding_strategy="optim"`` of
            Megatron-FSDP). Gradients are reduce-scattered over the replicas instead of all-reduced.
            Each rank updates its part of its replica's shard; the first gather after a step
            collects the updated parts. Other gathers stay within a replica, and read a copy of its
            shard beside the rank's own part.
        overlap_reductions: at stage 3, reductions get their own communicator if a communicator
            runs its collectives in turn (NCCL), so that none waits for a gather. It takes device
            memory. If False, reductions and gathers share one communicator.
        retain_last: at stage 3, the last unit of a forward stays unsharded for its backward, which
            needs it first. If False, it is gathered again, and the loss is computed without its
            full parameters in memory.
        static_graph: a promise that in each pass all ranks call the same units and use the same
            parameters, and no rank raises alone. Ranks then exchange no control messages once they
            have agreed on a pass; a rank that breaks the promise gets the alarm's error.
        gradient_divide_factor: divides the sum of the ranks' gradients; None averages, 1 sums.
        sync_buffers: broadcast rank 0's buffers when DistributedDataParallel does: before the first
            call, and before each call that follows one with gradients outside ``no_sync``. Skips
            names in the model's ``_ddp_params_and_buffers_to_ignore``; a model without buffers
            sends nothing. If False, each rank keeps its own (``broadcast_buffers=False``).
        registered: the group's backend allocates the bucket pool's arena, parameters and kept
            gradients. It registers them with its communicator, so that collectives copy less (NCCL
            on GPUs with multicast; no other backend supports it). At stage 3, reductions need
            ``overlap_reductions=False`` for it. NCCL's pool keeps the memory that ``parked`` frees.

    Raises:
        ValueError: an option is out of range.
        TypeError: ``prefetch`` or ``reductions_in_flight`` is not an int.
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
        """The number of ``regather`` ranks; 1 if all gathers come from all ranks."""
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
    """Returns the options that an engine and its plan share."""
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
    """The options of :func:`zerocore.shard`, which explains them. Raises ValueError if one is out
    of range, TypeError if one has the wrong type."""

    stage: int = 3
    communication: Communication = field(default_factory=Communication)
    sync_params: bool = True
    mixed_precision: MixedPrecision | None = None
    offload: Offload | None = None
    has_wire_dtype: bool = False  # zerocore.fsdp has a policy with a ``wire_dtype``

    @property
    def sums_in_order(self) -> bool:
        """Whether ranks sum gradients themselves, in rank order."""
        mixed = self.mixed_precision
        return self.has_wire_dtype or (mixed is not None and mixed.sums_in_order)

    @property
    def placements(self) -> Placements:
        """The parts of the state that are sharded."""
        return placements_of(self.stage)

    def leaves(self, part: str) -> bool:
        """Whether a part of the state, named as in :class:`Offload`, is offloaded."""
        return self.place_of(part) != "device"

    def place_of(self, part: str) -> str:
        """Returns where a part of the state is: ``"device"``, ``"cpu"`` or ``"disk"``."""
        return place_of(self.offload, part)

    def _check_gather(self, dtype: torch.dtype) -> None:
        shares, where = self.communication.replicas_share, self.place_of("parameters")
        for obstacle, is_set in (
            (f"stage={self.stage}", not self.placements.parameters),
            (f"replicas_share={shares!r}", shares is not None),
            (f"parameters on {where}", where != "device"),
        ):
            if is_set:
                raise ValueError(
                    f"gather_dtype={dtype} does not support {obstacle}; it needs stage=3 with "
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
