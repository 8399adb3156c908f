"""zerocore.snapshot: copies that other threads take while the model runs, and who goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states, make
from tests.distributed.harness import run_ranks

HALF = {
    "mixed_precision": zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
}
HOST = {"offload": zerocore.Offload(states="cpu", gradients="cpu", parameters="cpu")}


class Training:
    """Dropout draws from the rank's stream; a schedule and an average go on, too."""

    def __init__(self, stage: int, name: str, options: dict[str, Any], seed: int) -> None:
        options = dict(options)
        if options.pop("hybrid", False):
            options["group"] = init_device_mesh("cpu", (2, 2))
        self.model = make(stage, seed, **options)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.average = zerocore.weights.EMA(self.model.parameters(), 0.5)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.snapshot = zerocore.snapshot(
            self.model, [self.optimizer, self.average], schedule=self.schedule
        )

    def step(self) -> None:
        data = torch.Generator().manual_seed(10 * self.schedule.last_epoch + dist.get_rank())
        batch = torch.randn(4, 4, 3, 3, generator=data)
        loss: Tensor = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with self.snapshot.changing():
            self.average.update()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        found = full_states(self.model, self.optimizer)
        with self.average.swapped():
            averages = zerocore.full_state_dict(self.model, rank0_only=False)
        return {**found, "averages": averages, "lr": self.schedule.get_last_lr()}


def call_once(module: nn.Module, function: Callable[[], None]) -> None:
    """In the middle of the module's next forward."""

    def hook(*_: Any) -> None:
        handle.remove()
        function()

    handle = module.register_forward_hook(hook)


def heal(stage: int, name: str, options: dict[str, Any]) -> None:
    training = Training(stage, name, options, 0)
    torch.manual_seed(dist.get_rank())
    training.step()
    training.step()
    taken: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as thread:
        read = training.snapshot.state_dict
        call_once(training.model.conv, lambda: taken.append(thread.submit(read).result()))
        training.step()
    training.step()
    expected = training.states()
    healed = Training(stage, name, options, 1)
    healed.step()
    healed.snapshot.load_state_dict(taken[0])
    healed.step()
    healed.step()
    assert_equal(healed.states(), expected)


@pytest.mark.parametrize(
    ("stage", "name", "options", "num_ranks"),
    [
        (0, "adamw", {}, 2),
        (1, "zerocore", HALF, 3),
        (2, "sgd", {}, 2),
        (3, "zerocore", HOST, 2),
        (3, "adamw", {"hybrid": True}, 4),
    ],
)
def test_a_rank_goes_on_from_what_a_thread_read(
    stage: int, name: str, options: dict[str, Any], num_ranks: int
) -> None:
    run_ranks(heal, num_ranks, stage, name, options)


def heal_rows() -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        for module in (model[0], model):
            zerocore.fsdp.fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer, zerocore.snapshot(model, optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, snapshot = made(0)
    step(model, optimizer)
    saved = snapshot.state_dict()
    step(model, optimizer)
    again, other, healing = made(1)
    healing.load_state_dict(saved)  # which has no states yet
    step(again, other)
    for healed, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(healed.full_tensor(), expected.full_tensor())


def test_rows() -> None:
    run_ranks(heal_rows, 3)


def meet() -> None:
    """A reader inside of a step waits for its end; so does the step for a reader."""
    training = Training(3, "adamw", {}, 0)
    order: list[str] = []
    values: list[Tensor] = []

    def read() -> None:
        values.append(training.snapshot.state_dict()["weights"]["cube"])
        order.append("read")

    reader = threading.Thread(target=read)
    training.optimizer.register_step_pre_hook(lambda *_: reader.start())
    training.optimizer.register_step_post_hook(lambda *_: order.append("stepped"))
    training.step()
    reader.join()
    assert order == ["stepped", "read"]
    assert torch.equal(values[0], training.snapshot.state_dict()["weights"]["cube"])


def test_a_reader_waits_for_a_step() -> None:
    run_ranks(meet, 2)


def fail() -> None:
    training = Training(3, "adamw", {}, 0)
    training.step()
    handle = training.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.step()
    handle.remove()
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.1 s, or has raised"):
        training.snapshot.state_dict(timeout=0.1)
    training.step()
    training.snapshot.state_dict()


def test_a_step_that_raised_leaves_no_state() -> None:
    run_ranks(fail, 2)


def refuse() -> None:
    training = Training(3, "adamw", {}, 0)
    training.step()
    saved, before = training.snapshot.state_dict(), training.states()
    name = f"rank {1 - dist.get_rank()} of 2"
    for changed, text in [
        ({"rank": (1 - dist.get_rank(), 2)}, f"the snapshot is of {name}"),
        ({"weights": {**saved["weights"], "cube": torch.zeros(3)}}, r"'cube': the snapshot has"),
        ({"weights": {**saved["weights"], "odd": torch.zeros(3)}}, r"'odd': the snapshot has"),
        ({"states": saved["states"][:1]}, "has the states of 1 optimizers, expected 2"),
    ]:
        with pytest.raises(ValueError, match=text):
            training.snapshot.load_state_dict({**saved, **changed})
    if saved["weights"]["cube"].numel():
        saved["weights"]["cube"][0] += 1
        with pytest.raises(ValueError, match=r"'cube' in the snapshot is damaged"):
            training.snapshot.load_state_dict(saved)
    assert_equal(training.states(), before)
    with pytest.raises(TypeError, match="clock: expected an object with state_dict"):
        zerocore.snapshot(training.model, training.optimizer, clock=3)


def test_others_and_damaged_ones_are_refused() -> None:
    run_ranks(refuse, 2)


def leave_snapshots_behind() -> None:
    training = Training(3, "adamw", {}, 0)
    model, optimizer = training.model, training.optimizer
    hooks = (
        model._forward_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    before = [len(each) for each in hooks]
    for _ in range(3):
        zerocore.snapshot(model, optimizer)
    assert [len(each) for each in hooks] == before
    training.step()


def test_a_snapshot_takes_its_hooks_along() -> None:
    run_ranks(leave_snapshots_behind, 1)
