"""Files that go from rank to rank, each checked where it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting

_PIECE_NBYTES = 64 << 20  # of a message


class Move(NamedTuple):
    """A file of a folder that ``source`` has and ``target`` gets; ranks of the group."""

    name: str
    nbytes: int
    source: int
    target: int


def rounds_of(moves: Iterable[Move]) -> list[list[Move]]:
    """The moves in rounds, in each of which a rank sends one file and receives one at most.

    The same on all ranks, which go through the rounds in order: none waits for a rank that waits
    for it.
    """
    rounds: list[list[Move]] = []
    first_free: dict[tuple[str, int], int] = {}
    for move in moves:
        ends = (("send", move.source), ("receive", move.target))
        number = max(first_free.get(end, 0) for end in ends)
        for end in ends:
            first_free[end] = number + 1
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(move)
    return rounds


def carry_out(group: dist.ProcessGroup | None, moves: Sequence[Move], folder: Path) -> None:
    """Sends and receives what is this rank's part of the moves; collective of ``group``.

    Raises:
        OSError: a file cannot be read or made, when all else has arrived: the others are not held.
    """
    if group is None:
        return  # one rank has all
    failed: OSError | None = None
    own = group.rank()
    for moved in rounds_of(moves):
        works = []
        for move in moved:
            if own not in (move.source, move.target):
                continue
            try:
                memory = _memory_of(folder / move.name, move.nbytes, own == move.target)
            except OSError as error:
                failed = error
                memory = torch.zeros(move.nbytes, dtype=torch.uint8)
            start = dist.isend if own == move.source else dist.irecv
            other = dist.get_global_rank(group, move.target if own == move.source else move.source)
            works += [start(piece, other, group=group) for piece in memory.split(_PIECE_NBYTES)]
        with waiting(group, "a copy of a file to another rank"):
            for work in works:
                if work is not None:
                    work.wait()
    if failed is not None:
        raise failed


def _memory_of(path: Path, nbytes: int, is_new: bool) -> Tensor:
    """The bytes of a file, mapped; of a new one they are its from now on."""
    if is_new:
        with path.open("wb") as file:
            file.truncate(nbytes)
    elif path.stat().st_size != nbytes:
        raise OSError(f"{path} has {path.stat().st_size} bytes, expected {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=is_new, size=nbytes, dtype=torch.uint8)
