"""How a model is sharded: frozen dataclasses, validated when built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STAGES = (0, 1, 2, 3)
ACCUMULATE_MODES = ("sharded", "full")


@dataclass(frozen=True)
class ShardConfig:
    """Options of :func:`zerocore.shard`.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        prefetch: units gathered ahead of the one that computes, 0 or more.
        accumulate: ``"sharded"`` reduces gradients in every backward (stages 2 and 3, also under
            ``no_sync``); ``"full"`` holds full gradients under ``no_sync`` and communicates once.
        sync_params: rank 0's parameter values win on all ranks.
        find_unused_parameters: ask the ranks in every backward which parameters took part, so
            that one that no rank used keeps ``grad is None``. Off, this is asked in the first
            backward, and in later ones only if some parameter was unused then.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option has the wrong type.
    """

    stage: int = 3
    prefetch: int = 1
    accumulate: str = "sharded"
    sync_params: bool = True
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("stage", "prefetch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {self.stage}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {self.prefetch}")
        if self.accumulate not in ACCUMULATE_MODES:
            raise ValueError(
                f"accumulate must be one of {ACCUMULATE_MODES}, got {self.accumulate!r}"
            )


@dataclass(frozen=True)
class MixedPrecision:
    """Main weights stay in the model's own dtype, layers compute in a narrower one.

    Attributes:
        param_dtype: floating-point dtype that layers compute in and parameters are gathered in;
            None leaves both as they are.
        reduce_dtype: dtype that gradients are reduced and kept in; None takes ``param_dtype``.
        output_dtype: dtype that floating-point outputs of the model are cast to; None leaves them.
        cast_inputs: cast floating-point inputs of the model to ``param_dtype``.
        keep_fp32: names of modules or parameters that are not cast. A name matches where it is
            a part of a fully qualified name: ``"norm"`` matches ``"layers.0.norm.weight"``.

    Raises:
        TypeError: a dtype is no floating-point ``torch.dtype``, or a name no string.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, torch.dtype) and value.is_floating_point
            ):
                raise TypeError(f"{name} must be a floating-point torch.dtype, got {value!r}")
        names = self.keep_fp32
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"keep_fp32 must be names of modules or parameters, got {names!r}")
        object.__setattr__(self, "keep_fp32", tuple(names))

    def keeps(self, fqn: str) -> bool:
        """Whether the parameter of that name is not cast."""
        return any(f".{name}." in f".{fqn}." for name in self.keep_fp32)
