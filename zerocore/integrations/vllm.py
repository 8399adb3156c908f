"""Weights for vLLM's transfer engines, from exports in the place of a gather per parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from zerocore.weights.buckets import export
from zerocore.weights.info import export_info

try:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "zerocore.integrations.vllm: vllm >= 0.32 is not installed", name="vllm"
    ) from None


class ShardedSource(WeightSource):
    """``source=`` of a trainer's engine of vLLM, over a sharded model; on all ranks.

    Args:
        max_bytes: of the export's buckets.
        options: ``names``, ``dtype`` and ``merge``, as for :func:`zerocore.weights.export_info`.
    """

    def __init__(self, model: nn.Module, *, max_bytes: str | int = "1GiB", **options: Any) -> None:
        self.model, self.max_bytes = model, max_bytes
        self.info = export_info(model, **options)

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor, in the order of the iteration."""
        return [ParamMeta(each.name, each.dtype, tuple(each.shape)) for each in self.info.tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return export(self.model, info=self.info, max_bytes=self.max_bytes).tensors()
