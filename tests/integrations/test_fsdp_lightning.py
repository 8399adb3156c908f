"""Lightning's Trainer and Fabric, as they are, over ``zerocore.fsdp``: as over torch's FSDP2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.harness import run_ranks
from tests.fsdp.both import loss_of, make_net
from tests.integrations.fully_sharded import ENGINES, check_close, check_engine, engine
from tests.integrations.lightning_training import MICRO_BATCHES, make_trainer

# Collecting the tests does not import it, which takes a second.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")

STEPS = 5
SAVED = 3
PAIRS = (("torch", "zerocore"), ("zerocore", "zerocore"), ENGINES[::-1])


def tokens() -> Tensor:
    """Micro-batches of both ranks."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 7, (2 * STEPS * MICRO_BATCHES, 4, 5), generator=draw)


def loader(count: int | None = None) -> torch.utils.data.DataLoader[Any]:
    """The first ones of them; a sampler deals them out."""
    return torch.utils.data.DataLoader(list(tokens()[:count]))


def parallelize(model: Any, device_mesh: Any) -> Any:
    """The function that users of the strategy write."""
    from torch.distributed.fsdp import fully_shard

    mesh = device_mesh["data_parallel"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.figures: list[float] = []  # losses, and the norm of each step

        def configure_model(self) -> None:
            if not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
                parallelize(self.net, self.device_mesh)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = loss_of(self.net, batch[0])
            self.figures.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
            self.figures.append(norm.full_tensor().item())

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("held_out", loss_of(self.net, batch[0]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def fit(folder: Path, steps: int, resume: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """The module and trainer after some steps."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = make_trainer(folder, strategy, steps, enable_model_summary=False, **options)
    module = make_module()
    trainer.fit(module, loader(), loader(4), ckpt_path=resume)
    return module, trainer


def train_with_trainer(directory: str) -> None:
    figures = {}
    for name in ENGINES:
        with engine(name):
            module, trainer = fit(Path(directory), SAVED)
            check_engine(module.net, name)
            trainer.save_checkpoint(Path(directory, name))
            (held_out,) = trainer.validate(module, loader(4), verbose=False)
            figures[name] = [*module.figures, held_out["held_out"]]
    check_close(figures["zerocore"], figures["torch"])
    rest = {}
    for writer, reader in (("torch", "torch"), *PAIRS):
        with engine(reader):
            module, trainer = fit(Path(directory), STEPS, Path(directory, writer))
            held_out = trainer.callback_metrics["held_out"].item()
            rest[writer, reader] = [*module.figures, held_out]
    assert len(module.figures) == (STEPS - SAVED) * (MICRO_BATCHES + 1)
    for pair in PAIRS:
        check_close(rest[pair], rest["torch", "torch"])


@pytest.mark.nightly
def test_a_trainer_does_what_it_does_over_fsdp2(tmp_path: Path) -> None:
    run_ranks(train_with_trainer, 2, str(tmp_path), launch="torchrun", timeout=120)


def launch_fabric() -> tuple[Any, Any, Any]:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, model, optimizer


def train_fabric(run: tuple[Any, Any, Any], first: int, last: int) -> list[float]:
    fabric, model, optimizer = run
    figures = []
    for step in range(first, last):
        for index in range(MICRO_BATCHES):
            number = MICRO_BATCHES * (2 * step + fabric.global_rank) + index
            with fabric.no_backward_sync(model, enabled=index < MICRO_BATCHES - 1):
                loss = loss_of(model, tokens()[number]) / MICRO_BATCHES
                fabric.backward(loss)
            figures.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        figures.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return figures


def train_with_fabric(directory: str) -> None:
    figures = {}
    for name in ENGINES:
        with engine(name):
            run = launch_fabric()
            check_engine(run[1].module, name)
            figures[name] = train_fabric(run, 0, SAVED)
            run[0].save(Path(directory, name), {"model": run[1], "optimizer": run[2]})
            figures[name] += train_fabric(run, SAVED, STEPS)
    check_close(figures["zerocore"], figures["torch"])
    for writer, reader in PAIRS:
        with engine(reader):
            run = launch_fabric()
            run[0].load(Path(directory, writer), {"model": run[1], "optimizer": run[2]})
            rest = figures["torch"][SAVED * (MICRO_BATCHES + 1) :]
            check_close(train_fabric(run, SAVED, STEPS), rest)


def test_fabric_does_what_it_does_over_fsdp2(tmp_path: Path) -> None:
    run_ranks(train_with_fabric, 2, str(tmp_path), launch="torchrun", timeout=120)
