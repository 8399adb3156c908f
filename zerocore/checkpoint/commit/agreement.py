"""Makes files durable and a failure common: fsync, renames, and the agreement of all ranks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerocore.checkpoint.commit.files import flush_folder
from zerocore.common.agreement import agree, from_first, gather_objects
from zerocore.model.state import ShardState


class DamagedError(ValueError):
    """A checkpoint cannot be read; another one may be."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in it is a :class:`DamagedError` that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        named = str(path) in str(error)
        raise DamagedError(f"{error}" if named else f"{path} cannot be read: {error}") from error


def on_all_ranks(state: ShardState, action: Callable[[], Any]) -> list[Any]:
    """What ``action`` returns on each rank; what it raises on one is an error on all. Collective.

    Raises:
        Exception: what it raised, on the rank where it did; RuntimeError on the others. A
            DamagedError on all, if each that was raised is one.
    """
    return common_result(action, lambda outcome: gathered(state, outcome))


def common_result(action: Callable[[], Any], gather: Callable[[Any], list[Any]]) -> list[Any]:
    """As :func:`on_all_ranks`, for ranks whose small values ``gather`` brings together."""
    error: Exception | None = None
    value = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    answers = gather((message, isinstance(error, DamagedError), value))
    is_damage = all(damaged for message, damaged, _ in answers if message is not None)
    if error is not None and is_damage == isinstance(error, DamagedError):
        raise error
    for rank, (message, damaged, _) in enumerate(answers):
        if message is not None and damaged == is_damage:
            kind = DamagedError if is_damage else RuntimeError
            raise kind(f"rank {rank} failed: {message}")
    return [value for *_, value in answers]


def same_on_all(state: ShardState, facts: list[Any]) -> None:
    """Raises ValueError on every rank if the ranks see other files. Collective."""
    try:
        agree(state.ranks.groups, None, facts, state.device)
    except ValueError as error:
        raise ValueError(f"the ranks see different files: {error}") from None


def same_id(state: ShardState) -> str:
    """A few random letters, those of the first rank. Collective."""
    return from_first(state.ranks.groups, uuid.uuid4().hex[:8], state.device)


def gathered(state: ShardState, value: Any) -> list[Any]:
    """The small picklable value of each rank. Collective."""
    return gather_objects(state.ranks.groups, [value], state.device)


def fsync_file(path: Path) -> None:
    """Makes the bytes of a file durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_tree(folder: Path) -> None:
    """Makes a folder of files durable."""
    for path in folder.iterdir():
        fsync_file(path)
    flush_folder(folder)


def check_empty(folder: Path, patterns: Sequence[str]) -> None:
    """Raises FileExistsError if the folder has files of these patterns."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            raise FileExistsError(f"{path} exists already; nothing is overwritten, delete it first")
