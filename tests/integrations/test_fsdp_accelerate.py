"""Accelerate, as it is, over ``zerocore.fsdp``: what it does over torch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.fsdp.both import loss_of, make_net
from tests.integrations.fully_sharded import (
    ENGINES,
    check_close,
    check_engine,
    engine,
    let_accelerate_shard_on_cpu,
)

pytest.importorskip("accelerate")

STEPS = 5
SAVED = 3
MICRO_BATCHES = 2
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def batches() -> torch.utils.data.DataLoader[Any]:
    """Of both ranks; Accelerate deals them out."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (2 * STEPS * MICRO_BATCHES * 4, 5), generator=draw)
    return torch.utils.data.DataLoader(list(tokens), batch_size=4)


class Run:
    """A training of :class:`tests.fsdp.both.Net`, two micro-batches a step, clipped."""

    def __init__(self, files: str = SHARDED) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        let_accelerate_shard_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type=files,
        )
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=MICRO_BATCHES, fsdp_plugin=plugin
        )
        model = make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, batches()
        )

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """This rank's losses and the norms of the steps."""
        figures = []
        loader = self.accelerator.skip_first_batches(self.loader, first * MICRO_BATCHES)
        for number, batch in enumerate(loader, first * MICRO_BATCHES):
            if number == last * MICRO_BATCHES:
                break
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                figures.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    figures.append(getattr(norm, "full_tensor", lambda n=norm: n)().item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return figures


def train_save_and_resume(directory: str) -> None:
    """Each implementation trains, and goes on from the other's files, of either kind."""
    figures, values = {}, {}
    for name in ENGINES:
        with engine(name):
            run = Run()
            check_engine(run.model, name)
            figures[name] = run.train(0, SAVED)
            for files in (SHARDED, FULL):
                run.accelerator.state.fsdp_plugin.set_state_dict_type(files)
                run.accelerator.save_state(str(Path(directory, name, files)))
            figures[name] += run.train(SAVED)
            values[name] = run.accelerator.get_state_dict(run.model)
    expected = figures["torch"]
    check_close(figures["zerocore"], expected)
    if run.accelerator.is_main_process:
        torch.testing.assert_close(values["zerocore"], values["torch"], rtol=1e-5, atol=1e-6)
    for writer, reader, files in (
        ("torch", "zerocore", FULL),
        ("zerocore", "zerocore", SHARDED),
        ("zerocore", "torch", FULL),
    ):
        with engine(reader):
            resumed = Run(files)
            resumed.accelerator.load_state(str(Path(directory, writer, files)))
            check_close(resumed.train(SAVED), expected[(MICRO_BATCHES + 1) * SAVED :])


@pytest.mark.nightly
def test_training_and_states_are_those_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(train_save_and_resume, 2, str(tmp_path), launch="torchrun", timeout=120)
