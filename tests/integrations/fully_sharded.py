"""FSDP2 of torch and of zerocore, for trainers that import ``fully_shard`` from torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

import zerocore.fsdp

ENGINES = ("torch", "zerocore")


def engine(name: str) -> AbstractContextManager[None]:
    """Whose ``fully_shard`` a trainer finds in ``torch.distributed.fsdp`` within the block."""
    return zerocore.fsdp.installed() if name == "zerocore" else nullcontext()


def check_engine(model: torch.nn.Module, name: str) -> None:
    """The model is sharded, by the implementation of that name."""
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    assert isinstance(model, zerocore.fsdp.FSDPModule) == (name == "zerocore")


def let_accelerate_shard_on_cpu() -> None:
    """Accelerate takes FSDP for devices only; it is told that these ranks have some."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def check_close(
    found: list[float], expected: list[float], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """As the tests of ``zerocore.fsdp``: sums of gradients may be rounded otherwise."""
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
