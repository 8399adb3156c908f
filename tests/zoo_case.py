"""A model of the zoo as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss; all of it depends on nothing but the arguments.

    build(): the model; `seeded_build` fixes the generator that it draws from.
    make_batch(generator, rank, num_samples): one micro-batch of one rank.
    loss(model, batch): a scalar, the mean over the samples of the batch.
    units: what `zerocore.shard` is told about units; None to let it find them.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    units: tuple[str, ...] | None = None

    def seeded_build(self, seed: int = 0) -> nn.Module:
        """The model; the same weights for the same seed."""
        torch.manual_seed(seed)
        return self.build()

    def seeded_batch(self, seed: int, rank: int, num_samples: int) -> Batch:
        """The micro-batch number `seed` of `rank`; no two of them are equal."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return self.make_batch(generator, rank, num_samples)
