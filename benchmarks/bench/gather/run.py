"""Times forwards of units that compute nothing, so that only gathers take time."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.lib.systems import System, wrap_model

NUM_UNITS = 4
NUM_PARAMS = 9  # of a unit, as in a transformer block
FORWARDS = 5  # in a system's turn; the fastest counts
MIB = 2**20


class Unit(nn.Module):
    """A module with parameters that are gathered for its forward, which does not read them.

    They are eight matrices of equal size and a vector, float32, about `nbytes` in all.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        width = 64
        rows = nbytes // 4 // width // (NUM_PARAMS - 1)
        matrices = [nn.Parameter(torch.zeros(rows, width)) for _ in range(NUM_PARAMS - 1)]
        self.params = nn.ParameterList([*matrices, nn.Parameter(torch.zeros(width))])

    def forward(self, x: Tensor) -> Tensor:
        """Gives `x` back."""
        return x


class Units(nn.Module):
    """A chain of units."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit(nbytes) for _ in range(NUM_UNITS))

    def forward(self, x: Tensor) -> Tensor:
        """Calls each unit in turn."""
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def gather_on_this_rank(
    systems: list[System], nbytes: int, num_rounds: int
) -> dict[str, list[float]]:
    """Measures the milliseconds of gathering a unit of `nbytes`, by label, a figure a round.

    In a round each system takes its turn, and the turns rotate. Ranks begin a forward together.
    """
    models: dict[str, nn.Module] = {}
    for system in systems:
        model = Units(nbytes)
        models[system.label] = wrap_model(system, model, model.blocks)
    x = torch.zeros(1)
    for model in models.values():
        model(x)
        model(x)
    found: dict[str, list[float]] = {label: [] for label in models}
    labels = list(models)
    for index in range(num_rounds):
        first = index % len(labels)
        for label in labels[first:] + labels[:first]:
            found[label].append(min(_forward_ms(models[label], x) for _ in range(FORWARDS)))
    return found


def _forward_ms(model: nn.Module, x: Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    model(x)
    return 1e3 * (time.perf_counter() - begin) / NUM_UNITS


def medians(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Returns the median over the ranks for each system and round."""
    return {
        label: [median(values) for values in zip(*(rank[label] for rank in by_rank), strict=True)]
        for label in by_rank[0]
    }
