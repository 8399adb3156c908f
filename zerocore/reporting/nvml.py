"""Loads the NVIDIA driver's library (NVML) and explains its errors."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_ADVICE = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed (libnvidia-ml.so.1 is missing)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded, or this machine has no GPU",
    "NVMLError_NoPermission": "this process has no permission to use the NVIDIA driver",
    "NVMLError_NotFound": "the driver does not know this GPU",
    "NVMLError_GpuIsLost": "the GPU has fallen off the bus; the machine must be restarted",
    "NVMLError_LibRmVersionMismatch": (
        "the driver was updated but not reloaded; restart the machine"
    ),
}


class NvmlUnavailable(RuntimeError):
    """Raised if NVML cannot be used; the message says why."""


def driver_version() -> str:
    """Returns the driver's version, even if torch sees no device; NvmlUnavailable without one."""
    nvml = load_nvml()
    try:
        nvml.nvmlInit()
        version = str(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise unavailable(error) from error
    return version


def unavailable(error: Exception) -> NvmlUnavailable:
    """Returns the error to raise for one of NVML, with its reason in plain words."""
    reason = _ADVICE.get(type(error).__name__, "the NVIDIA driver refused")
    return NvmlUnavailable(f"no figures from NVML: {reason} (NVML says: {error})")


def load_nvml() -> ModuleType:
    """Imports the library; raises NvmlUnavailable if it is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "no figures from NVML: nvidia-ml-py is not installed; pip install nvidia-ml-py"
        ) from None
