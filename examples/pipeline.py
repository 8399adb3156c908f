"""Trains a byte model in pipeline stages, each sharded over its data-parallel ranks.

    torchrun --nproc-per-node 4 examples/pipeline.py [--stages 2] [--schedule 1F1B] [--steps 30]

The ranks are a mesh of stages (`pp`) by data parallelism (`dp`). Each rank builds the stage that
it computes, and `zerocore.shard` shards it over the ranks with the same stage. A schedule of
torch sends activations and gradients between stages.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import zerocore

WIDTH, LENGTH, NUM_BLOCKS, BATCH, NUM_MICRO = 64, 64, 4, 8, 4
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Block(nn.Module):
    """A block that mixes the last four positions, then applies two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(nn.functional.pad(self.norm(x).transpose(1, 2), (3, 0)))
        return x + self.down(self.up(mixed.transpose(1, 2)).relu())


def build_stage(index: int, num_stages: int) -> nn.Sequential:
    """Makes the layers of one stage, with their names in the whole model."""
    torch.manual_seed(0)  # all stages are parts of the same model
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    layers = [nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)]
    each = NUM_BLOCKS // num_stages
    first = 1 + index * each if index else 0
    end = len(layers) if index == num_stages - 1 else 1 + (index + 1) * each
    return nn.Sequential(*layers)[first:end]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shape = (options.stages, dist.get_world_size() // options.stages)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))

    index = mesh["pp"].get_local_rank()
    model = zerocore.shard(build_stage(index, options.stages).to(device), group=mesh["dp"])
    stage = PipelineStage(model, index, options.stages, device, group=mesh.get_group("pp"))
    schedule = SCHEDULES[options.schedule](stage, NUM_MICRO, loss_fn=loss_of)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=3e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # bytes as tokens
    for step in range(1, options.steps + 1):
        # The same tokens on all stages.
        torch.manual_seed(step * shape[1] + mesh["dp"].get_local_rank())
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        losses: list[Tensor] = []
        if stage.is_last:
            schedule.step(target=batch[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(*[batch[:, :-1].contiguous()] * stage.is_first)
        norm = zerocore.clip_grad_norm_(model, 1.0, across=mesh["pp"])  # counts all stages
        optimizer.step()
        optimizer.zero_grad()
        if stage.is_last and mesh["dp"].get_local_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {torch.stack(losses).mean():.3f}, gradient norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
