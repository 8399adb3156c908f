"""A folder of checkpoints: their names, and which of its folders may be deleted.

A save writes to ``step-<n>.tmp-<host>-<id>``, which its process has locked until the save ends. A
deletion renames to ``step-<n>.deleted-<id>`` first. Nothing else is ever deleted, and of these only
files that a save writes. A file that cannot be deleted is a warning.
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
SILENT_SECONDS = 600.0  # without a change, after which a save of another host has ended
_writing: dict[Path, int | None] = {}  # by this process, and the open files that lock the folders
_warned: set[str] = set()


def path_of(folder: Path, step: int) -> Path:
    """The name of the checkpoint of a step; raises ValueError for what is none."""
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be a whole number, 0 or more, got {step!r}")
    return folder / f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, in order; whether they are good is not looked at."""
    found = [_STEP.fullmatch(path.name) for path in folder.glob("step-*")]
    return sorted(
        int(match[1]) for match in found if match is not None and is_checkpoint(folder / match[0])
    )


def is_checkpoint(path: Path) -> bool:
    """Whether a save has completed the folder, or torch's; it may have lost either file since."""
    return (path / METADATA).exists() or (path / NAME).exists()


def this_host() -> str:
    """Its name, as part of that of a folder."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:64]


def temporary_of(final: Path) -> Path:
    """The folder that a save of this process writes to; another one each time."""
    return final.with_name(f"{final.name}.tmp-{this_host()}-{uuid.uuid4().hex[:8]}")


def _lock(path: Path) -> int | None:
    """An open file that locks the folder, None where the file system has no locks; raises
    BlockingIOError while another process has it. The system unlocks it when a process ends."""
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
        fcntl.flock(file, fcntl.LOCK_UN)  # also for forked processes, which have it open, too
        os.close(file)


def begin(temporary: Path) -> None:
    """Makes the folder that a save writes to, and deletes what ended ones have left; raises
    RuntimeError if another process of this host writes there."""
    folder = temporary.parent
    folder.mkdir(parents=True, exist_ok=True)
    ended = {path for path, host in _remains(folder) if host == this_host() and _has_ended(path)}
    files.make_folder(temporary)
    _writing[temporary] = _lock(temporary)
    now = temporary.stat().st_mtime  # by the clock of the file system, which other hosts see, too
    for path, host in _remains(folder):
        if path in ended:
            _delete(path)
        elif path not in _writing:
            _delete_silent(path, host, now)


def _has_ended(path: Path) -> bool:
    """Whether the save is known to have ended; raises RuntimeError if another process writes."""
    if path in _writing:
        return False
    try:
        file = _lock(path)
    except BlockingIOError:
        raise RuntimeError(
            f"another process of this host writes {path}; give each training a folder of its own, "
            "or end that process"
        ) from None
    _unlock(file)
    return file is not None


def end(temporary: Path) -> None:
    """The save that writes to the folder has ended."""
    _unlock(_writing.pop(temporary, None))


def complete(temporary: Path, final: Path) -> None:
    """Gives a folder its name when all in it is durable; a checkpoint of that name is replaced."""
    files.flush_path(temporary)
    replaced = _put_aside(final) if final.exists() else None
    files.rename(temporary, final)
    files.flush_path(final.parent)
    if replaced is not None:
        _delete(replaced)


def delete_old(final: Path, keep: int | None, damaged: Container[Path]) -> None:
    """Deletes checkpoints older than the newest ``keep``, of which damaged ones are none, and not
    ``final``, which was saved now."""
    steps = steps_in(final.parent)
    good = [step for step in steps if path_of(final.parent, step) not in damaged]
    if keep is None or len(good) < keep:
        return
    for step in steps[: steps.index(good[-keep])]:
        path = path_of(final.parent, step)
        if path.is_symlink() or not (path / NAME).exists():
            _warn(path, f"it is a link, or has no {NAME}, as what a save writes")
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
    """Half of it must not look like a checkpoint."""
    doomed = path.with_name(f"{path.name}.deleted-{uuid.uuid4().hex[:8]}")
    files.rename(path, doomed)
    return doomed


def _remains(folder: Path) -> list[tuple[Path, str]]:
    """Folders of saves and deletions that have not come to their end, and the hosts of saves."""
    found = []
    for path in sorted(folder.glob("step-*")):
        match = _REMAINS.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found.append((path, match[1] or ""))
    return found


def _delete_silent(path: Path, host: str, now: float) -> None:
    """Deletes what a deletion has left, and a save that has written nothing for long."""
    if ".tmp-" in path.name and now - _last_change(path, now) < SILENT_SECONDS:
        where = host or "unknown"
        _warn(path, f"it was written less than {SILENT_SECONDS:.0f} s ago, on host {where}")
        return
    _delete(path)


def _last_change(path: Path, now: float) -> float:
    """When something in the folder was written; now if it is not known."""
    try:
        with os.scandir(path) as entries:
            return max([path.stat().st_mtime, *(entry.stat().st_mtime for entry in entries)])
    except OSError:
        return now


def _delete(path: Path) -> None:
    """Deletes what saves write, and the folder if that is all."""
    others: list[str] = []
    try:
        names = sorted(os.listdir(path))
        others = [name for name in names if not _OWN_FILE.fullmatch(name)]
        files.delete_folder(path, [name for name in names if name not in others])
    except OSError as error:
        if foreign := [name for name in others if not name.startswith(".nfs")]:
            _warn(path, f"it holds {', '.join(foreign[:3])}, which no save has written")
        elif not others:  # NFS keeps what is open under such a name, and deletes it itself
            _warn(path, str(error))


def _warn(path: Path, reason: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        _log.warning("%s is not deleted: %s", path, reason)
