"""Trains what many seeds describe, in few starts of the ranks, and prints the seeds that failed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.harness import RanksFailed, run_ranks
from tests.distributed.random_runs import Result

SHAPES = ("1", "2", "3", "4", "2x2")  # numbers of ranks, or replicas x shards


def world_of(shape: str) -> int:
    """The number of ranks."""
    replicas, _, shards = shape.rpartition("x")
    return int(replicas or 1) * int(shards)


def seeds_of(index: int, count: int, after: int = 0) -> range:
    """`count` seeds of their own for each index, from `after` on."""
    return range(after + index * count, after + (index + 1) * count)


def references(reference: Callable[[int, int], Result], seeds: range) -> dict[int, Result]:
    """The result of one process for each seed; each rank computes some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {seed: reference(seed, size) for seed in seeds[rank::size]}
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    merged = {seed: result for part in parts for seed, result in part.items()}
    return dict(sorted(merged.items()))


def begin(seed: int, what: str) -> None:
    """Says what is trained now, for `train_block`, if a rank fails."""
    print(f"seed {seed}: {what}", flush=True)


def check(found: Result, right: Result, rtol: float, atol: float) -> None:
    """Raises AssertionError if this rank's numbers or the weights differ from the truth."""
    numbers = right.numbers[dist.get_rank()]
    torch.testing.assert_close(found.numbers[0], numbers, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.state, right.state, rtol=rtol, atol=atol, check_dtype=False)


def train_block(compare: Callable[..., None], seeds: range, shape: str, *args: Any) -> list[int]:
    """Calls `compare(seeds, shape, *args)` on ranks, once more behind each seed that fails."""
    failed: list[int] = []
    while seeds:
        limit = 60.0 + 20.0 * len(seeds)
        try:
            run_ranks(compare, world_of(shape), seeds, shape, *args, timeout=limit)
            break
        except RanksFailed as error:
            print(error, flush=True)
            begun = re.findall(r"^seed (\d+): (.*)", str(error), re.MULTILINE)
            seed, what = max(((int(n), text) for n, text in begun), default=(seeds[0], ""))
            print(f"seed {seed} failed, shape {shape}: {what}", flush=True)
            failed.append(seed)
            seeds = range(seed + 1, seeds.stop)
    return failed


def train_all(
    compare: Callable[..., None], options: argparse.Namespace, shapes: Sequence[str], *args: Any
) -> bool:
    """Prints the seeds that went wrong, and how many there were; whether none did."""
    failed: list[int] = []
    seeds = range(options.first, options.first + options.count)
    for index, start in enumerate(seeds[:: options.block]):
        block = range(start, min(start + options.block, seeds.stop))
        failed += train_block(compare, block, shapes[index % len(shapes)], *args)
        print(f"{block.stop - seeds.start} seeds, {len(failed)} failed: {failed}", flush=True)
    print(f"{len(seeds)} seeds, {len(failed)} failed")
    return not failed


def parser_of(description: str | None, shapes: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the arguments that all such commands share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int)
    parser.add_argument("shapes", nargs="*", default=shapes, metavar="shape")
    parser.add_argument("--block", type=int, default=50, help="seeds in one start of the ranks")
    return parser
