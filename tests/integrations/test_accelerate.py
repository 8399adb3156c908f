"""Accelerate over a sharded model does what it does over DDP; plain Accelerate refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks

pytest.importorskip("accelerate")

STEPS = 5
SAVED = 3


def build_model() -> nn.Sequential:
    """Seeded; on the ranks of the test some shards of the biases are empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def micro_batch(rank: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 8, generator=draw)


class Run:
    """A training over an accelerator, two micro-batches a step, clipped."""

    def __init__(self, stage: int | None, mixed: zerocore.MixedPrecision | None = None) -> None:
        from accelerate import Accelerator

        import zerocore.integrations.accelerate

        cls: Any = Accelerator if stage is None else zerocore.integrations.accelerate.Accelerator
        self.accelerator = cls(cpu=True, gradient_accumulation_steps=2)
        model: nn.Module = build_model()
        if stage is not None:
            model = zerocore.shard(model, stage=stage, mixed_precision=mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """This rank's losses and the norms of the steps."""
        figures = []
        for number in range(2 * first, 2 * last):
            with self.accelerator.accumulate(self.model):
                batch = micro_batch(self.accelerator.process_index, number)
                loss = self.model(batch).square().mean()
                figures.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    figures.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return figures


def train_alike(directory: str) -> None:
    ddp = Run(None)
    expected = ddp.train()
    values = ddp.accelerator.get_state_dict(ddp.model)
    for stage, other_stage in ((0, 1), (3, 2)):
        folder = Path(directory, str(stage))
        run = Run(stage)
        assert type(run.model).__name__ == "Sequential"
        losses = run.train(0, SAVED)
        for _ in range(2):  # the second time over the first one
            run.accelerator.save_state(str(folder))
        losses += run.train(SAVED)
        torch.testing.assert_close(losses, expected)
        found = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            torch.testing.assert_close(found, dict(values))
        run.accelerator.save_model(run.model, str(folder / "model"))
        resumed = Run(other_stage)
        resumed.accelerator.load_state(str(folder))
        torch.testing.assert_close(resumed.train(SAVED), expected[3 * SAVED :])
        assert resumed.schedule.get_last_lr() == run.schedule.get_last_lr()
    run.accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(folder / "model" / "model.safetensors"), dict(values))


def test_training_and_states_are_those_of_ddp(tmp_path: Path) -> None:
    run_ranks(train_alike, 2, str(tmp_path), launch="torchrun")


def refuse(directory: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from zerocore.integrations.accelerate import Accelerator as Ours

    model = zerocore.shard(build_model())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"around a sharded Sequential.*use zerocore\.integrations"):
        Accelerator(cpu=True).prepare(model, optimizer)
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match=r"set to bf16.*would have no effect"):
        Ours(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state()
    narrow = zerocore.shard(build_model(), mixed_precision=zerocore.MixedPrecision(torch.bfloat16))
    assert Ours(cpu=True, mixed_precision="bf16").prepare(narrow) is narrow
    AcceleratorState._reset_state()
    # How it takes an optimizer's parameters to FSDP2's: shards without elements have no address.
    with pytest.raises(TypeError, match=r"data_ptr\(\) of parameter '0.weight'.*zerocore\.integ"):
        Accelerator(cpu=True)._get_named_parameters(model, drop_refs=True)


def test_what_would_be_silently_wrong_is_refused(tmp_path: Path) -> None:
    run_ranks(refuse, 2, str(tmp_path), launch="torchrun")


def broadcast() -> None:
    from torch.distributed.utils import _sync_module_states

    group = torch.distributed.group.WORLD
    for stage in (0, 3):
        model = zerocore.shard(build_model(), stage=stage)
        before = zerocore.full_state_dict(model, rank0_only=False)
        torch.distributed.broadcast(model[0].weight.data, src=0)  # as Trainer's
        if stage:  # each rank has other elements
            with pytest.raises(TypeError, match=r"broadcast of the shard of '0.weight'"):
                _sync_module_states(model, group, 1 << 20, 0, set())
        torch.testing.assert_close(zerocore.full_state_dict(model, rank0_only=False), before)


def test_broadcasts_leave_weights_as_they_are() -> None:
    run_ranks(broadcast, 2)
