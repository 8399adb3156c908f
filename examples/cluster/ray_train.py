"""Trains with Ray Train, which restarts the ranks after a failure, from the newest checkpoint.

    python examples/cluster/ray_train.py [--workers 2] [--gpus] [--out FOLDER] [--steps 100]

All nodes must see the folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import zerocore


def train(options: dict[str, Any]) -> None:
    """Trains on every rank; Ray has made the process group."""
    import ray.train
    from ray.train.torch import get_device

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = zerocore.shard(torch.nn.Sequential(*layers).to(get_device()), stage=3)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = zerocore.Checkpoints(options["out"], model, optimizer, keep=2)
    first = checkpoints.load() or 0  # the newest checkpoint; None if there is none
    if first and rank == 0:
        print(f"resumes after step {first}")
    for step in range(first + 1, options["steps"] + 1):
        torch.manual_seed(step * ranks + rank)  # each rank's own batch
        batch = torch.randn(8, 64).to(get_device())
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            checkpoints.save(step)
            ray.train.report({"step": step, "loss": loss.item()})
    checkpoints.wait()
    if rank == 0:
        print(f"step {options['steps']}: loss {loss.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--out", type=Path, default=Path("ray-run"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    import ray.train
    from ray.train.torch import TorchTrainer

    out = options.out.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": str(out / "checkpoints"), "steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=ray.train.RunConfig(
            storage_path=str(out), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
