"""Chunks that zerocore frames are what torch loads; of chunks any box is read, torch's ones too."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerocore.checkpoint.commit import files
from zerocore.checkpoint.dcp.safe_reader import locate, read_box
from zerocore.checkpoint.dcp.torch_chunks import HEAD_NBYTES, chunk_nbytes, frame

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def make(dtype: torch.dtype, shape: tuple[int, ...], order: list[int] | None = None) -> Tensor:
    """Random bits, dense, with the dimensions in another order in memory."""
    order = list(range(len(shape))) if order is None else order
    inverse = sorted(range(len(order)), key=order.__getitem__)
    numel = torch.Size(shape).numel()
    values = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    turned = values.view(dtype).view([shape[dim] for dim in order]) if numel else torch.empty(0)
    return turned.permute(inverse) if numel else torch.empty(shape, dtype=dtype)


def write(path: Path, value: Tensor, offset: int = 64) -> int:
    """Writes a chunk; returns its length."""
    file = files.create(path)
    writer = files.writer(file, offset + chunk_nbytes(value.nbytes))
    flat = value.as_strided((value.numel(),), (1,))
    crc = files.write(writer, offset + HEAD_NBYTES, flat)
    head, tail = frame(value.dtype, value.shape, value.stride(), crc)
    files.write(writer, offset, head)
    files.write(writer, offset + HEAD_NBYTES + value.nbytes, tail)
    files.close(file)
    assert path.stat().st_size - offset == chunk_nbytes(value.nbytes)
    return chunk_nbytes(value.nbytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (2, 3, 4, 5), (1,) * 24])
def test_torch_loads_it(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    value = make(dtype, shape)
    write(tmp_path / "chunk", value)
    data = (tmp_path / "chunk").read_bytes()[64:]
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype and loaded.shape == value.shape
    assert loaded.stride() == value.stride()
    assert loaded.untyped_storage().tolist() == value.contiguous().untyped_storage().tolist()
    with zipfile.ZipFile(io.BytesIO(data)) as chunk:
        assert chunk.testzip() is None


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3, 1], [3, 1, 0, 2]])
def test_boxes_of_chunks(is_torch: bool, order: list[int], tmp_path: Path) -> None:
    value = make(torch.float32, (3, 4, 5, 2), order)
    value = torch.randn(3, 4, 5, 2).as_strided(value.shape, value.stride())
    path = tmp_path / "chunk"
    if is_torch:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        path.write_bytes(b"\0" * 64 + buffer.getvalue())
        length = len(buffer.getvalue())
    else:
        length = write(path, value)
    choose = random.Random(3)
    with open(path, "rb", buffering=0) as file:
        chunk = locate(file.fileno(), 64, length)
        assert chunk is not None and chunk.sizes == (3, 4, 5, 2)
        for _ in range(200):
            ends = [sorted(choose.sample(range(size + 1), 2)) for size in value.shape]
            offsets, sizes = [a for a, _ in ends], [b - a for a, b in ends]
            expected = value[tuple(slice(a, b) for a, b in ends)]
            target = make(torch.float64, tuple(sizes), choose.choice([order, [0, 1, 2, 3]]))
            read_box(file.fileno(), chunk, offsets, sizes, target)
            assert torch.equal(target.float(), expected)


def test_what_is_no_plain_tensor_is_left_to_torch(tmp_path: Path) -> None:
    for value in (
        {"a": torch.ones(2)},
        torch.ones(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        (tmp_path / "chunk").write_bytes(buffer.getvalue())
        with open(tmp_path / "chunk", "rb") as file:
            assert locate(file.fileno(), 0, len(buffer.getvalue())) is None
            assert locate(file.fileno(), 0, 100) is None
