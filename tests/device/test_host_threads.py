"""Threads that share a kernel's work: each thread has a number of its own, which moves no bits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from zerocore import _C

ops: Any = torch.ops.zerocore
NUMELS = [1, 100, 8192 * 40 + 17, 5, 8192 * 100]


def in_new_thread(call: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def test_a_thread_has_a_number_of_its_own() -> None:
    def number(threads: int) -> int:
        _C.use_host_threads(threads)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    assert [in_new_thread(number, threads) for threads in (3, 1)] == [3, 1]
    assert torch.get_num_threads() == in_new_thread(torch.get_num_threads) == before
    with pytest.raises(ValueError, match="expected 1 thread or more, got 0"):
        _C.use_host_threads(0)


def results(threads: int) -> Iterator[Tensor]:
    """Of a sum of squares and of two steps of AdamW."""
    _C.use_host_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(n, generator=generator) for n in NUMELS] for _ in range(2))
    squares = torch.empty(2, dtype=torch.float64)
    ops.sum_of_squares(squares, grads)
    yield squares
    moments = [[torch.zeros(n) for n in NUMELS] for _ in range(2)]
    steps = [torch.zeros(()) for _ in NUMELS]
    options = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    for _ in range(2):
        ops.adamw(weights, grads, *moments, steps, [], **options)
    yield from weights + moments[0] + moments[1]


def test_bits_do_not_depend_on_the_number() -> None:
    one = in_new_thread(lambda: list(results(1)))
    for threads in (2, 3, 5):
        found = in_new_thread(lambda threads=threads: list(results(threads)))
        assert all(map(torch.equal, found, one))
