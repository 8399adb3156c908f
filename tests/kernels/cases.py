"""Random arguments for the kernels, what plain torch makes of them, and checks for any device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocore._C import CHUNK_NUMEL

ops: Any = torch.ops.zerocore

NARROW = (torch.float32, torch.float16, torch.bfloat16)
OWN = (torch.float64, torch.complex64, torch.complex128)  # converted to their own dtype alone
CASTS = [(dst, src) for dst in NARROW for src in NARROW] + [(dtype, dtype) for dtype in OWN]
COUNTS = (0, 1, 2, 13, 150, 2000)
# Around a vector, a warp, a chunk.
SIZES = (0, 1, 3, 7, 8, 9, 31, 129, 1000)
LARGE_SIZES = (CHUNK_NUMEL - 1, CHUNK_NUMEL, CHUNK_NUMEL + 1, 3 * CHUNK_NUMEL + 5)
# Powers of two: a product is exact, so it does not matter whether it is fused with a sum.
EXACT_SCALES = (1.0, 0.25)
STREAMED_NBYTES = 16 * 2**20  # as in csrc/kernels/cpu/stream.h


def wide(tensor: Tensor) -> Tensor:
    """Values as they are computed with: half types as float32, others as they are."""
    return tensor if tensor.dtype in OWN else tensor.float()


def filled(numel: int, dtype: torch.dtype, device: str, start: int = 0) -> Tensor:
    """Random values; they begin `start` elements behind an aligned address."""
    kind = dtype if dtype.is_complex else torch.float32
    return torch.randn(start + numel, device=device, dtype=kind).to(dtype)[start:]


@dataclass
class Case:
    """Tensors at places of a flat region; gaps between some of them."""

    tensors: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numel: int = 0

    @property
    def numels(self) -> list[int]:
        return [tensor.numel() for tensor in self.tensors]


def make_case(count: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """`count` tensors of odd sizes, one in ten of them large, at aligned and odd addresses."""
    torch.manual_seed(seed)
    rng = random.Random(seed + count)
    case = Case()
    for index in range(count):
        sizes = LARGE_SIZES if index % 40 == 1 else SIZES
        case.numel += rng.choice((0, 0, 1, 5, 64))
        numel = rng.choice(sizes)
        case.tensors.append(filled(numel, dtype, device, rng.choice((0, 0, 1, 3, 8))))
        case.offsets.append(case.numel)
        case.numel += numel
    case.numel += rng.choice((0, 3, 40))
    return case


def pack_reference(
    bucket: Tensor,
    grads: list[Tensor | None],
    case: Case,
    add: list[bool],
    scale: float,
) -> Tensor:
    """The bucket as `pack` should leave it."""
    expected = torch.zeros_like(bucket)
    for grad, offset, numel, adds in zip(grads, case.offsets, case.numels, add, strict=True):
        old = bucket[offset : offset + numel]
        value = torch.zeros_like(wide(old)) if grad is None else wide(grad) * scale
        expected[offset : offset + numel] = wide(old) + value if adds else value
    return expected


def check_pack(device: str, dst: torch.dtype, src: torch.dtype, count: int, start: int) -> None:
    """Missing gradients, gaps, addition and scale in one pass."""
    for scale in EXACT_SCALES:
        case = make_case(count, src, device)
        grads: list[Tensor | None] = list(case.tensors)
        grads[::7] = [None] * len(grads[::7])
        add = [index % 3 == 1 for index in range(count)]
        bucket = filled(case.numel, dst, device, start)
        expected = pack_reference(bucket, grads, case, add, scale)
        ops.pack(bucket, grads, case.offsets, case.numels, add=add, scale=scale)
        assert torch.equal(bucket, expected)


def check_cast(device: str, dst: torch.dtype, src: torch.dtype, count: int) -> None:
    """The slices are written, all between them stays."""
    case = make_case(count, src, device)
    bucket = filled(case.numel, dst, device)
    expected = bucket.clone()
    for tensor, offset in zip(case.tensors, case.offsets, strict=True):
        expected[offset : offset + tensor.numel()] = tensor.to(dst)
    ops.cast(bucket, case.tensors, case.offsets)
    assert torch.equal(bucket, expected)


def check_accumulate(device: str, dst: torch.dtype, src: torch.dtype, num_chunks: int) -> None:
    """Chunk after chunk, scaled, added or written."""
    for numel in (0, 1, 8, 1000, 1031, CHUNK_NUMEL + 16):
        for start, add, scale in (
            (0, False, 1.0),
            (0, True, 0.25),
            (1, True, 1.0),
            (1, False, 0.5),
        ):
            chunks = filled(numel * num_chunks, src, device, start)
            out = filled(numel, dst, device)
            total = torch.zeros_like(wide(out))
            for chunk in wide(chunks).view(num_chunks, numel):
                total = total + chunk
            expected = (total * scale + (wide(out) if add else 0)).to(dst)
            ops.accumulate(out, chunks, num_chunks, add=add, scale=scale)
            assert torch.equal(out, expected)


def check_large(dst: torch.dtype, src: torch.dtype) -> None:
    """Calls that write more than a CPU keeps in its caches, to odd addresses."""
    numel = STREAMED_NBYTES // dst.itemsize + 1001
    source, half = filled(numel, src, "cpu", 3), numel // 2
    for start in (0, 1, 5):
        bucket = filled(numel + start, dst, "cpu")
        expected = torch.zeros_like(bucket)
        for scale in EXACT_SCALES:
            expected[start:] = (wide(source) * scale).to(dst)
            pieces, places = [source[:half], source[half:]], [start, start + half]
            ops.pack(bucket, pieces, places, [half, numel - half], scale=scale)
            assert torch.equal(bucket, expected)
        chunks = torch.cat([source, source.flip(0)])
        ops.accumulate(bucket[start:], chunks, 2)
        expected[start:] = (wide(source) + wide(source.flip(0))).to(dst)
        assert torch.equal(bucket, expected)


def check_sum_of_squares(device: str, dtype: torch.dtype, count: int) -> None:
    """Close to a sum in float64, the same bits each time, values that are not finite counted."""
    case = make_case(count, dtype, device)
    out = torch.full((2,), -1.0, dtype=torch.float64, device=device)
    ops.sum_of_squares(out, case.tensors)
    expected = sum(tensor.double().square().sum().item() for tensor in case.tensors)
    torch.testing.assert_close(out[0].item(), float(expected), rtol=1e-5, atol=0)
    assert out[1].item() == 0
    again = torch.empty_like(out)
    ops.sum_of_squares(again, [tensor.clone() for tensor in case.tensors])
    assert torch.equal(again, out)
    bad = [float("nan"), float("inf"), -float("inf")]
    spoiled = [tensor for tensor in case.tensors if tensor.numel() > 0]
    for index, tensor in enumerate(spoiled):
        tensor[-1] = bad[index % 3]
    ops.sum_of_squares(out, case.tensors)
    assert out[1].item() == len(spoiled)
    assert not spoiled or not out[0].isfinite()
