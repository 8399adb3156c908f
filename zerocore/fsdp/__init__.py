"""FSDP2's interface on this engine, with the names that ``torch.distributed.fsdp`` exports."""

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
# The modules of torch that export them.
_PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_replaced: list[tuple[ModuleType, str, Any]] = []


def install() -> None:
    """Makes ``from torch.distributed.fsdp import fully_shard`` import this one from now on.

    Call it before you import a library that imports these names. A second call does nothing.
    """
    if _replaced:
        return
    for place in _PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:  # a later torch lacks it
            continue
        for value in _NAMES:
            name = value.__name__
            if hasattr(module, name) and not isinstance(getattr(module, name), ModuleType):
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, value)


def uninstall() -> None:
    """Undoes :func:`install`; models that are sharded already do not change."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


@contextmanager
def installed() -> Iterator[None]:
    """Applies :func:`install` within a block."""
    install()
    try:
        yield
    finally:
        uninstall()
