"""Copies a state before training changes it: ahead of the writer, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class StreamedCopy:
    """Copies of tensors on the CPU: one thread makes them ahead of another, which takes them.

    ``parts`` are small plain tensors on ``device``, in the order in which they are taken. They must
    not change until :meth:`wait_read` returns: ``check`` runs after the last copy, and raises if
    one has changed. ``budget``: the most bytes of copies at a time; more than any one part.
    """

    def __init__(
        self, parts: Iterable[Tensor], budget: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._parts, self._budget, self._check = parts, budget, check
        self._changed = threading.Condition()
        self._copies: deque[Tensor] = deque()
        self._held = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._is_read = threading.Event()
        self.peak_nbytes = 0
        self._pins = device.type == "cuda"
        self._stream = None
        if device.type != "cpu":  # alongside later work, but after the work issued so far
            self._stream = torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    def wait_read(self) -> None:
        """Waits until the tensors may change: all are copied, or the copy is closed."""
        self._is_read.wait()

    def close(self) -> None:
        """Ends the copying: no further copy will be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the copies in order, each valid until the next; raises errors of :meth:`run`."""
        while (part := self._next()) is not None:
            yield part
            with self._changed:
                self._held -= part.nbytes
                self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def _next(self) -> Tensor | None:
        with self._changed:
            self._changed.wait_for(lambda: self._copies or self._is_read.is_set())
            return self._copies.popleft() if self._copies else None

    @torch.no_grad()
    def run(self) -> None:
        """Makes the copies in a thread of its own; leaves its error to :meth:`__iter__`."""
        try:
            for part in self._parts:
                if not self._reserve(part.nbytes):
                    return
                copied = self._copied(part)
                with self._changed:
                    self._copies.append(copied)
                    self._changed.notify_all()
            self._check()
        except BaseException as error:
            self._error = error
        finally:
            self._parts = ()
            with self._changed:
                self._is_read.set()
                self._changed.notify_all()

    def _reserve(self, nbytes: int) -> bool:
        """Waits until the budget has room; returns False if the copy is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._held + nbytes <= self._budget)
            self._held += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._held)
            return not self._is_closed

    def _copied(self, part: Tensor) -> Tensor:
        if self._stream is None:
            return part.clone()
        with self._stream:
            host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=self._pins)
            host.copy_(part, non_blocking=True)
            self._stream.synchronize()
        return host
