"""FSDP2's interface on this engine: what ``torch.distributed.fsdp`` exports of it, by its names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zerocore.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from zerocore.fsdp.policy import MixedPrecisionPolicy
from zerocore.fsdp.shard import fully_shard

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "installed",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]

_NAMES: tuple[Any, ...] = (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
# Where torch exports them.
_PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_replaced: list[tuple[ModuleType, str, Any]] = []


def install() -> None:
    """From now on ``from torch.distributed.fsdp import fully_shard`` imports this one.

    Call it before a library that imports the names at its top is imported. Calling it twice is
    calling it once.
    """
    if _replaced:
        return
    for place in _PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:  # gone from a later torch
            continue
        for value in _NAMES:
            name = value.__name__
            if hasattr(module, name) and not isinstance(getattr(module, name), ModuleType):
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, value)


def uninstall() -> None:
    """Undoes :func:`install`; models that were sharded in between stay as they are."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


@contextmanager
def installed() -> Iterator[None]:
    """:func:`install`, until the block ends."""
    install()
    try:
        yield
    finally:
        uninstall()
