"""Clocks that tell when modules compute: the host's, and a device's."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Takes marks that are read later: on a device events on the current stream.

    A CPU is done when a call returns, so its marks are the host's time. A device's time is tied to
    the host's when the clock is made, for which the host waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, None
        if device.type in ("cpu", "meta"):
            return
        self._module = torch.get_device_module(device)
        self._module.synchronize(device)
        # The host may be interrupted before it reads its clock: the closest of five readings.
        _, self._base_ns, self._base = min(
            (self._tied() for _ in range(5)), key=lambda tied: tied[0]
        )

    def _tied(self) -> tuple[int, int, Any]:
        """How long it took, the host's time, and the mark that the device came by before it."""
        begin, mark = time.perf_counter_ns(), self.mark()
        mark.synchronize()
        end = time.perf_counter_ns()
        return end - begin, end, mark

    def mark(self) -> Any:
        """The present, cheaply: the host does not wait."""
        if self._module is None:
            return time.perf_counter_ns()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def read_ns(self, mark: Any) -> int:
        """A mark as nanoseconds of ``time.perf_counter_ns``, when the device has come by it."""
        if isinstance(mark, int):
            return mark
        mark.synchronize()
        return self._base_ns + round(self._base.elapsed_time(mark) * 1e6)
