"""The library of the NVIDIA driver (NVML), and what its errors mean."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

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


def driver_version() -> str:
    """Version of the driver, also where torch sees no device; NvmlUnavailable without one."""
    nvml = load_nvml()
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


def load_nvml() -> ModuleType:
    """The library; raises NvmlUnavailable where it is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "no figures from NVML: nvidia-ml-py is not installed; pip install nvidia-ml-py"
        ) from None
