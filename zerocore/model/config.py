"""How a model is sharded: frozen dataclasses, validated when built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerocore._C import ShardOptions
from zerocore.common.checks import require_int
from zerocore.model.offload import Offload, leaves, place_of
from zerocore.model.precision import MixedPrecision
from zerocore.model.stages import STAGES, Placements, placements_of

ACCUMULATE_MODES = ("sharded", "full")


@dataclass(frozen=True)
class ShardConfig:
    """Options of :func:`zerocore.shard`, which explains those that are not here.

    Attributes:
        accumulate: ``"sharded"`` reduces gradients in every backward (stages 2 and 3, also under
            ``no_sync``); ``"full"`` holds full gradients under ``no_sync`` and communicates once.
        find_unused_parameters: changes nothing: a parameter that no rank used keeps
            ``grad is None`` in every backward. Accepted as DistributedDataParallel's.
        sync_buffers: buffers take rank 0's values before the calls before which
            DistributedDataParallel broadcasts them: batch norm's statistics stay alike.
        overlap_reductions: at stage 3, reductions have a communicator of their own where one runs
            its collectives one after the other (NCCL), so that none waits for a gather. It takes
            device memory of its own; off, reductions and gathers share one.
        gather_at_step: at stage 3, the first gather of a forward begins when the optimizer has
            stepped, under logging and loading. All ranks must take the same steps and change
            weights alike; weights that change between a step and the forward are gathered again.
        by_rows: a shard is some rows of each parameter, a DTensor, as ``zerocore.fsdp`` has it.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option has the wrong type.
    """

    stage: int = 3
    prefetch: int = 1
    accumulate: str = "sharded"
    sync_params: bool = True
    find_unused_parameters: bool = False
    sync_buffers: bool = False
    gradient_divide_factor: float | None = None
    mixed_precision: MixedPrecision | None = None
    offload: Offload | None = None
    overlap_reductions: bool = True
    gather_at_step: bool = False
    by_rows: bool = False

    @property
    def placements(self) -> Placements:
        """The state that ranks share between them."""
        return placements_of(self.stage)

    @property
    def holds_full(self) -> bool:
        """Whether full gradients are held while ranks do not communicate."""
        return self.accumulate == "full"

    def leaves(self, part: str) -> bool:
        """Whether a part of the state, named as in :class:`Offload`, leaves the device."""
        return leaves(self.offload, part)

    def place_of(self, part: str) -> str:
        """``"device"``, ``"cpu"`` or ``"disk"``: where a part of the state is."""
        return place_of(self.offload, part)

    def shard_options(self) -> ShardOptions:
        """The options that an engine and its plan share."""
        return ShardOptions(
            stage=self.stage,
            prefetch=self.prefetch,
            hold_full=self.holds_full,
            by_rows=self.by_rows,
            gather_at_step=self.gather_at_step,
            states=self.place_of("states"),
            gradients=self.place_of("gradients"),
            parameters=self.place_of("parameters"),
        )

    def __post_init__(self) -> None:
        for name in ("stage", "prefetch"):
            require_int(name, getattr(self, name))
        mixed = self.mixed_precision
        if mixed is not None and not isinstance(mixed, MixedPrecision):
            raise TypeError(
                "mixed_precision must be a zerocore.MixedPrecision, such as "
                f"zerocore.MixedPrecision(torch.bfloat16), got {mixed!r}"
            )
        factor = self.gradient_divide_factor
        if factor is not None and not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"gradient_divide_factor must be positive or None, got {factor!r}")
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {self.stage}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {self.prefetch}")
        if self.accumulate not in ACCUMULATE_MODES:
            raise ValueError(
                f"accumulate must be one of {ACCUMULATE_MODES}, got {self.accumulate!r}"
            )
        if self.offload is not None:
            if not isinstance(self.offload, Offload):
                raise TypeError(f"offload must be a zerocore.Offload, got {self.offload!r}")
            self.offload.check_stage(self.stage)
            if self.gather_at_step and self.place_of("parameters") == "disk":
                raise ValueError(
                    "gather_at_step=True is not built for parameters on disk, which are read for "
                    "each gather; leave it out, or keep parameters on the host or the device"
                )
