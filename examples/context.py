"""Trains on sequences that are split over ranks (context parallelism), with a loss over all tokens.

    torchrun --nproc-per-node 4 examples/context.py [--parts 2] [--steps 30]

The ranks are a mesh of data parallelism (`dp`) by parts of a sequence (`cp`). The state is sharded
over all of them: the mesh is flattened. Each rank's loss is the sum over its tokens divided by the
number of tokens of all ranks, so gradients are summed, not averaged: `gradient_divide_factor=1`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

import zerocore

WIDTH, LENGTH, HEADS = 64, 64, 4


class GatherSequence(Function):
    """An all-gather of the parts of a sequence; a part's gradient is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, part.shape[-2]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(-2, ctx.group.rank() * ctx.length, ctx.length), None


class Block(nn.Module):
    """A block in which this rank's tokens attend to all earlier tokens, also other ranks'."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        first = 0
        if self.group is not None:
            k, v = (GatherSequence.apply(each, self.group) for each in (k, v))
            first = self.group.rank() * q.shape[-2]
        places = torch.arange(k.shape[-2], device=x.device)
        mask = places <= places[first : first + q.shape[-2], None]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(x).relu()


class Model(nn.Module):
    """A byte model; ``group``: the ranks with the parts of a sequence, None for whole ones."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Model, batch: Tensor, part: int, num_parts: int, num_tokens: int) -> Tensor:
    """Returns the sum of a part's token losses, divided by the number of all ranks' tokens."""
    places = torch.arange(LENGTH, device=batch.device).chunk(num_parts)[part]
    logits = model(batch[:, places], places)
    targets = batch[:, places + 1]
    flat = logits.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(*flat, reduction="sum") / num_tokens


def batch_of(text: Tensor, replica: int, step: int) -> Tensor:
    """Draws sequences, one token longer than the model's, the same for all parts."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    starts = torch.randint(len(text) - LENGTH - 1, (4,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    replicas = dist.get_world_size() // options.parts
    shape = (replicas, options.parts)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp"))

    torch.manual_seed(0)
    model = Model(mesh.get_group("cp")).to(device)
    group = mesh["dp", "cp"]._flatten("dp_cp")
    zerocore.shard(
        model, group=group, communication=zerocore.Communication(gradient_divide_factor=1)
    )
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=3e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # bytes as tokens
    replica, part = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    for step in range(1, options.steps + 1):
        batch = batch_of(text, replica, step)
        num_tokens = replicas * len(batch) * LENGTH
        loss = loss_of(model, batch, part, options.parts, num_tokens)
        loss.backward()
        zerocore.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
