"""NVML's figures, and on a machine without a driver the real library's errors."""

from __future__ import annotations

import sys

import pytest
import torch

from bench.memory.nvml import NvmlDevice
from zerocore.reporting.nvml import NvmlUnavailable, unavailable

pynvml = pytest.importorskip("pynvml")


def driver_error() -> Exception | None:
    """The library's own answer here."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return error
    pynvml.nvmlShutdown()
    return None


@pytest.mark.skipif(driver_error() is None, reason="there is a driver")
def test_without_a_driver_the_message_says_so() -> None:
    with pytest.raises(NvmlUnavailable, match=r"no figures from NVML: .*NVIDIA driver"):
        NvmlDevice()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "libnvidia-ml.so.1 is missing"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "not loaded"),
        ("NVML_ERROR_NO_PERMISSION", "no permission"),
        ("NVML_ERROR_NOT_FOUND", "does not know this GPU"),
        ("NVML_ERROR_GPU_IS_LOST", "fallen off the bus"),
        ("NVML_ERROR_UNKNOWN", "refused"),
    ],
)
def test_each_error_of_the_library_is_explained(code: str, text: str) -> None:
    error = pynvml.NVMLError(getattr(pynvml, code))
    message = str(unavailable(error))
    assert text in message
    assert str(error) in message


def test_calls_before_init_are_errors_of_ours() -> None:
    device = NvmlDevice.__new__(NvmlDevice)
    device._nvml = pynvml
    with pytest.raises(NvmlUnavailable, match="no figures from NVML"):
        device._call("nvmlSystemGetDriverVersion")


def test_without_the_library_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="pip install nvidia-ml-py"):
        NvmlDevice()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_allocation_is_seen() -> None:
    torch.empty(1, device="cuda")
    with NvmlDevice() as device:
        before = device.used_nbytes()
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        assert device.used_nbytes() - before >= block.numel()
        assert device.used_nbytes() <= device.total_nbytes()
