"""Measures a sharded model's bytes on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.common.memory_bytes import MemoryBytes
from zerocore.model.state import ShardState, state_of
from zerocore.tensor.rows import local_part, shard_of


def memory_usage(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryBytes:
    """Measures the bytes allocated on this rank now, and the pool's peak since ``shard``.

    Args:
        model: a sharded model.
        optimizer: the optimizer whose states count; None counts no states.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    return usage_of(state_of(model), [] if optimizer is None else [optimizer])


def usage_of(state: ShardState, optimizers: Iterable[Optimizer]) -> MemoryBytes:
    """Measures as :func:`memory_usage`, with the states of several optimizers."""
    engine, on_host = state.engine, state.config.leaves("gradients")
    host = engine.host_bytes
    state_nbytes = [_states_of(optimizer) for optimizer in optimizers]
    return MemoryBytes(
        parameters=engine.parameter_nbytes,
        gradients=0 if on_host else engine.gradient_nbytes,
        optimizer=sum(device for device, _ in state_nbytes),
        pool=engine.pool_stats.peak_nbytes,
        main_weights=engine.main_nbytes,
        pool_reserved=engine.pool_stats.peak_reserved_nbytes,
        host_weights=host.weights,
        host_gradients=host.gradients + (engine.gradient_nbytes if on_host else 0),
        host_optimizer=sum(host for _, host in state_nbytes),
        host_buffers=host.buffers,
        disk=host.disk,
    )


def _states_of(optimizer: Optimizer) -> tuple[int, int]:
    """Returns the bytes of an optimizer's states on the device and on the host, none on disk."""
    device = host = 0
    with torch._C.DisableTorchFunctionSubclass():  # numel() of a shard is the rank's own
        for param, entry in optimizer.state.items():
            parts = [local_part(t) for t in entry.values() if isinstance(t, Tensor) and t.dim() > 0]
            nbytes = sum(t.numel() * t.element_size() for t in parts)
            shard = shard_of(param)
            if shard is not None and shard.on_disk:
                continue
            if shard is not None and shard.on_host:
                host += nbytes
            else:
                device += nbytes
    return device, host
