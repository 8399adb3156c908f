"""A model for tensor parallelism with sequence-parallel norms, and the same one whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, HIDDEN, LENGTH, NUM_CLASSES = 6, 12, 4, 5


class Block(nn.Module):
    """A layer that tensor parallelism cuts, behind a norm that it does not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A plain layer, blocks and an output layer."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(DIM, NUM_CLASSES, bias=False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def whole_model() -> Model:
    """Not cut; the same numbers on every rank."""
    torch.manual_seed(0)
    model = Model()
    for param in model.parameters():
        nn.init.normal_(param, 0.1, 0.4)
    return model


def cut_model(mesh: DeviceMesh) -> Model:
    """The same model, cut by tensor parallelism over a 1-D mesh."""
    model = whole_model()
    plan = {"last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    for number in range(len(model.blocks)):
        plan |= {
            f"blocks.{number}.norm": SequenceParallel(),
            f"blocks.{number}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{number}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    plan["blocks.0"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(model, mesh, plan)
    return model


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a rank of data parallelism."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(2, LENGTH, DIM, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, ranks: Sequence[int], step: int) -> Tensor:
    """Of the batches of these ranks of data parallelism."""
    inputs, classes = (
        torch.cat(each) for each in zip(*(batch_of(rank, step) for rank in ranks), strict=True)
    )
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), classes.flatten())
