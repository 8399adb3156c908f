"""Every pair of options together: a training on two ranks has the losses of one process.

The rows are few, but in them every value of every option meets every value of every other one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks

OPTIONS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "dtype": ("float32", "bfloat16", "bfloat16, reduced in float32", "float16"),
    "accumulate": ("sharded", "full"),
    "no_sync": (False, True),
    "clip": (False, True),
    "optimizer": ("torch", "zerocore"),
    "checkpoint": (None, "reentrant", "non-reentrant"),
    "compile": (None, "eager", "aot_eager"),
    "keep_fp32": (False, True),
    "prefetch": (0, 1, 2),
    "find_unused": (False, True),
    "frozen": (False, True),
}
NUM_RANKS, NUM_STEPS, NUM_MICRO_BATCHES = 2, 3, 2
WIDTH = 12
MAX_NORM = 0.05  # of gradients that are several times as large
# Relative to the loss: how far sums in another order may lead in this dtype.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """Every two options of a row, in the order of OPTIONS."""
    return combinations([(name, row[name]) for name in OPTIONS if name in row], 2)


def all_pairs() -> set[Pair]:
    """Every two values of two options."""
    names = combinations(OPTIONS, 2)
    return {((a, x), (b, y)) for a, b in names for x in OPTIONS[a] for y in OPTIONS[b]}


def cover_pairs(seed: int = 0, num_candidates: int = 40) -> list[Row]:
    """Rows that hold all pairs; each the best of some that greedily take up pairs not held yet."""
    draw = random.Random(seed)
    missing = all_pairs()
    rows: list[Row] = []
    while missing:
        in_order = sorted(missing, key=str)
        candidates = [complete(draw.choice(in_order), missing, draw) for _ in range(num_candidates)]
        best = max(candidates, key=lambda row: len(missing & set(pairs_of(row))))
        missing -= set(pairs_of(best))
        rows.append(best)
    return rows


def complete(start: Pair, missing: set[Pair], draw: random.Random) -> Row:
    """A row with `start` in it: option by option the value that brings most of the `missing`."""
    row: Row = dict(start)
    for name in draw.sample(list(OPTIONS), len(OPTIONS)):
        if name in row:
            continue
        values = draw.sample(OPTIONS[name], len(OPTIONS[name]))
        row[name] = max(values, key=lambda v: len(missing & set(pairs_of({**row, name: v}))))
    return {name: row[name] for name in OPTIONS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks, a weight that no rank uses, and one that some rank uses in some steps."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.full((3,), 0.3))
        self.use_reentrant: bool | None = None  # None: no checkpointing
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        x = self.head(x)
        return x * self.sometimes if uses_all else x


def micro_losses(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Each micro-batch's share of the loss of one step of one rank."""
    for index in range(NUM_MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_()  # for reentrant checkpoints
        target = torch.randn(4, 3, generator=generator)
        output = model(x, uses_all=step > 0 and rank == 1)
        yield (output - target).square().mean() / NUM_MICRO_BATCHES


def policy(row: Row) -> zerocore.MixedPrecision | None:
    """The row's mixed precision."""
    kept = ("norm",) if row["keep_fp32"] else ()
    if row["dtype"] == "float32":
        return zerocore.MixedPrecision(keep_fp32=kept) if kept else None
    reduce_dtype = torch.float32 if "reduced" in row["dtype"] else None
    return zerocore.MixedPrecision(
        compute_dtype(row), reduce_dtype, output_dtype=torch.float32, keep_fp32=kept
    )


def compute_dtype(row: Row) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, row["dtype"].split(",")[0])
    return dtype


@dataclass
class Update:
    """What follows the backward: unscale, clip, step. Alike in both trainings but for the names."""

    row: Row
    optimizer: torch.optim.Optimizer
    clip: Any

    def __post_init__(self) -> None:
        is_half = compute_dtype(self.row) == torch.float16
        self.scaler = GradScaler("cpu", init_scale=2.0**8, enabled=is_half)

    def run(self, parameters: Iterable[nn.Parameter]) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.row["clip"]:
            assert self.clip(parameters, MAX_NORM) > 2 * MAX_NORM
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


# An eps that is not small: Adam would turn the rounding of a tiny gradient into a step.
ADAM = {"lr": 2e-2, "eps": 1e-3, "weight_decay": 0.1}


def train_sharded(row: Row) -> list[float]:
    """This rank's losses."""
    model = zerocore.shard(
        Net(row["frozen"]),
        stage=row["stage"],
        accumulate=row["accumulate"],
        prefetch=row["prefetch"],
        find_unused_parameters=row["find_unused"],
        mixed_precision=policy(row),
    )
    if row["checkpoint"] is not None:
        model.use_reentrant = row["checkpoint"] == "reentrant"
    if row["compile"] is not None:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend=row["compile"])
    if row["optimizer"] == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    else:
        optimizer = zerocore.optim.AdamW(model.parameters(), **ADAM)
    update = Update(row, optimizer, zerocore.clip_grad_norm_)
    losses = []
    for step in range(NUM_STEPS):
        total = 0.0
        batches = micro_losses(model, step, dist.get_rank())
        for index in range(NUM_MICRO_BATCHES):
            held = row["no_sync"] and index < NUM_MICRO_BATCHES - 1
            with zerocore.no_sync(model) if held else nullcontext():
                loss = next(batches)
                update.scaler.scale(loss).backward()
            total += loss.item()
        losses.append(total)
        update.run(model.parameters())
    return losses


class Reference:
    """One process that plays all ranks in plain torch: float32 weights, a model in the dtype."""

    def __init__(self, row: Row) -> None:
        self.dtype = compute_dtype(row)
        self.main, self.model = Net(row["frozen"]), Net(row["frozen"]).to(self.dtype)
        cast_around(self.model, self.dtype, torch.float32)
        for block in self.model.blocks:
            if row["keep_fp32"]:
                cast_around(block.norm.float(), torch.float32, self.dtype)
        optimizer = torch.optim.AdamW(self.main.parameters(), **ADAM)
        self.update = Update(row, optimizer, nn.utils.clip_grad_norm_)

    def step(self, step: int) -> list[float]:
        """The losses of all ranks."""
        pairs = list(zip(self.main.parameters(), self.model.parameters(), strict=True))
        with torch.no_grad():
            for main, weight in pairs:
                weight.copy_(main)
        losses = []
        for rank in range(NUM_RANKS):
            total = 0.0
            for loss in micro_losses(self.model, step, rank):
                self.update.scaler.scale(loss).backward()
                add_gradients(pairs)
                total += loss.item()
            losses.append(total)
        self.update.run(self.main.parameters())
        return losses


def add_gradients(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Adds this rank's share to the main weights' gradients."""
    for main, weight in pairs:
        if weight.grad is not None:
            share = weight.grad.float() / NUM_RANKS
            main.grad = share if main.grad is None else main.grad + share
            weight.grad = None


def cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    """Inputs are cast to one dtype, outputs to another."""
    module.register_forward_pre_hook(lambda _, args: (args[0].to(inside), *args[1:]))
    module.register_forward_hook(lambda _, __, output: output.to(outside))


def train_rows(rows: list[Row]) -> list[list[float]]:
    answers = []
    for row in rows:
        print(row, flush=True)  # shown if the rank fails
        answers.append(train_sharded(row))
    return answers


def test_rows_hold_all_pairs() -> None:
    rows = cover_pairs()
    assert rows == cover_pairs()
    assert {pair for row in rows for pair in pairs_of(row)} == all_pairs()
    assert len(rows) <= 24


@pytest.mark.slow
def test_every_pair_of_options_trains_as_one_process() -> None:
    rows = cover_pairs()
    by_rank = run_ranks(train_rows, NUM_RANKS, rows, timeout=240)
    wrong = []
    for row, *losses in zip(rows, *by_rank, strict=True):
        reference = Reference(row)
        expected = torch.tensor([reference.step(step) for step in range(NUM_STEPS)])
        error = (torch.tensor(losses).T - expected).abs() / expected
        if not error.max() <= TOLERANCES[compute_dtype(row)]:
            wrong.append(f"{row}: {losses}, expected {expected.T.tolist()}")
    assert not wrong, "\n".join(wrong)
