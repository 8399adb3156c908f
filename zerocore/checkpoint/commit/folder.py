"""A folder of checkpoints: their names, and which of its folders may be deleted.

A save writes to ``step-<n>.tmp-<job>-<id>``: the name is the lock, and says which process writes.
A deletion renames to ``step-<n>.deleted-<id>`` first. Nothing else is ever deleted, and of these
only files that a save writes. A file that cannot be deleted is a warning.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import uuid
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

from zerocore.checkpoint.checksums import METADATA, NAME
from zerocore.checkpoint.commit import files


@dataclass(frozen=True)
class Job:
    """A process, so that no other one is taken for it."""

    host: str  # its name, for people
    system: str  # hash of what else tells hosts apart: two containers may share a name
    number: int
    start: int  # in the host's ticks, as numbers are used again; 0 if unknown

    def __str__(self) -> str:
        return f"{self.host}.{self.system}.{self.number}.{self.start}"

    @staticmethod
    def parse(text: str) -> Job | None:
        match = re.fullmatch(r"([\w.-]+)\.([0-9a-f]{8})\.(\d+)\.(\d+)", text)
        return None if match is None else Job(match[1], match[2], int(match[3]), int(match[4]))

    @property
    def is_on_this_host(self) -> bool:
        """Whether this process sees that one, if it lives."""
        own = this_job()
        return (self.host, self.system) == (own.host, own.system)

    @property
    def lives(self) -> bool:
        """Whether the process of this host has not ended."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # another user's
        state, start = _stat(self.number)
        return state not in ("Z", "X") and start in (0, self.start)


def this_job() -> Job:
    return _job(os.getpid())  # a forked one has another number


@cache
def _job(number: int) -> Job:
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:64]
    facts = [host]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        try:
            facts.append(read())
        except OSError:  # not Linux
            facts.append("")
    return Job(host, f"{crc32(repr(facts).encode()):08x}", number, _stat(number)[1])


def _stat(number: int) -> tuple[str, int]:
    """State and start of a process; ``("", 0)`` where the system does not say."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


_log = logging.getLogger("zerocore")
_STEP = re.compile(r"step-(\d{8,})")
_REMAINS = re.compile(r"step-\d{8,}\.(?:deleted|(?:deleted|tmp)-(?:(.+)-)?[0-9a-f]{8})")
_OWN_FILE = re.compile(rf"{re.escape(METADATA)}|{re.escape(NAME)}|__\d+_\d+\.distcp|rank-\d+\.pt")
SILENT_SECONDS = 600.0  # without a change, after which a save of another host has ended
_writing: set[Path] = set()  # by this process
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


def temporary_of(final: Path) -> Path:
    """The folder that a save of this process writes to; another one each time."""
    return final.with_name(f"{final.name}.tmp-{this_job()}-{uuid.uuid4().hex[:8]}")


def begin(temporary: Path) -> None:
    """Makes the folder that a save writes to, and deletes what ended ones have left; raises
    RuntimeError if another process of this host writes there."""
    folder = temporary.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path, job in _remains(folder):
        if job is not None and job != this_job() and job.is_on_this_host and job.lives:
            raise RuntimeError(
                f"process {job.number} of this host writes {path}; give each training a folder of "
                "its own, or end that process"
            )
    _writing.add(temporary)
    files.make_folder(temporary)
    now = temporary.stat().st_mtime  # by the clock of the file system, which other hosts see, too
    for path, job in _remains(folder):
        if path not in _writing:
            _delete_remains(path, job, now)


def end(temporary: Path) -> None:
    """The save that writes to the folder has ended."""
    _writing.discard(temporary)


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


def _remains(folder: Path) -> list[tuple[Path, Job | None]]:
    """Folders of saves and deletions that have not come to their end, and the jobs of saves."""
    found = []
    for path in sorted(folder.glob("step-*")):
        match = _REMAINS.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found.append((path, Job.parse(match[1] or "")))
    return found


def _delete_remains(path: Path, job: Job | None, now: float) -> None:
    is_known = job is not None and job.is_on_this_host  # then it has ended, or it is refused
    if not is_known and ".tmp-" in path.name and now - _last_change(path, now) < SILENT_SECONDS:
        host = "unknown" if job is None else job.host
        _warn(path, f"it was written less than {SILENT_SECONDS:.0f} s ago, on host {host}")
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
