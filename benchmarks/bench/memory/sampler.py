"""Samples this process's memory in a thread, from outside and by its allocator."""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from bench.memory.nvml import NvmlDevice

PAGE_NBYTES = resource.getpagesize()


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; all bytes or counts, `size_t`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class CpuMemory:
    """A reader of resident memory, and of the bytes that malloc has allocated (glibc >= 2.33)."""

    outside = "RSS"
    allocator = "malloc"

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = MallInfo

    def outside_nbytes(self) -> int:
        """Returns the resident bytes of this process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES

    def allocated_nbytes(self) -> int:
        """Returns bytes in use: mapped blocks and the used part of the heap."""
        info = self._mallinfo()
        return int(info.hblkhd + info.uordblks)

    def reserved_nbytes(self) -> int:
        """Returns bytes that malloc holds, in use or free."""
        info = self._mallinfo()
        return int(info.hblkhd + info.arena)

    def reset_peaks(self) -> None:
        """Does nothing: malloc has no peaks."""

    def peaks(self) -> tuple[int, int]:
        """Returns zeros: malloc has no peaks, so samples must suffice."""
        return 0, 0


class CudaMemory:
    """A reader of NVML's used memory of the whole device, and of torch's allocator."""

    outside = "NVML"
    allocator = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = NvmlDevice(device)

    def outside_nbytes(self) -> int:
        """Returns bytes in use on the device, by all processes."""
        return self._nvml.used_nbytes()

    def allocated_nbytes(self) -> int:
        """Returns bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def reserved_nbytes(self) -> int:
        """Returns bytes that torch's allocator holds."""
        return torch.cuda.memory_reserved(self._device)

    def reset_peaks(self) -> None:
        """Resets the peaks to the bytes in use now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> tuple[int, int]:
        """Returns the allocator's peaks: bytes of live tensors, bytes held."""
        return (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )


Memory = CpuMemory | CudaMemory


@dataclass(frozen=True)
class Sample:
    """Bytes at a time on the host's monotonic clock."""

    time_ns: int
    outside: int
    allocated: int
    reserved: int


@dataclass
class Sampler:
    """A context manager whose thread reads the memory every `interval_s` seconds."""

    memory: Memory
    interval_s: float = 0.001
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def read(self) -> Sample:
        """Returns a sample of memory now."""
        memory = self.memory
        return Sample(
            time.perf_counter_ns(),
            memory.outside_nbytes(),
            memory.allocated_nbytes(),
            memory.reserved_nbytes(),
        )

    def peak(self, read: Callable[[Sample], int]) -> int:
        """Returns the highest sample."""
        return max(read(sample) for sample in self.samples)

    def __enter__(self) -> Sampler:
        self.memory.reset_peaks()
        self.samples.append(self.read())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append(self.read())

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.samples.append(self.read())
