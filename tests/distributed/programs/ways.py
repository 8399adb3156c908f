"""Programs: ranks that take different ways through the model, from the first step on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.programs.models import Block, Net, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Tower(Net):
    """A branch for some batches, called between the blocks and registered behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Block()

    def forward(self, x: Tensor, seen: bool) -> Tensor:
        x = self.blocks[0](self.inp(x))
        if seen:
            x = self.tower(x)
        return self.out(self.blocks[1](x))


@program("a branch that one rank takes, called before it is registered", unused=True)
def one_expert_by_rank(run: Run) -> None:
    model = run.shard(Tower(), [Block])
    optimizer = sgd(model)
    for x in run.batches(4):
        update(run, model, optimizer, mean_square(model(x, run.rank == 1)))


@program("an early exit whose depth differs by rank and step, in the first step too", unused=True)
def early_exit_at_once(run: Run) -> None:
    class Exits(Net):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                if index == depth:
                    return self.out(x)
                x = block(x)
            return self.out(self.norm(x))

    model = run.shard(Exits(3), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(5)):
        update(run, model, optimizer, mean_square(model(x, (2 * run.rank + step) % 4)))


@program("layer drop: each rank leaves out blocks by a coin of its own", unused=True)
def layer_drop_by_rank(run: Run) -> None:
    class Dropping(Net):
        def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
            x = self.inp(x)
            for block, is_kept in zip(self.blocks, kept, strict=True):
                x = block(x) if is_kept else x
            return self.out(self.norm(x))

    model = run.shard(Dropping(4), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(6)):
        kept = (run.tensor(4, key=100 + step) > 0).tolist()
        update(run, model, optimizer, mean_square(model(x, kept)))


@program("a batch on which one rank's forward raises, and that all ranks agree to skip")
def batch_skipped_together(run: Run) -> None:
    class Fragile(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.inp(x))
            if x.shape[0] == 3:
                raise KeyError("a bad batch")
            return self.out(self.norm(self.blocks[1](x)))

    model = run.shard(Fragile(), [Block])
    optimizer = sgd(model)
    for step in range(4):
        failed, loss = torch.zeros(1), None
        try:
            bad = step % 2 == 1 and run.rank == step // 2
            loss = mean_square(model(run.tensor(3 if bad else 4, 8, key=step)))
        except KeyError:
            failed += 1
        dist.all_reduce(failed)
        if loss is not None and not failed.item():
            update(run, model, optimizer, loss)
