"""Used memory of a GPU as the driver counts it (NVML), for all processes and for this one."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

import torch

_ADVICE = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed (libnvidia-ml.so.1 is missing)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded, or this machine has no GPU",
    "NVMLError_NoPermission": "this process may not talk to the NVIDIA driver",
    "NVMLError_NotFound": "the driver does not know this GPU",
    "NVMLError_GpuIsLost": "the GPU has fallen off the bus; the machine must be restarted",
    "NVMLError_LibRmVersionMismatch": (
        "the driver was updated and not loaded again; restart the machine"
    ),
}


class NvmlUnavailable(RuntimeError):
    """NVML cannot be used here; the message says why."""


class NvmlDevice:
    """One GPU. A context manager: NVML is released at its end.

    Args:
        device: CUDA device, as torch numbers it (``CUDA_VISIBLE_DEVICES`` applies).

    Raises:
        NvmlUnavailable: no nvidia-ml-py, no driver, no such GPU.
    """

    def __init__(self, device: torch.device | int = 0) -> None:
        self._nvml = _load()
        self._call("nvmlInit")
        try:
            self._handle = self._call("nvmlDeviceGetHandleByUUID", _uuid(device))
        except BaseException:
            self.close()
            raise

    def used_nbytes(self) -> int:
        """Bytes in use on the whole device, by any process and by the driver for them."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle).used)

    def total_nbytes(self) -> int:
        """Bytes of the device."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle).total)

    def process_nbytes(self) -> int | None:
        """Bytes in use by this process; None where the driver does not tell (containers)."""
        for process in self._call("nvmlDeviceGetComputeRunningProcesses", self._handle):
            if process.pid == os.getpid():
                used = process.usedGpuMemory
                return None if used is None else int(used)
        return None

    def driver(self) -> str:
        """Version of the driver."""
        return str(self._call("nvmlSystemGetDriverVersion"))

    def close(self) -> None:
        """Releases NVML."""
        self._call("nvmlShutdown")

    def __enter__(self) -> NvmlDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError as error:
            raise unavailable(error) from error


def driver_version() -> str:
    """Version of the driver, also where torch sees no device.

    Raises:
        NvmlUnavailable: no nvidia-ml-py, or no driver.
    """
    nvml = _load()
    try:
        nvml.nvmlInit()
        version = str(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise unavailable(error) from error
    return version


def unavailable(error: Exception) -> NvmlUnavailable:
    """Says in plain words what an error of the NVML library means."""
    reason = _ADVICE.get(type(error).__name__, "the NVIDIA driver refused")
    return NvmlUnavailable(f"no figures from NVML: {reason} (NVML says: {error})")


def _load() -> ModuleType:
    try:
        return import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "no figures from NVML: nvidia-ml-py is not installed; pip install nvidia-ml-py"
        ) from None


def _uuid(device: torch.device | int) -> str:
    """NVML's name of a CUDA device: indices differ from torch's under CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        raise NvmlUnavailable("no figures from NVML: torch sees no CUDA device")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
