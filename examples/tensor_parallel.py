"""Trains a byte model with tensor parallelism and sharded data parallelism.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py [--parts 2] [--steps 30]

The ranks are a mesh of data parallelism (`dp`) by parts of each matrix (`tp`). Norms are computed
on parts of the sequence. `parallelize_module` cuts the model, `zerocore.shard` shards the local
tensors of each rank.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zerocore

WIDTH, LENGTH, NUM_BLOCKS = 64, 64, 2


class Block(nn.Module):
    """A block of a norm and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A model that embeds the last four bytes, then applies blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        x = self.mix(nn.functional.pad(x, (3, 0))).relu().transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cut(model: Model, mesh: DeviceMesh) -> None:
    """Cuts the blocks and the head over a 1-D mesh; the embedding stays whole."""
    first = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(model.blocks[0], mesh, first)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model.head, mesh, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=2, help="ranks that divide the matrices")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shape = (dist.get_world_size() // options.parts, options.parts)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = Model().to(device)
    cut(model, mesh["tp"])
    zerocore.shard(model, group=mesh["dp"])
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=3e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # bytes as tokens
    for step in range(1, options.steps + 1):
        # The same tokens on all ranks that divide a matrix.
        torch.manual_seed(step * shape[0] + mesh["dp"].get_local_rank())
        starts = torch.randint(len(text) - LENGTH - 1, (8,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = zerocore.clip_grad_norm_(model, 1.0)  # counts all parts
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm:.3f}")
    if dist.get_rank() == 0:
        print(zerocore.describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
