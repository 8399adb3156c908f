"""A folder of checkpoints: their names, and which of its folders may be deleted.

A save writes to ``step-<n>.tmp-<host>-<id>``, and its process locks this folder until the save
ends. A deletion first renames a checkpoint to ``step-<n>.deleted-<id>``. Nothing else is ever
deleted, and in these folders only files that a save writes. A failed deletion is a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import uuid
from collections.abc import Container
from pathlib import Path

from zerocore.checkpoint.checksums import METADATA, NAME
from zerocore.checkpoint.commit import files

_log = logging.getLogger("zerocore")
_STEP = re.compile(r"step-(\d{8,})")
_REMAINS = re.compile(r"step-\d{8,}\.(?:deleted|(?:deleted|tmp)-(?:(.+)-)?[0-9a-f]{8})")
_OWN_FILE = re.compile(rf"{re.escape(METADATA)}|{re.escape(NAME)}|__\d+_\d+\.distcp|rank-\d+\.pt")
SILENT_SECONDS = 600.0  # another host's save has ended after so long without a change
_writing: dict[Path, int | None] = {}  # this process's folders, and the open files that lock them
_warned: set[str] = set()


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint; raises ValueError for an invalid step."""
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be a whole number, 0 or more, got {step!r}")
    return folder / f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of a folder's checkpoints, in order, without reading their contents."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match and is_checkpoint(folder / match[0]))


def is_checkpoint(path: Path) -> bool:
    """Whether a save of zerocore or torch has completed the folder. One of the two files may have
    been lost since."""
    return (path / METADATA).exists() or (path / NAME).exists()


def this_host() -> str:
    """Returns the host's name in a form that fits into a folder's name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:64]


def temporary_of(final: Path) -> Path:
    """Returns a new name for the folder that a save of this process writes to."""
    return final.with_name(f"{final.name}.tmp-{this_host()}-{uuid.uuid4().hex[:8]}")


def _lock(path: Path) -> int | None:
    """Locks a folder, and returns the open file that holds the lock; None if the file system has no
    locks. Raises BlockingIOError if another process holds it. A process's end unlocks it."""
    file = None
    try:
        file = os.open(path, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if file is not None:
            os.close(file)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return file


def _unlock(file: int | None) -> None:
    if file is not None:
        fcntl.flock(file, fcntl.LOCK_UN)  # forked processes share the open file and its lock
        os.close(file)


def begin(temporary: Path) -> None:
    """Makes the folder that a save writes to, and deletes the remains of ended saves; raises
    RuntimeError if another process of this host writes there."""
    folder = temporary.parent
    folder.mkdir(parents=True, exist_ok=True)
    ended = {path for path, host in _remains(folder) if host == this_host() and _has_ended(path)}
    files.make_folder(temporary)
    _writing[temporary] = _lock(temporary)
    now = temporary.stat().st_mtime  # by the file system's clock, which all hosts share
    for path, host in _remains(folder):
        if path in ended:
            _delete(path)
        elif path not in _writing:
            _delete_silent(path, host, now)


def _has_ended(path: Path) -> bool:
    """Whether a save has surely ended; raises RuntimeError if a process of this host writes."""
    if path in _writing:
        return False
    try:
        file = _lock(path)
    except BlockingIOError:
        raise RuntimeError(
            f"another process of this host is writing {path}; give each training a folder of its "
            "own, or end that process"
        ) from None
    _unlock(file)
    return file is not None


def end(temporary: Path) -> None:
    """Unlocks the folder of a save that has ended."""
    _unlock(_writing.pop(temporary, None))


def complete(temporary: Path, final: Path) -> None:
    """Renames a folder whose files are durable; replaces a checkpoint of the final name."""
    files.flush_path(temporary)
    replaced = _put_aside(final) if final.exists() else None
    files.rename(temporary, final)
    files.flush_path(final.parent)
    if replaced is not None:
        _delete(replaced)


def delete_old(final: Path, keep: int | None, damaged: Container[Path]) -> None:
    """Deletes checkpoints older than the newest ``keep`` undamaged ones, except ``final``, the one
    that was just saved."""
    steps = steps_in(final.parent)
    good = [step for step in steps if path_of(final.parent, step) not in damaged]
    if keep is None or len(good) < keep:
        return
    for step in steps[: steps.index(good[-keep])]:
        path = path_of(final.parent, step)
        if path.is_symlink() or not (path / NAME).exists():
            _warn(path, f"it is a link, or lacks the {NAME} that a save writes")
        elif path != final:
            _delete_checkpoint(path)


def _delete_checkpoint(path: Path) -> None:
    try:
        doomed = _put_aside(path)
        files.flush_path(path.parent)
    except OSError as error:
        _warn(path, str(error))
    else:
        _delete(doomed)


def _put_aside(path: Path) -> Path:
    """Renames a checkpoint before it is deleted: a half deleted one must not look complete."""
    doomed = path.with_name(f"{path.name}.deleted-{uuid.uuid4().hex[:8]}")
    files.rename(path, doomed)
    return doomed


def _remains(folder: Path) -> list[tuple[Path, str]]:
    """Returns the folders of unfinished saves and deletions, with the hosts of the saves."""
    remains = []
    for path in sorted(folder.glob("step-*")):
        match = _REMAINS.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            remains.append((path, match[1] or ""))
    return remains


def _delete_silent(path: Path, host: str, now: float) -> None:
    """Deletes the remains of a deletion, or of a save that has not written for long."""
    if ".tmp-" in path.name and now - _last_change(path, now) < SILENT_SECONDS:
        where = host or "unknown"
        _warn(path, f"it was written less than {SILENT_SECONDS:.0f} s ago, on host {where}")
        return
    _delete(path)


def _last_change(path: Path, now: float) -> float:
    """Returns the time of the last write in a folder; ``now`` if it is unknown."""
    try:
        with os.scandir(path) as entries:
            return max([path.stat().st_mtime, *(entry.stat().st_mtime for entry in entries)])
    except OSError:
        return now


def _delete(path: Path) -> None:
    """Deletes the files that saves write, and the folder if nothing else is in it."""
    kept: list[str] = []
    try:
        names = sorted(os.listdir(path))
        kept = [name for name in names if not _OWN_FILE.fullmatch(name)]
        files.delete_folder(path, [name for name in names if name not in kept])
    except OSError as error:
        if foreign := [name for name in kept if not name.startswith(".nfs")]:
            _warn(path, f"it holds {', '.join(foreign[:3])}, which no save has written")
        elif not kept:  # NFS renames an open file to .nfs*, and deletes it itself
            _warn(path, str(error))


def _warn(path: Path, reason: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        _log.warning("%s is not deleted: %s", path, reason)
