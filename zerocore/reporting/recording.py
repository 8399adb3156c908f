"""Records chosen steps: the runtime's events, and the times of modules and optimizers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerocore.common.agreement import is_simulated
from zerocore.model.state import ShardState, state_of
from zerocore.model.unit_call import unit_call_of
from zerocore.reporting.events import HOST, ONE_QUEUE, Event, Queues, queues_of_device, read_events
from zerocore.reporting.timeline import Box, Timeline, check_path, event_boxes
from zerocore.tensor.placed import leaves


@contextmanager
def record_events(model: nn.Module) -> Iterator[list[Event]]:
    """Records the runtime's events; the list is filled when the block ends.

    Raises:
        ValueError: the model is not sharded, or another block records it.
    """
    state = state_of(model)
    names = [unit.name for unit in state.units]
    events: list[Event] = []
    with state.meters.recording() as records:
        yield events
    events += read_events(records, names)


@contextmanager
def trace(model: nn.Module, *paths: str | Path) -> Iterator[Timeline]:
    """Records the steps run in the ``with`` block and writes them to ``paths`` at its end.

    Times are measured, or emulated on an emulated link. On a GPU they are the device's times, for
    modules and for collectives.

    Args:
        model: a sharded model. A compiled one may be compiled again for the block.
        paths: ``*.json`` for a Chrome trace (Perfetto, chrome://tracing), ``*.png`` for a picture
            (needs matplotlib).

    Returns:
        The timeline, filled when the block ends.

    Raises:
        ValueError: the model is not sharded, another block records it, or a path has another
            ending or no folder.
        ImportError: a picture needs matplotlib, which is not installed.
    """
    state = state_of(model)
    for path in map(Path, paths):
        check_path(path)
    timeline = Timeline(label=f"{source_of(state)}: {title_of(model, state)}")
    recorder = _ModuleRecorder(Clock(state.device))
    with record_events(model) as events, recorder.attached(model, state):
        yield timeline
    timeline.boxes = recorder.boxes() + event_boxes(events, queues_of(state))
    inside = [event for event in events if event.op not in HOST]  # these are not in its order
    timeline.pool = [(event.issued_ns, event.pool_nbytes) for event in inside]
    for path in map(Path, paths):
        timeline.write(path)


def source_of(state: ShardState) -> str:
    """Returns ``"emulated"`` if the other ranks do not exist, else ``"measured"``."""
    simulated = any(is_simulated(group) for group in state.ranks.groups)
    return "emulated" if simulated else "measured"


def queues_of(state: ShardState) -> Queues:
    """Returns the queues in which the model's collectives take turns."""
    if state.device.type == "cpu":
        return ONE_QUEUE
    return queues_of_device(own_reductions=state.meshes[0].reductions is not None)


def title_of(model: nn.Module, state: ShardState) -> str:
    """Returns a heading of a sharded model: its class, stage, rank and device."""
    return (
        f"{type(model).__name__}, stage {state.config.stage}, rank {state.rank} of "
        f"{state.world_size}, {state.device.type}"
    )


class Clock:
    """A clock whose marks of time are read later.

    On a device, a mark is an event on the current stream. On the CPU, where work is done when a
    call returns, it is the host's time. The constructor waits for the device to compare both.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, None
        if device.type in ("cpu", "meta"):
            return
        self._module = torch.get_device_module(device)
        self._module.synchronize(device)
        # The host may be interrupted before it reads its clock, so the closest of five counts.
        _, self._base_ns, self._base = min(
            (self._tied() for _ in range(5)), key=lambda tied: tied[0]
        )

    def _tied(self) -> tuple[int, int, Any]:
        """Returns the time this took, the host's time, and the device's mark just before that."""
        begin, mark = time.perf_counter_ns(), self.mark()
        mark.synchronize()
        end = time.perf_counter_ns()
        return end - begin, end, mark

    def mark(self) -> Any:
        """Marks the present; the host does not wait."""
        if self._module is None:
            return time.perf_counter_ns()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def read_ns(self, mark: Any) -> int:
        """Returns a mark in ns of ``time.perf_counter_ns``; waits until the device reaches it."""
        if isinstance(mark, int):
            return mark
        mark.synchronize()
        return self._base_ns + round(self._base.elapsed_time(mark) * 1e6)


class _ModuleRecorder:
    """A recorder that cuts time into boxes: a unit's forward or backward, an optimizer's step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[tuple[str, str, Any, Any]] = []  # label, kind, begin, end
        self._current: tuple[str, str] | None = None  # kind, label
        self._since: Any = None
        self._outer: list[tuple[str, str] | None] = []
        self._in_backward = False
        self._attached = False

    def boxes(self) -> list[Box]:
        """Returns the recorded boxes; waits until the device is done with them."""
        read = self._clock.read_ns
        return [
            Box("compute", label, kind, read(begin), read(end))
            for label, kind, begin, end in self._spans
        ]

    @contextmanager
    def attached(self, model: nn.Module, state: ShardState) -> Iterator[None]:
        """Records the units' modules and all optimizers inside of the block."""
        self._attached = True
        with ExitStack() as stack:
            for module in model.modules():
                unit_call = unit_call_of(module)
                if unit_call is None or not unit_call.units or unit_call.state is not state:
                    continue
                label = state.units[unit_call.units[0]].name
                for handle in self._watch(module, label):
                    stack.callback(handle.remove)
            for handle in (
                register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer", "")),
                register_optimizer_step_post_hook(lambda *_: self._leave()),
            ):
                stack.callback(handle.remove)
            try:
                yield
            finally:
                self._switch(None)
                self._attached = False

    def _watch(self, module: nn.Module, label: str) -> list[Any]:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._leave()
            for tensor in filter(torch.is_tensor, leaves(output)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _grad: self._begin_backward(label))

        def before(_module: nn.Module, _args: Any) -> None:
            self._enter("recompute" if self._in_backward else "forward", label)

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _enter(self, kind: str, label: str) -> None:
        self._outer.append(self._current)
        self._switch((kind, label))

    def _leave(self) -> None:
        self._switch(self._outer.pop() if self._outer else None)

    def _begin_backward(self, label: str) -> None:
        if not self._attached:
            return
        if not self._in_backward:
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._switch(("backward", label))

    def _end_backward(self) -> None:
        self._in_backward = False
        self._switch(None)

    def _switch(self, following: tuple[str, str] | None) -> None:
        now = self._clock.mark()
        if self._current is not None and self._attached:
            self._spans.append((*self._current[::-1], self._since, now))
        self._current, self._since = following, now
