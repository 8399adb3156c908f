"""The bytes of a step of two micro-batches, by dtype and way to accumulate, written out by hand."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 16


class Block(nn.Module):
    """Elements: 256 and 16 of the linear layer, 16 and 16 of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


POLICIES: dict[str, zerocore.MixedPrecision | None] = {
    "float32": None,
    "bfloat16": zerocore.MixedPrecision(BF16),
    "reduced in float32": zerocore.MixedPrecision(BF16, reduce_dtype=FP32),
    "norms kept": zerocore.MixedPrecision(BF16, keep_fp32=("norm",)),
    "norms kept, reduced in float32": zerocore.MixedPrecision(
        BF16, reduce_dtype=FP32, keep_fp32=("norm",)
    ),
    "bfloat16 model": zerocore.MixedPrecision(main_dtype=FP32),
    "gradients kept in bfloat16": zerocore.MixedPrecision(BF16, FP32, grad_dtype=BF16),
}
# Bytes of the regions of one block in (gathers, reductions). Parameters begin at multiples of 128
# bytes. In float32: 1024, 64 up to 1152, 64 up to 1280, 64. In bfloat16: 512, 32 up to 640, 32 up
# to 768, 32. The kept norm is a region of its own: 64 up to 128, 64; the linear layer's 512, 32.
# A gradient has the places of its parameter, in elements: reduced in float32 it takes twice the
# bytes of bfloat16.
NBYTES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "float32": ((1344,), (1344,)),
    "bfloat16": ((800,), (800,)),
    "reduced in float32": ((800,), (1600,)),
    "norms kept": ((544, 192), (544, 192)),
    "norms kept, reduced in float32": ((544, 192), (1088, 192)),
    "bfloat16 model": ((800,), (800,)),
    "gradients kept in bfloat16": ((800,), (1600,)),
}
FORWARD = ["gather 0", "gather 1"]
# The last block stays gathered between forward and backward; the one before it is gathered ahead.
BACKWARD = ["gather 0"]
REDUCE = ["reduce 1", "reduce 0"]
STEP = ["gather 0", "gather 1"]
# By stage and way to accumulate: the moves of the micro-batch under no_sync, and of the last one.
MOVES: dict[tuple[int, str], list[str]] = {
    (0, "sharded"): [*REDUCE],
    (0, "full"): [*REDUCE],
    (1, "sharded"): [*REDUCE, *STEP],
    (1, "full"): [*REDUCE, *STEP],
    (2, "sharded"): [*REDUCE, *REDUCE, *STEP],
    (2, "full"): [*REDUCE, *STEP],
    (3, "sharded"): 2 * [*FORWARD, *BACKWARD, *REDUCE],
    (3, "full"): [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *REDUCE],
}
Moved = list[tuple[str, str, int]]


def expected(stage: int, accumulate: str, name: str) -> Moved:
    """MOVES in bytes."""
    gathered, reduced = NBYTES[name]
    moved: Moved = []
    for move in MOVES[stage, accumulate]:
        what, block = move.split()
        if what == "gather":
            moved += [("all_gather", block, nbytes) for nbytes in gathered]
        else:
            op = "all_reduce" if stage == 0 else "reduce_scatter"
            moved += [(op, block, nbytes) for nbytes in reduced]
    return moved


def collect(stage: int, accumulate: str, name: str) -> Moved:
    torch.manual_seed(0)
    dtype = BF16 if name == "bfloat16 model" else FP32
    model: Any = zerocore.shard(
        nn.Sequential(Block(), Block()).to(dtype),
        stage=stage,
        communication=zerocore.Communication(accumulate=accumulate),
        mixed_precision=POLICIES[name],
    )
    optimizer = zerocore.optim.AdamW(model.parameters())
    for _ in range(3):  # the first two learn the order
        with zerocore.reporting.record_events(model) as events:
            with zerocore.no_sync(model):
                model(torch.randn(4, WIDTH, dtype=dtype)).square().sum().backward()
            model(torch.randn(4, WIDTH, dtype=dtype)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]


Key = tuple[tuple[int, str], str]
ALL = list(product(MOVES, POLICIES))
# Each stage with each way to accumulate, and each policy.
FEW = list(zip(MOVES, cycle(POLICIES)))


def collect_all(keys: list[Key]) -> dict[tuple[int, str, str], Moved]:
    return {(*key, name): collect(*key, name) for key, name in keys}


@pytest.mark.parametrize("keys", [*by_night(ALL), FEW], ids=["all", "few"])
def test_what_is_moved_in_every_dtype(keys: list[Key]) -> None:
    for found in run_ranks(collect_all, 2, keys):
        assert len(found) == len(keys)
        for (stage, accumulate, name), moved in found.items():
            assert moved == expected(stage, accumulate, name), (stage, accumulate, name)
