"""Trains a small GPT, sharded, in Accelerate's loop, in Lightning's Trainer or in Fabric's loop.

Runs on two ranks on the CPU, or one per GPU. Comments mark the lines that zerocore needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig
from launch import Rank, add_rank_options, run_parsed
from text_data import load_corpus, random_batch
from torch import Tensor

import zerocore

CONFIG = GPTConfig(num_layers=2, width=64, num_heads=2, context=64)
BATCH_SIZE = 8
ACCUMULATE = 2
MAX_NORM = 1.0


def batches(rank: Rank, count: int) -> list[tuple[Tensor, Tensor]]:
    """Draws random windows of bytes and the next bytes, different on each rank."""
    text = load_corpus().train
    draw = torch.Generator().manual_seed(rank.rank)
    return [random_batch(text, BATCH_SIZE, CONFIG.context, draw) for _ in range(count)]


def with_accelerate(rank: Rank, options: argparse.Namespace) -> list[float]:
    """Trains with Accelerate; saves half way, and continues from the loaded state."""
    from zerocore.integrations.accelerate import Accelerator  # replaces accelerate's

    accelerator = Accelerator(cpu=rank.device.type == "cpu", gradient_accumulation_steps=ACCUMULATE)
    model = GPT(CONFIG).to(accelerator.device)
    zerocore.shard(model, stage=options.stage)  # before the optimizer is built
    optimizer = torch.optim.AdamW(zerocore.param_groups(model, 0.1), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for index, (tokens, targets) in enumerate(batches(rank, options.steps * ACCUMULATE)):
        with accelerator.accumulate(model):
            loss = model(tokens.to(accelerator.device), targets.to(accelerator.device))
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if index == options.steps:
            accelerator.save_state(str(options.output))
            accelerator.load_state(str(options.output))
    return losses


def with_fabric(rank: Rank, options: argparse.Namespace) -> list[float]:
    """Trains with Fabric, and saves one file that any number of ranks loads, at any stage."""
    import lightning

    from zerocore.integrations.lightning import ShardedFabricStrategy

    strategy = ShardedFabricStrategy(stage=options.stage)
    fabric = lightning.Fabric(
        accelerator=rank.device.type, devices=rank.world_size, strategy=strategy
    )
    fabric.launch()
    model = fabric.setup_module(GPT(CONFIG))  # shards it, so before the optimizer is built
    groups = zerocore.param_groups(model, 0.1)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(groups, lr=3e-3))
    losses = []
    for index, batch in enumerate(batches(rank, options.steps * ACCUMULATE)):
        is_last = (index + 1) % ACCUMULATE == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(*fabric.to_device(batch))
            losses.append(loss.item())
            fabric.backward(loss / ACCUMULATE)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(options.output / "last.ckpt", {"model": model, "optimizer": optimizer})
    return losses


def with_lightning(rank: Rank, options: argparse.Namespace) -> list[float]:
    """Trains a LightningModule as with DDP, but with another strategy."""
    import lightning

    from zerocore.integrations.lightning import ShardedStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(CONFIG)
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(*batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(zerocore.param_groups(self, 0.1), lr=3e-3)

    trainer = lightning.Trainer(
        accelerator=rank.device.type,
        devices=rank.world_size,
        strategy=ShardedStrategy(stage=options.stage),
        max_steps=options.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        default_root_dir=options.output,
        use_distributed_sampler=False,  # each rank has its own batches
        logger=False,
        enable_checkpointing=False,
    )
    module = Module()
    data: Any = batches(rank, options.steps * ACCUMULATE)
    loader = torch.utils.data.DataLoader(data, batch_size=None)  # the data are batches already
    trainer.fit(module, loader)
    trainer.save_checkpoint(options.output / "last.ckpt")
    return module.losses


TRAINERS: dict[str, Callable[[Rank, argparse.Namespace], list[float]]] = {
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "lightning": with_lightning,
}


def work(rank: Rank, options: argparse.Namespace) -> None:
    """Trains on one rank."""
    torch.manual_seed(0)
    losses = TRAINERS[options.trainer](rank, options)
    if rank.is_first:
        print(f"{options.trainer} at stage {options.stage}: {losses[0]:.3f} -> {losses[-1]:.3f}")


def main() -> None:
    """Reads the options and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trainer", default="accelerate", choices=tuple(TRAINERS))
    add("--output", type=Path, default=Path("runs/other_trainers"), help="folder of checkpoints")
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--steps", type=int, default=50, help="updates of the weights")
    add_rank_options(parser)
    options = parser.parse_args()
    run_parsed(work, options, parser)


if __name__ == "__main__":
    main()
