"""The device in torch. Call `load()` in a process of its own: torch cannot unload the device.

Torch knows it as ``torch.asyncdev``, and as a backend of torch.distributed of the same name.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.compiled import ROOT, Extension
from zerocore import _C

DEVICE = "asyncdev"
_SOURCES = sorted(path.relative_to(ROOT) for path in Path(__file__).parent.glob("*.cpp"))
EXTENSION = Extension("async_device_extension", tuple(map(str, _SOURCES)))


def load() -> Any:
    """Registers the device with torch and returns its extension module.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    if EXTENSION.name in sys.modules:
        return EXTENSION.load()
    extension = EXTENSION.load()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _module(extension))
    dist.Backend.register_backend(DEVICE, _create_group, extended_api=True, devices=[DEVICE])
    _C.set_device_loops(extension.loops())
    return extension


def init_process_group(rank: int, world_size: int, store: dist.Store, seconds: float = 60) -> None:
    """Makes a default group whose collectives on the device are the device's own.

    Gloo's threads wait for the group's timeout, so a missing rank is an error.
    """
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{DEVICE}",
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timedelta(seconds=seconds),
    )


def _create_group(options: Any, _: Any) -> Any:
    wire = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )
    return EXTENSION.load().AsyncGroup(wire)


def _module(extension: Any) -> ModuleType:
    """Returns a module with the attributes that torch and others look for in ``torch.<device>``."""
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = module.manual_seed_all = extension.manual_seed
    module.synchronize = lambda device=None: extension.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream(DEVICE)
    module.Stream = lambda device=DEVICE: torch.Stream(device)
    module.ExternalStream = lambda handle, device: _stream(extension.id_of_handle(handle))
    module.Event = lambda enable_timing=False: torch.Event(DEVICE, enable_timing=enable_timing)
    module.stream = lambda stream: stream  # torch's streams are context managers
    module.device = _NoChoice
    # Like CUDA's: cycles take about a nanosecond, and waits of the host are errors.
    module._sleep = lambda cycles: extension.sleep(cycles // 1000, extension.current_stream())
    module.set_sync_debug_mode = lambda mode: extension.forbid_host_waits(mode == "error")
    module.memory_stats = lambda device=None: {
        "num_device_alloc": extension.num_device_allocations(),
        "num_device_free": 0,
        "num_alloc_retries": 0,
    }
    return module


def _stream(stream_id: int) -> torch.Stream:
    kind = torch.Stream(DEVICE)
    return torch.Stream(
        stream_id=stream_id, device_index=kind.device_index, device_type=kind.device_type
    )


class _NoChoice:
    """A context manager that does nothing, as there is only one device."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass
