"""Every pair of options together: a training on real ranks has the losses of one process.

The rows are few, but in them every value of every option meets every value of every other one that
it can be combined with.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zerocore
from tests.distributed.harness import run_ranks
from tests.engine.test_recompute_events import keep_products

OPTIONS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "dtype": ("float32", "bfloat16", "bfloat16, reduced in float32", "float16"),
    "accumulate": ("sharded", "full"),
    "no_sync": (False, True),
    "clip": (None, "function", "in the step"),
    "optimizer": ("torch", "zerocore"),
    "checkpoint": (None, "reentrant", "non-reentrant", "selective"),
    "compile": (None, "eager", "aot_eager", "model"),
    "keep_fp32": (False, True),
    "grad_dtype": (None, torch.bfloat16),
    "prefetch": (0, 1, 2),
    "frozen": (False, True),
}
# Compiling takes most of the time: where it has its own tests, these are run more often.
EAGER_OPTIONS = {**OPTIONS, "compile": (None,), "dtype": OPTIONS["dtype"][1:]}
# Those that matter to replicas: neither what is computed twice nor what is compiled knows of them.
HYBRID_OPTIONS = {
    **OPTIONS,
    "dtype": ("float32", "bfloat16, reduced in float32", "bfloat16, in order"),
    "checkpoint": (None, "non-reentrant"),
    "compile": (None,),
    "prefetch": (0, 2),
}
# Torch's optimizers do not clip, and take only gradients of the weights' dtype.
IMPOSSIBLE = {
    (("clip", "in the step"), ("optimizer", "torch")),
    (("optimizer", "torch"), ("grad_dtype", torch.bfloat16)),
}
NUM_STEPS, NUM_MICRO_BATCHES = 3, 2
WIDTH = 12
MAX_NORM = 0.05  # of gradients that are several times as large
# Relative to the loss: how far sums in another order may lead in this dtype.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

Row = dict[str, Any]
Options = Mapping[str, tuple[Any, ...]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Every two options of a row, in the order of OPTIONS."""
    return set(combinations([(name, row[name]) for name in OPTIONS if name in row], 2))


def all_pairs(options: Options) -> set[Pair]:
    """Every two values of two options that can be combined."""
    names = combinations(options, 2)
    pairs = {((a, x), (b, y)) for a, b in names for x in options[a] for y in options[b]}
    return pairs - IMPOSSIBLE


def cover_pairs(options: Options = OPTIONS, seed: int = 4, num_candidates: int = 40) -> list[Row]:
    """Rows that hold all pairs; each the best of some that greedily take up pairs not held yet."""
    draw = random.Random(seed)
    missing = all_pairs(options)
    rows: list[Row] = []
    while missing:
        starts = draw.choices(sorted(missing, key=str), k=num_candidates)
        candidates = [complete(start, missing, options, draw) for start in starts]
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def complete(start: Pair, missing: set[Pair], options: Options, draw: random.Random) -> Row:
    """A row with `start` in it: option by option the value that brings most of the `missing`."""
    row: Row = dict(start)
    for name in draw.sample(list(options), len(options)):
        if name in row:
            continue
        values = draw.sample(options[name], len(options[name]))
        rows = [{**row, name: value} for value in values]
        possible = [row for row in rows if not IMPOSSIBLE & pairs_of(row)]
        row = max(possible, key=lambda row: len(missing & pairs_of(row)))
    return {name: row[name] for name in options}


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
        self.checkpointing: dict[str, Any] | None = None
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        for block in self.blocks:
            x = (
                block(x)
                if self.checkpointing is None
                else checkpoint(block, x, **self.checkpointing)
            )
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
    options = {
        "keep_fp32": ("norm",) if row["keep_fp32"] else (),
        "grad_dtype": row["grad_dtype"],
    }
    if row["dtype"] == "float32":
        return zerocore.MixedPrecision(**options) if any(options.values()) else None
    reduce_dtype = torch.float32 if "reduced" in row["dtype"] else None
    if "in order" in row["dtype"]:
        options["wire_dtype"] = torch.bfloat16
    return zerocore.MixedPrecision(
        compute_dtype(row), reduce_dtype, output_dtype=torch.float32, **options
    )


def compute_dtype(row: Row) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, row["dtype"].split(",")[0])
    return dtype


@dataclass
class Update:
    """Unscales, clips, steps, after a backward. Alike in both trainings but for the names."""

    row: Row
    optimizer: torch.optim.Optimizer
    clip: Any  # None: the optimizer's step does it, and unscales before

    def __post_init__(self) -> None:
        is_half = compute_dtype(self.row) == torch.float16
        self.scaler = GradScaler("cpu", init_scale=2.0**8, enabled=is_half)

    def run(self, parameters: Iterable[nn.Parameter]) -> None:
        norm = None
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = self.clip(parameters, MAX_NORM) if self.row["clip"] else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.row["clip"]:
            norm = self.optimizer.grad_norm if norm is None else norm
            assert norm > 2 * MAX_NORM


# An eps that is not small: Adam would turn the rounding of a tiny gradient into a step.
ADAM = {"lr": 2e-2, "eps": 1e-3, "weight_decay": 0.1}
CHECKPOINTING: dict[str | None, Any] = {
    None: None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
}


def build_sharded(row: Row, group: Any) -> Any:
    """The model of a row, compiled and checkpointed as it says."""
    model: Any = zerocore.shard(
        Net(row["frozen"]),
        stage=row["stage"],
        group=group,
        communication=zerocore.Communication(
            accumulate=row["accumulate"], prefetch=row["prefetch"]
        ),
        mixed_precision=policy(row),
    )
    model.checkpointing = CHECKPOINTING[row["checkpoint"]]
    torch.compiler.reset()
    if row["compile"] == "model":
        model.compile(backend="aot_eager")
    elif row["compile"] is not None:
        for block in model.blocks:
            block.compile(backend=row["compile"])
    return model


def make_update(row: Row, parameters: Iterable[nn.Parameter]) -> Update:
    """The row's optimizer and what clips for it."""
    if row["optimizer"] == "torch":
        return Update(
            row, torch.optim.AdamW(parameters, fused=True, **ADAM), zerocore.clip_grad_norm_
        )
    if row["clip"] == "in the step":
        return Update(row, zerocore.optim.AdamW(parameters, clip_grad_norm=MAX_NORM, **ADAM), None)
    return Update(row, zerocore.optim.AdamW(parameters, **ADAM), zerocore.clip_grad_norm_)


def train_sharded(row: Row, group: Any) -> list[float]:
    """This rank's losses."""
    model = build_sharded(row, group)
    update = make_update(row, model.parameters())
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

    def __init__(self, row: Row, num_ranks: int) -> None:
        self.dtype, self.num_ranks = compute_dtype(row), num_ranks
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
        for rank in range(self.num_ranks):
            total = 0.0
            for loss in micro_losses(self.model, step, rank):
                self.update.scaler.scale(loss).backward()
                add_gradients(pairs, self.num_ranks)
                total += loss.item()
            losses.append(total)
        if self.update.row["grad_dtype"] is not None:
            round_gradients(self.main.parameters(), self.update.row["grad_dtype"])
        self.update.run(self.main.parameters())
        return losses


def round_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """As `parameter.grad` of this dtype keeps them."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(dtype).float()


def add_gradients(pairs: Iterable[tuple[Tensor, Tensor]], num_ranks: int) -> None:
    """Adds this rank's share to the main weights' gradients."""
    for main, weight in pairs:
        if weight.grad is not None:
            share = weight.grad.float() / num_ranks
            main.grad = share if main.grad is None else main.grad + share
            weight.grad = None


def cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    """Inputs are cast to one dtype, outputs to another."""
    module.register_forward_pre_hook(lambda _, args: (args[0].to(inside), *args[1:]))
    module.register_forward_hook(lambda _, __, output: output.to(outside))


def tolerance(row: Row) -> float:
    """Of the widest rounding in the row."""
    dtypes = {compute_dtype(row), row["grad_dtype"]} & set(TOLERANCES)
    return max(TOLERANCES[dtype] for dtype in dtypes)


def train_rows(rows: list[Row], mesh_shape: tuple[int, int] | None) -> list[list[float]]:
    group = mesh_shape and init_device_mesh("cpu", mesh_shape)
    answers = []
    for row in rows:
        print(row, flush=True)  # shown if the rank fails
        answers.append(train_sharded(row, group))
    return answers


def assert_as_one_process(
    rows: list[Row], num_ranks: int, mesh_shape: tuple[int, int] | None = None
) -> None:
    by_rank = run_ranks(train_rows, num_ranks, rows, mesh_shape, timeout=240)
    wrong = []
    for row, *losses in zip(rows, *by_rank, strict=True):
        reference = Reference(row, num_ranks)
        expected = torch.tensor([reference.step(step) for step in range(NUM_STEPS)])
        error = (torch.tensor(losses).T - expected).abs() / expected
        if not error.max() <= tolerance(row):
            wrong.append(f"{row}: {losses}, expected {expected.T.tolist()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("options", "most"), [(OPTIONS, 24), (EAGER_OPTIONS, 20), (HYBRID_OPTIONS, 17)]
)
def test_rows_hold_all_pairs(options: Options, most: int) -> None:
    rows = cover_pairs(options)
    assert rows == cover_pairs(options)
    held = {pair for row in rows for pair in pairs_of(row)}
    assert held == all_pairs(options)
    assert len(rows) <= most


def test_every_pair_of_options_trains_as_one_process() -> None:
    assert_as_one_process(cover_pairs(EAGER_OPTIONS), num_ranks=2)


@pytest.mark.nightly
def test_every_pair_with_compiled_blocks_trains_as_one_process() -> None:
    assert_as_one_process(cover_pairs(), num_ranks=2)


@pytest.mark.nightly
def test_pairs_of_options_with_replicas() -> None:
    assert_as_one_process(cover_pairs(HYBRID_OPTIONS), 4, mesh_shape=(2, 2))
