"""Random training runs of a model: what happens in each step, and what one process makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.random_graphs import WIDTH, build, codes_of, has_joint_backwards, total_loss

KINDS = ("train", "eval", "fail_forward", "fail_eval", "fail_one", "fail_backward")
BETWEEN = ("eval", "inference", "reference")
MAX_NORM = 0.5


class Planned(Exception):
    """The error that a run raises on purpose."""


@dataclass(frozen=True)
class Event:
    """One forward of a run; a step ends where an optimizer is to `update`."""

    kind: str
    place: int = 0  # which module or rank fails, or which parameters are frozen for a while
    between: str = ""  # what comes between the forward and its backward
    held: bool = False  # gradients are not reduced yet
    update: bool = False
    waits: bool = False  # the backward is that of the next forward, too


def events_of(seed: int) -> list[Event]:
    """The run of a seed: three optimizer steps of one to three forwards, and more in between."""
    rng = random.Random(seed + 2)
    events: list[Event] = []
    for _ in range(3):
        count = rng.choice([1, 1, 2, 3])
        for number in range(count):
            last = number == count - 1
            held = not last and rng.random() < 0.6
            between = rng.choice(BETWEEN) if rng.random() < 0.5 else ""
            place = rng.randrange(1000)
            waits = has_joint_backwards(seed) and not last and place % 2 == 0
            events.append(Event("train", place, between, held, last, waits))
            if rng.random() < 0.5:
                events.append(Event(rng.choice(KINDS[1:]), rng.randrange(1000)))
    return events


def batch(seed: int, step: int, rank: int) -> Tensor:
    """The inputs of a rank in a step, of shape (3, WIDTH) and dtype float64."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


@dataclass
class Result:
    """Losses and norms of each rank, and the full parameters at the end."""

    numbers: list[list[float]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def reference(seed: int, world_size: int) -> Result:
    """One process that does every rank's part."""
    model, clock, _ = build(seed)
    optimizer = make_optimizer(model)
    result = Result([[] for _ in range(world_size)])
    last = world_size - 1
    waiting: list[Any] = [0.0] * world_size
    for step, event in enumerate(events_of(seed)):
        if event.kind.startswith("fail"):
            optimizer.zero_grad()
            waiting = [0.0] * world_size
            continue
        losses = []
        for rank, numbers in enumerate(result.numbers):
            clock[:] = [step, rank, True]
            with mode(model, event), one_move(model, is_last=rank == last):
                losses.append(total_loss(model, batch(seed, step, rank)))
            numbers.append(losses[-1].item())
        for rank, numbers in enumerate(result.numbers):
            with one_move(model, is_last=rank == last):
                numbers += look_between(model, clock, event, batch(seed, step, rank), rank)
        for rank, loss in enumerate(losses):
            if event.kind == "train":
                waiting[rank] = backward_unless_it_waits(waiting[rank] + loss / world_size, event)
        if event.update:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for numbers in result.numbers:
                numbers.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    result.state = dict(model.state_dict())
    return result


def backward_unless_it_waits(loss: Tensor, event: Event) -> Any:
    """Of a loss that does not wait; returns the one that waits."""
    if event.waits:
        return loss
    loss.backward()
    return 0.0


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that changes every parameter with a gradient, also where that is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)


def look_between(
    model: nn.Module, clock: list[int], event: Event, x: Tensor, rank: int
) -> list[float]:
    """A forward without gradients before the backward of the event's."""
    if not event.between:
        return []
    before = list(clock)
    clock[:] = [clock[0] + 50, rank, True]
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = trained[event.place % 3 :: 2] if event.between == "reference" else []
    for p in frozen:
        p.requires_grad_(False)
    with torch.inference_mode() if event.between == "inference" else torch.no_grad():
        loss = total_loss(model, x).item()
    for p in frozen:
        p.requires_grad_(True)
    clock[:] = before
    return [loss]


@contextmanager
def one_move(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Of the forwards of all ranks the last one's moves stay: each rank moves its own copy."""
    before = [code.clone() for code in codes_of(model)]
    yield
    if not is_last:
        with torch.no_grad():
            for code, old in zip(codes_of(model), before, strict=True):
                code.copy_(old)


@contextmanager
def mode(model: nn.Module, event: Event) -> Iterator[None]:
    """Evaluation without gradients, where the event is one."""
    if not event.kind.endswith("eval"):
        yield
        return
    model.eval()
    with torch.no_grad():
        yield
    model.train()


@contextmanager
def failing_forward(model: nn.Module, place: int) -> Iterator[None]:
    """A forward that raises behind some module's, or at its end if the module is not called."""
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    chosen = {modules[place % len(modules)], model}
    handles = [module.register_forward_hook(_raise) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def failing_backward(model: nn.Module, place: int) -> Iterator[Callable[[Tensor], None]]:
    """A backward that raises where it comes to a call of some module, or at its end."""
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(_raise)

    handle = modules[place % len(modules)].register_forward_hook(watch)

    def through(loss: Tensor) -> None:
        loss.backward()
        raise Planned("in place of a hook that the backward does not come to")

    try:
        yield through
    finally:
        handle.remove()


def _raise(*args: Any) -> None:
    raise Planned("on all ranks")
