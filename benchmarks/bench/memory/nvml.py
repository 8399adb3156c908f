"""Used memory of a GPU as the driver counts it (NVML), for all processes."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from zerocore.reporting.nvml import NvmlUnavailable, load_nvml, unavailable


class NvmlDevice:
    """One GPU. A context manager: NVML is released at its end.

    Args:
        device: CUDA device, as torch numbers it (``CUDA_VISIBLE_DEVICES`` applies).

    Raises:
        NvmlUnavailable: no nvidia-ml-py, no driver, no such GPU.
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
        """Bytes in use on the whole device, by any process and by the driver for them."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle).used)

    def total_nbytes(self) -> int:
        """Bytes of the device."""
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
    """NVML's name of a CUDA device: indices differ from torch's under CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        raise NvmlUnavailable("no figures from NVML: torch sees no CUDA device")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
