"""Trains a byte model with experts on different ranks, and data parallelism of other parameters.

    torchrun --nproc-per-node 4 examples/experts.py [--parts 2] [--steps 30]

The ranks are a mesh of replicas of each expert (`edp`) by parts of the experts (`ep`). A token goes
to the expert of its position (hash routing, Roller et al. 2021, arXiv:2106.04426), by an
all-to-all of the ranks with different experts.
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

WIDTH, NUM_EXPERTS, LENGTH = 64, 8, 64


class AllToAll(Function):
    """An all-to-all: part r of each rank's tensor goes to rank r, and its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return AllToAll.forward(ctx, grads[0], ctx.group), None


class Experts(nn.Module):
    """The experts of this rank, which have two layers each."""

    def __init__(self, num_experts: int, part: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(part)  # the same on all ranks of the part
        up, down = (num_experts, WIDTH, 2 * WIDTH), (num_experts, 2 * WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(up, generator=draw) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(down, generator=draw) * WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (experts, tokens of each, width) to the same shape."""
        return torch.bmm(torch.relu(torch.bmm(tokens, self.up)), self.down)


class Block(nn.Module):
    """A block that mixes each token with those before it, then sends it to its expert."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.parts = group, group.size()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 4)
        self.experts = Experts(NUM_EXPERTS // self.parts, group.rank())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(nn.functional.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2).relu()
        by_expert = self.norm(x).view(-1, NUM_EXPERTS, WIDTH).transpose(0, 1)
        sent = by_expert.reshape(self.parts, NUM_EXPERTS // self.parts, -1, WIDTH)
        come = AllToAll.apply(sent, self.group).transpose(0, 1)  # all tokens for one expert
        found = self.experts(come.flatten(1, 2)).view(come.shape).transpose(0, 1)
        back = AllToAll.apply(found, self.group).view(by_expert.shape)
        return x + back.transpose(0, 1).reshape(x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=2, help="ranks that divide the experts")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    replicas = dist.get_world_size() // options.parts
    shape, names = (replicas, options.parts), ("edp", "ep")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

    torch.manual_seed(0)
    blocks = [Block(mesh.get_group("ep")) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).to(device)
    experts = zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])
    zerocore.shard(model, units=[Block], groups={"*.experts.*": experts})
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=3e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # bytes as tokens
    for step in range(1, options.steps + 1):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(text) - LENGTH - 1, (8,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = zerocore.clip_grad_norm_(model, 1.0)  # counts all experts
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm:.3f}")
    if dist.get_rank() == 0:
        print(zerocore.describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
