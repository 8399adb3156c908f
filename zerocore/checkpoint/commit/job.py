"""Which process writes an unfinished checkpoint, by its folder's name; whether it still does."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32


@dataclass(frozen=True)
class Job:
    """A process, so that no other one is taken for it.

    Attributes:
        host: its name, for people.
        system: hash of what else tells hosts apart: two containers may share a name.
        number: of the process.
        start: when it began, in the host's ticks; numbers are used again. 0 if unknown.
    """

    host: str
    system: str
    number: int
    start: int

    def __str__(self) -> str:
        return f"{self.host}.{self.system}.{self.number}.{self.start}"

    @staticmethod
    def parse(text: str) -> Job | None:
        """The job of that text; None if it is none."""
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
