"""Programs that divide experts, sequences or matrices over the ranks, beside data parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from examples.context import GatherSequence
from tests.distributed.programs.models import SIZE, Block, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run
from tests.sharding.experts import DIM, NUM_EXPERTS, Model, MoE, spread_model, whole_model
from tests.sharding.tensor_parallel import Model as CutModel
from tests.sharding.tensor_parallel import cut_model
from tests.sharding.tensor_parallel import whole_model as uncut_model


def make_experts(run: Run) -> Model:
    """All experts where nothing divides them, else those of this rank."""
    axis = run.axis()
    if axis is None:
        return whole_model()
    each = NUM_EXPERTS // axis.size()
    return spread_model(axis, [each * rank for rank in range(axis.size() + 1)])


def rows(run: Run, key: int) -> Tensor:
    """Tokens of this rank."""
    return run.tensor(5, DIM, key=key)


@program("experts over ranks, which compute tokens of all of them")
def parallel_experts(run: Run) -> None:
    model = run.shard_experts(make_experts(run), [MoE])
    optimizer = adamw(model.parameters())
    for step in range(4):
        update(run, model, optimizer, model(rows(run, step)).square().mean())


@program("experts over ranks, two micro-batches for a step, the first under no_sync")
def parallel_experts_accumulated(run: Run) -> None:
    model = run.shard_experts(make_experts(run), [MoE])
    optimizer = sgd(model)
    for step in range(3):
        with run.no_sync(model):
            (model(rows(run, 2 * step)).square().mean() / 2).backward()
        update(run, model, optimizer, model(rows(run, 2 * step + 1)).square().mean() / 2)


@program("experts over ranks, their gradients clipped to the norm of all")
def parallel_experts_clipped(run: Run) -> None:
    model = run.shard_experts(make_experts(run), [MoE])
    optimizer = sgd(model)
    for step in range(3):
        loss = model(rows(run, step)).square().mean()
        loss.backward()
        run.average(model)
        run.record(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@program("experts over ranks that get no tokens in some steps", unused=True)
def parallel_experts_idle(run: Run) -> None:
    whole = make_experts(run)
    with torch.no_grad():
        for block in whole.blocks:
            block.router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))  # all to the first
    model = run.shard_experts(whole, [MoE])
    optimizer = adamw(model.parameters())
    for step in range(3):
        update(run, model, optimizer, model(rows(run, step)).square().mean())


@program("experts over ranks beside a frozen router, evaluated between steps")
def parallel_experts_evaluated(run: Run) -> None:
    whole = make_experts(run)
    for block in whole.blocks:
        block.router.requires_grad_(False)
    model = run.shard_experts(whole, [MoE])
    optimizer = sgd(model)
    for step in range(3):
        update(run, model, optimizer, model(rows(run, step)).square().mean())
        with torch.no_grad():
            run.record(model(rows(run, 10 + step)).square().mean())


class Attention(nn.Module):
    """Of this rank's tokens to those of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.group is not None:
            k, v = (GatherSequence.apply(each, self.group) for each in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


def part_of(run: Run, sequence: Tensor) -> Tensor:
    """This rank's tokens."""
    axis = run.axis()
    return sequence if axis is None else sequence.chunk(axis.size(), dim=1)[axis.rank()]


def attend(run: Run, optimizer_of: Any, micro_batches: int, used: int) -> None:
    """Steps with a loss over the first ``used`` tokens of each sequence."""
    model = run.shard_shared(nn.Sequential(Attention(run.axis()), Block(), Attention(run.axis())))
    optimizer = optimizer_of(model)
    for step in range(3):
        for micro in range(micro_batches):
            # The same on each rank.
            whole = run.tensor(2, 8, SIZE, key=step * micro_batches + micro, shared=True)
            weight = part_of(run, torch.arange(8).expand(2, 8)) < used
            with nullcontext() if micro == micro_batches - 1 else run.no_sync(model):
                losses = model(part_of(run, whole)).square().mean(-1)
                (losses.mul(weight).sum() / (2 * used)).backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("sequences over ranks, with a loss over all tokens")
def parallel_sequences(run: Run) -> None:
    attend(run, sgd, micro_batches=1, used=8)


@program("sequences over ranks whose second half is padding, two micro-batches for a step")
def parallel_sequences_padded(run: Run) -> None:
    # The gradient of a bias of keys is rounding and nothing else.
    attend(run, lambda model: adamw(model.parameters(), eps=1e-3), micro_batches=2, used=4)


def cut_over_ranks(run: Run, frozen: bool, clip: bool) -> None:
    """Trains what ``parallelize_module`` has cut, with sequence-parallel norms."""

    def prepared(model: CutModel) -> CutModel:
        model.blocks[0].requires_grad_(not frozen)
        return model

    model = run.shard_cut(lambda mesh: prepared(cut_model(mesh)), prepared(uncut_model()))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        logits = model(run.tensor(2, 4, DIM, key=step, shared=True))
        loss = logits.square().mean()
        loss.backward()
        run.average(model)
        run.record(loss)
        if clip:
            run.record(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@program("matrices over ranks (tensor parallelism), norms sequence-parallel")
def parallel_matrices(run: Run) -> None:
    cut_over_ranks(run, frozen=False, clip=False)


@program("matrices over ranks, gradients clipped to the norm of all")
def parallel_matrices_clipped(run: Run) -> None:
    cut_over_ranks(run, frozen=False, clip=True)


@program("matrices over ranks, the first block frozen")
def parallel_matrices_frozen(run: Run) -> None:
    cut_over_ranks(run, frozen=True, clip=False)
