"""Loads real text as bytes: the source and text files of the running Python."""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = (".py", ".rst", ".txt")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_ONE_IN = 20  # one file in 20 is held out
MIN_NBYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and held-out bytes, uint8 and 1-D, from disjoint sets of files."""

    train: Tensor
    held_out: Tensor
    num_train_files: int
    num_held_out_files: int


def load_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """Reads every text file below `folder` (default: the standard library of the running Python).

    A hash of its relative path decides whether a file is held out, so every run and rank splits
    alike. Raises ValueError if there is less than a MiB of text.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name in _text_files(root):
        side = held_out if zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0 else train
        side.append((root / name).read_bytes())
    num_nbytes = sum(map(len, train)) + sum(map(len, held_out))
    if num_nbytes < MIN_NBYTES:
        raise ValueError(
            f"found {num_nbytes} bytes of {', '.join(SUFFIXES)} files below {root}; expected at "
            f"least {MIN_NBYTES}: use a Python whose standard library is installed as source files"
        )
    return Corpus(_join(train), _join(held_out), len(train), len(held_out))


def _text_files(root: Path) -> list[str]:
    """Returns the sorted relative POSIX paths of the text files below `root`."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in files if name.endswith(SUFFIXES))
        names.extend(path.relative_to(root).as_posix() for path in paths if path.is_file())
    return sorted(names)


def _join(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def random_batch(
    text: Tensor, batch_size: int, context: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cuts `batch_size` random windows; returns (tokens, targets), int64, (batch_size, context)."""
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=draw)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def evenly_spaced_batches(
    text: Tensor, num_batches: int, batch_size: int, context: int
) -> list[tuple[Tensor, Tensor]]:
    """Cuts `num_batches` batches of windows spread over all of `text`; shapes as `random_batch`."""
    last = len(text) - context - 1
    starts = torch.linspace(0, last, num_batches * batch_size).long().view(num_batches, -1, 1)
    windows = text[starts + torch.arange(context + 1)].long()
    return [(batch[:, :-1], batch[:, 1:]) for batch in windows]
