"""The work by which kernels are measured, and other calls that do the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import zerocore  # noqa: F401  # registers the operators
from bench.lib.timing import Call

ops: Any = torch.ops.zerocore
OWN = "zerocore"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {F32: "fp32", BF16: "bf16", F16: "fp16"}
NUM_TENSORS = 150


@dataclass
class Contest:
    """A call of a kernel and the calls it is compared with; each moves `nbytes` in all."""

    name: str
    num_tensors: int
    nbytes: int
    calls: dict[str, Call]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def micros(self, name: str) -> float:
        """Returns the median time of a call in microseconds."""
        return median(self.seconds[name]) * 1e6

    def rate(self, name: str) -> float:
        """Returns the rate of moved bytes in GB/s."""
        return self.nbytes / median(self.seconds[name]) / 1e9


class Sources:
    """150 tensors of about `nbytes` in all, and their offsets in a flat buffer."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: str) -> None:
        each = nbytes // dtype.itemsize // NUM_TENSORS
        # Different odd sizes, as biases and norms have.
        self.numels = [each - index * 37 % (each // 4) for index in range(NUM_TENSORS)]
        self.tensors = [torch.ones(numel, dtype=dtype, device=device) for numel in self.numels]
        self.dtype, self.device, self.numel = dtype, device, sum(self.numels)
        self.offsets: list[int] = []
        self.end = 0
        for numel in self.numels:
            self.offsets.append(self.end)
            self.end += -(-numel // 64) * 64

    def bucket(self, dtype: torch.dtype) -> Tensor:
        """Allocates a flat buffer with an aligned place for each tensor."""
        return torch.zeros(self.end, dtype=dtype, device=self.device)

    def views(self, bucket: Tensor) -> list[Tensor]:
        """Returns the tensors' views of the buffer."""
        places = zip(self.offsets, self.numels, strict=True)
        return [bucket[offset : offset + numel] for offset, numel in places]

    def packing(self, bucket: Tensor, scale: float, add: bool = False) -> Call:
        """Returns the call that packs the tensors."""
        adds = [add] * NUM_TENSORS
        return lambda: ops.pack(
            bucket, self.tensors, self.offsets, self.numels, add=adds, scale=scale
        )


def plain_copies(nbytes: int, device: str) -> dict[str, Call]:
    """Returns calls that copy; each reads and writes `nbytes` in all.

    Each has memory of its own, so that none finds another's source in the cache.
    """
    numel = nbytes // 8
    (src, dst), (other_src, other_dst) = (
        [torch.ones(numel, device=device) for _ in range(2)] for _ in range(2)
    )
    calls: dict[str, Call] = {"copy_": lambda: dst.copy_(src)}
    if device == "cuda":
        calls["elementwise kernel"] = lambda: torch.mul(other_src, 1, out=other_dst)
    else:
        calls["memcpy"] = lambda: ctypes.memmove(
            other_dst.data_ptr(), other_src.data_ptr(), numel * 4
        )
    return calls


def against_copy(nbytes: int, device: str) -> Iterator[Contest]:
    """Yields a contest of each kernel on `nbytes` of sources with the fastest copy."""
    yield _packing(nbytes, device, F32, F32, 1.0)
    for src, dst in ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F32, F16)):
        yield _packing(nbytes, device, src, dst, 0.125)
    yield _packing(nbytes, device, F32, F32, 0.125, add=True)
    numel = nbytes // 4
    flat = torch.ones(numel, device=device)
    half = torch.ones(numel, dtype=BF16, device=device)
    calls: dict[str, Call] = {OWN: lambda: ops.cast(half, [flat], [0])}
    yield Contest("cast fp32 to bf16", 1, numel * 6, calls | plain_copies(numel * 6, device))
    out = torch.ones(numel // 2, device=device)
    calls = {OWN: lambda: ops.accumulate(out, flat, 2)}
    yield Contest("accumulate 2 chunks", 1, numel * 6, calls | plain_copies(numel * 6, device))
    sums, shards = torch.zeros(2, dtype=torch.float64, device=device), list(flat.chunk(NUM_TENSORS))
    calls = {OWN: lambda: ops.sum_of_squares(sums, shards)}
    copies = plain_copies(numel * 4, device)
    yield Contest("sum of squares fp32", NUM_TENSORS, numel * 4, calls | copies)
    for dtype in (F32, BF16):
        yield from _scaled(nbytes, device, dtype)
    yield _bytes(nbytes, device)


def _scaled(nbytes: int, device: str, dtype: torch.dtype) -> Iterator[Contest]:
    """Yields contests of casts to and from one-byte dtypes, with a scale per 128 elements."""
    numel = nbytes // dtype.itemsize // 128 * 128
    values = torch.randn(numel, device=device).to(dtype)
    blocks = torch.zeros(numel // 128 * 132, dtype=torch.uint8, device=device)
    moved = numel * dtype.itemsize + blocks.numel()
    for number, name in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        encode: Call = partial(ops.encode, blocks, values, number)
        decode: Call = partial(ops.decode, values, blocks, number)
        copies = plain_copies(moved, device)
        yield Contest(f"encode {SHORT[dtype]} to {name}", 1, moved, {OWN: encode} | copies)
        yield Contest(f"decode {name} to {SHORT[dtype]}", 1, moved, {OWN: decode} | copies)


def _bytes(nbytes: int, device: str) -> Contest:
    """Returns the contest of a dtype that is moved, not cast."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    bucket = torch.zeros_like(source)
    calls: dict[str, Call] = {OWN: lambda: ops.cast(bucket, [source], [0])}
    return Contest("copy of bytes", 1, nbytes * 2, calls | plain_copies(nbytes * 2, device))


def _packing(
    nbytes: int,
    device: str,
    src: torch.dtype,
    dst: torch.dtype,
    scale: float,
    add: bool = False,
) -> Contest:
    sources = Sources(nbytes, src, device)
    bucket = sources.bucket(dst)
    moved = sources.numel * (src.itemsize + dst.itemsize * (2 if add else 1))
    name = f"pack {SHORT[src]} to {SHORT[dst]} x {scale}" + (", add" if add else "")
    calls = {OWN: sources.packing(bucket, scale, add), **plain_copies(moved, device)}
    return Contest(name, NUM_TENSORS, moved, calls)


def beside_torch(nbytes: int, device: str) -> Iterator[Contest]:
    """Yields contests of zerocore and torch that move lists of tensors to and from a buffer."""
    for src, dst in ((F32, F32), (BF16, BF16), (F32, BF16)):
        yield _packing_by_torch(nbytes, device, src, dst)
    sources = Sources(nbytes, F32, device)
    tensors = sources.tensors
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    calls: dict[str, Call] = {
        OWN: lambda: ops.sum_of_squares(sums, tensors),
        "_foreach_norm": lambda: torch.stack(torch._foreach_norm(tensors)).norm(),
    }
    yield Contest("sum of squares fp32", NUM_TENSORS, sources.numel * 4, calls)


def _packing_by_torch(nbytes: int, device: str, src: torch.dtype, dst: torch.dtype) -> Contest:
    sources = Sources(nbytes, src, device)
    bucket = sources.bucket(dst)
    views, tensors = sources.views(bucket), sources.tensors
    row = torch.zeros(1, sources.numel, dtype=dst, device=device)
    calls: dict[str, Call] = {
        OWN: sources.packing(bucket, 1.0),
        "_foreach_copy_": lambda: torch._foreach_copy_(views, tensors),
        "_chunk_cat": lambda: torch._chunk_cat(tensors, 0, 1, out=row),
        "cat": lambda: torch.cat(tensors, out=row[0]),
    }
    moved = sources.numel * (src.itemsize + dst.itemsize)
    return Contest(f"pack {SHORT[src]} to {SHORT[dst]}", NUM_TENSORS, moved, calls)


def small_tensors(device: str) -> Iterator[Contest]:
    """Yields contests of 150 small tensors in one call, and a flat copy of as many bytes."""
    for kib in (1, 16, 256):
        sources = Sources(NUM_TENSORS * kib * 1024, F32, device)
        moved = sources.numel * 8
        src, dst = (torch.ones(sources.numel, device=device) for _ in range(2))
        calls = {OWN: sources.packing(sources.bucket(F32), 1.0), **_copying("flat copy", src, dst)}
        yield Contest(f"pack fp32, up to {kib} KiB each", NUM_TENSORS, moved, calls)


def _copying(name: str, src: Tensor, dst: Tensor) -> dict[str, Call]:
    return {name: lambda: dst.copy_(src)}
