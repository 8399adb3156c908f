"""Bytes on this rank, measured on a sharded model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.common.memory_bytes import MemoryBytes
from zerocore.model.state import state_of


def memory_usage(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryBytes:
    """Measured: what is allocated on this rank now, and the pool's peak since ``shard``.

    Args:
        model: a sharded model.
        optimizer: whose states are counted.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    engine = state_of(model).engine
    states = 0
    if optimizer is not None:
        with torch._C.DisableTorchFunctionSubclass():  # of shards the elements of this rank count
            for entry in optimizer.state.values():
                states += sum(
                    t.numel() * t.element_size()
                    for t in entry.values()
                    if isinstance(t, Tensor) and t.dim() > 0
                )
    return MemoryBytes(
        parameters=engine.parameter_nbytes,
        gradients=engine.gradient_nbytes,
        optimizer=states,
        pool=engine.pool_stats.peak_nbytes,
        main_weights=engine.main_nbytes,
        pool_reserved=engine.pool_stats.peak_reserved_nbytes,
    )
