"""Reads a GPU's used memory, of all processes, from the driver (NVML)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from zerocore.reporting.nvml import NvmlUnavailable, load_nvml, unavailable


class NvmlDevice:
    """A GPU. As a context manager it releases NVML at the end.

    Args:
        device: CUDA device, as torch numbers it (``CUDA_VISIBLE_DEVICES`` applies).

    Raises:
        NvmlUnavailable: nvidia-ml-py, a driver or the GPU is missing.
    """

    def __init__(self, device: torch.device | int = 0) -> None:
        self._nvml = load_nvml()
        self._call("nvmlInit")
        try:
            self._handle = self._call("nvmlDeviceGetHandleByUUID", _uuid(device))
        except BaseException:
            self.close()
            raise

    def used_nbytes(self) -> int:
        """Returns the bytes in use on the whole device, by all processes and the driver."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle).used)

    def total_nbytes(self) -> int:
        """Returns the bytes of the device."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle).total)

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


def _uuid(device: torch.device | int) -> str:
    """Returns NVML's name of a device: under CUDA_VISIBLE_DEVICES indices differ from torch's."""
    if not torch.cuda.is_available():
        raise NvmlUnavailable("no figures from NVML: torch sees no CUDA device")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
