"""Threads: steps may move from one to another, two at a time are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named
from tests.distributed.values import own_of
from zerocore.sharding import builder

WAIT_SECONDS = 20.0


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a new thread and returns what it returns, or raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(WAIT_SECONDS)


def hand_over(stage: int) -> None:
    """Forward and backward in threads of their own, and the whole step in a thread."""
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    for step in range(2):
        in_thread(lambda step=step: accumulate(model, case, step, rank=dist.get_rank()))  # type: ignore[misc]
        assert_gradients(model, case, step)
        model.zero_grad()
    in_thread(lambda: zerocore.full_state_dict(model))
    batch = case.seeded_batch(0, dist.get_rank(), 2)
    expected = []
    for run in (lambda work: work(), in_thread):
        loss = run(lambda: case.loss(model, batch))
        run(loss.backward)
        expected.append([own_of(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(expected[0], expected[1])


def test_steps_move_between_threads(stage: int) -> None:
    run_ranks(hand_over, 2, stage)


class Gate(nn.Module):
    """Waits in its forward, or in its backward, while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.reached, self.opened = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.wait()
        if self.where == "backward" and x.requires_grad:
            x.register_hook(lambda grad: self.wait())
        return x

    def wait(self) -> None:
        self.where = ""
        self.reached.set()
        assert self.opened.wait(WAIT_SECONDS)


def make(stage: int) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Gate(), nn.Linear(4, 4)]
    return zerocore.shard(nn.Sequential(*layers), stage=stage, units=["0", "1", "3"])


@contextmanager
def busy(model: Any, where: str) -> Iterator[None]:
    """Another thread is in the middle of a step, which goes well."""
    gate = model[2]
    gate.reached.clear()
    gate.opened.clear()
    gate.where = where
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(lambda: model(torch.ones(1, 4)).sum().backward())
        assert gate.reached.wait(WAIT_SECONDS)
        try:
            yield
        finally:
            gate.opened.set()
            step.result(WAIT_SECONDS)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [own_of(p.grad).clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return found


def use_a_busy_model(stage: int) -> None:
    model = make(stage)
    model(torch.ones(1, 4)).sum().backward()
    expected = gradients(model)
    for where in ("forward", "backward"):
        pending = model(torch.ones(1, 4)).sum()
        with busy(model, where):
            refused = pytest.raises(RuntimeError, match=f"runs {where} in another thread")
            with refused:
                model(torch.ones(1, 4))
            with refused, torch.no_grad():
                model[0](torch.ones(1, 4))
            with refused, zerocore.unsharded(model):
                pass
            with refused:
                pending.backward()
        torch.testing.assert_close(gradients(model), expected)  # of the other thread's step
        model(torch.ones(1, 4)).sum().backward()
        torch.testing.assert_close(gradients(model), expected)


def test_two_threads_at_a_time_are_refused(stage: int) -> None:
    run_ranks(use_a_busy_model, 2, stage)


def fail_in_thread() -> None:
    """A backward that failed in a thread leaves the model to the others."""
    model = make(3)
    loss = model(torch.ones(1, 4, requires_grad=True)).sum()

    def fail(grad: Tensor) -> None:
        raise KeyError("on purpose")

    x = torch.ones(1, 4, requires_grad=True)
    x.register_hook(fail)
    loss = model(x).sum()
    with pytest.raises(KeyError):
        in_thread(loss.backward)
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    expected = gradients(model)
    in_thread(lambda: model(torch.ones(1, 4)).sum().backward())
    torch.testing.assert_close(gradients(model), expected)


def test_a_failure_in_a_thread_leaves_the_model_usable() -> None:
    run_ranks(fail_in_thread, 2)


def make_an_engine_beside_a_thread() -> None:
    """A thread of gloo that frees a tensor of Python needs the GIL, and holds its queue."""
    had_the_gil = threading.Event()

    def make_late(*args: Any, **options: Any) -> builder.Engine:
        if dist.get_rank() == 1:
            time.sleep(1.0)
        timer = threading.Timer(0.1, had_the_gil.set)
        timer.start()
        engine = make(*args, **options)
        assert dist.get_rank() == 1 or had_the_gil.is_set()
        timer.join()
        return engine

    make = builder.Engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "Engine", make_late)
        zerocore.shard(nn.Linear(4, 4), stage=3)


def test_no_engine_waits_under_the_gil() -> None:
    run_ranks(make_an_engine_beside_a_thread, 2)
