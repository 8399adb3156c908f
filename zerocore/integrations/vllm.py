"""Exports weights to vLLM's transfer engines, in buckets instead of a gather per parameter."""

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
    """A ``source=`` for vLLM's transfer engine in a trainer; all ranks must make and iterate it.

    Args:
        max_bytes: as for :func:`zerocore.export`.
        options: ``names``, ``dtype`` and ``merge``, as for :func:`zerocore.weights.export_info`.
    """

    def __init__(self, model: nn.Module, *, max_bytes: str | int = "1GiB", **options: Any) -> None:
        self.model, self.max_bytes = model, max_bytes
        self.info = export_info(model, **options)

    def metadata(self) -> list[ParamMeta]:
        """Returns each tensor's name, dtype and shape, in the order of the iteration."""
        return [ParamMeta(item.name, item.dtype, tuple(item.shape)) for item in self.info.tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return export(self.model, info=self.info, max_bytes=self.max_bytes).tensors()
