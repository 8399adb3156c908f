"""Programs: gradients that zero_grad() drops or zeroes, of layers that few micro-batches use."""

from __future__ import annotations

import torch

from tests.distributed.programs.models import Block, SometimesTwo, mean_square
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


@program("micro-batches that zero_grad() drops, one of which alone used a layer", unused=True)
def accumulation_dropped(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(3):
        with run.no_sync(model):
            mean_square(model(run.tensor(4, 8, key=2 * step), step == 1)).backward()
        if step == 1:  # its loss is a spike
            optimizer.zero_grad()
        loss = mean_square(model(run.tensor(4, 8, key=2 * step + 1), step == 0))
        loss.backward()
        run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("zero_grad(set_to_none=False), a layer used once by one rank, and its decay", unused=True)
def zeroed_gradients(run: Run) -> None:
    model = run.shard(SometimesTwo(), [Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(4):
        loss = mean_square(model(run.tensor(4, 8, key=step), step == 1 and run.rank == 1))
        loss.backward()
        run.record(loss)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
