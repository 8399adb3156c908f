"""Figures of steps in loggers: TensorBoard, Weights & Biases, the trainers' own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerocore
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks

TOKENS = 3 * WIDTH


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    with zerocore.emulate(4, "1GB/s", 0):
        yield make()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zerocore.shard(Chain(), stage=3)
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        model(torch.randn(3, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_metrics_are_those_of_the_report(
    trained: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = trained
    assert zerocore.metrics(model) == {}
    train(model, optimizer, 20)
    found = zerocore.metrics(model, tokens=TOKENS, peak_flops=1e12)
    report = zerocore.report(model, tokens=TOKENS, peak_flops=1e12)
    last, traced = report.steps[-1], report.steps[17]
    assert traced.communication is not None
    assert found["zerocore/step"] == last.number == 19
    for name in ("step_ms", "tokens_per_s", "mfu", "gathered_nbytes", "num_collectives"):
        assert found[f"zerocore/{name}"] == getattr(last, name)
    for name in ("all_gather_ms", "reduce_ms", "exposed_ms", "overlap"):
        assert found[f"zerocore/{name}"] == getattr(traced.communication, name)
    usage = zerocore.memory_usage(model, optimizer)
    for name in ("parameters", "gradients", "optimizer"):
        assert found[f"zerocore/memory/{name}"] == getattr(usage, name)
    assert found["zerocore/memory/resident_peak"] > 0
    assert "zerocore/num_retries" not in found  # the CPU's allocator does not count
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in found.values())
    assert "zerocore/tokens_per_s" not in zerocore.metrics(model)


def test_wrong_options_are_refused(trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, _ = trained
    with pytest.raises(ValueError, match="tokens must be positive"):
        zerocore.metrics(model, tokens=0)
    with pytest.raises(ValueError, match="not sharded"):
        zerocore.metrics(nn.Linear(2, 2))


def test_tensorboard(tmp_path: Path, trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = trained
    writer = SummaryWriter(str(tmp_path))
    for step in range(3):
        train(model, optimizer)
        for name, value in zerocore.metrics(model, tokens=TOKENS).items():
            writer.add_scalar(name, value, step)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("zerocore/step_ms")] == [0, 1, 2]
    found = events.Scalars("zerocore/memory/parameters")[-1].value
    assert found == zerocore.memory_usage(model).parameters


WANDB = """
import torch, wandb, zerocore
with zerocore.emulate(4, "1GB/s", 0):
    model = zerocore.shard(torch.nn.Linear(4, 4), stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    run = wandb.init(project="test", mode="offline")
    for step in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        run.log(zerocore.metrics(model, tokens=3), step=step)
    print(sorted(run.summary.keys()))
    run.finish()
"""


@pytest.mark.nightly
def test_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    command = [sys.executable, "-c", WANDB]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert "'zerocore/step_ms'" in result.stdout and "'zerocore/memory/pool_reserved'" in (
        result.stdout
    )
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def train_and_log(folder: str) -> list[dict[str, Any]]:
    """The log history of transformers' trainer."""
    from tests.integrations.language_model import build_model, samples
    from tests.integrations.test_transformers import arguments
    from zerocore.integrations.transformers import Trainer

    options = {"save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 1}
    trainer = Trainer(
        build_model(),
        arguments(Path(folder), **options),
        shard={"stage": 3},
        log_metrics=True,
        train_dataset=samples(32),
        eval_dataset=samples(6, seed=2),
    )
    trainer.train()
    return trainer.state.log_history


def test_transformers_trainer_logs_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for history in run_ranks(train_and_log, 2, str(tmp_path), launch="torchrun", timeout=200):
        losses = [entry for entry in history if "loss" in entry]
        assert losses and all(entry["zerocore/step_ms"] > 0 for entry in losses)
        evaluated = [entry for entry in history if "eval_loss" in entry]
        assert evaluated and all("zerocore/step_ms" not in entry for entry in evaluated)


def train_in_lightning(folder: str) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from tests.integrations.lightning_training import make_trainer
    from tests.integrations.test_lightning import make_module, micro_batches
    from zerocore.integrations.lightning import ShardedStrategy

    class LogMetrics(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.logger.log_metrics(zerocore.metrics(module), trainer.global_step)

    trainer = make_trainer(Path(folder), ShardedStrategy(stage=3), 3, callbacks=[LogMetrics()])
    trainer.logger = CSVLogger(folder, name="run")
    trainer.fit(make_module(), torch.utils.data.DataLoader(micro_batches()))


def test_a_callback_for_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run_ranks(train_in_lightning, 2, str(tmp_path), launch="torchrun", timeout=120)
    (file,) = tmp_path.glob("run/*/metrics.csv")
    names = file.read_text().splitlines()[0].split(",")
    assert {"zerocore/step_ms", "zerocore/memory/parameters"} <= set(names)


def log_by_accelerate(folder: str) -> None:
    from zerocore.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run")
    model, optimizer = accelerator.prepare(*make())
    train(model, optimizer, 2)
    accelerator.log(zerocore.metrics(model), step=1)
    accelerator.end_training()


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(log_by_accelerate, 2, str(tmp_path), launch="torchrun", timeout=120)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.step for event in events.Scalars("zerocore/step_ms")] == [1]
