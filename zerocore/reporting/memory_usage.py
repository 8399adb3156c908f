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
    state = state_of(model)
    engine, on_host = state.engine, state.config.leaves("gradients")
    host_weights, host_gradients = engine.host_nbytes
    states, host_states = (0, 0) if optimizer is None else states_of(optimizer)
    return MemoryBytes(
        parameters=engine.parameter_nbytes,
        gradients=0 if on_host else engine.gradient_nbytes,
        optimizer=states,
        pool=engine.pool_stats.peak_nbytes,
        main_weights=engine.main_nbytes,
        pool_reserved=engine.pool_stats.peak_reserved_nbytes,
        host_weights=host_weights,
        host_gradients=engine.gradient_nbytes if on_host else host_gradients,
        host_optimizer=host_states,
    )


def states_of(optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of an optimizer's states on the device and on the host."""
    device = host = 0
    with torch._C.DisableTorchFunctionSubclass():  # of shards the elements of this rank count
        for param, entry in optimizer.state.items():
            nbytes = sum(
                t.numel() * t.element_size()
                for t in entry.values()
                if isinstance(t, Tensor) and t.dim() > 0
            )
            if getattr(param, "on_host", False):
                host += nbytes
            else:
                device += nbytes
    return device, host
