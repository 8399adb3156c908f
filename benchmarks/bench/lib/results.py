"""Writes dated result files: command, machine, versions, tables and raw numbers."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
from collections.abc import Iterable
from copy import deepcopy
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.lib.tables import Table, make_console

# The folder of all benchmarks' result files.
RESULTS_FOLDER = Path(
    os.environ.get("ZEROCORE_RESULTS", Path(__file__).resolve().parents[2] / "results")
)
# The status of a process that SIGINT ended.
INTERRUPTED = 130
VERSIONED = ("torch", "zerocore", "deepspeed", "numpy")


class Results:
    """The result files of a run: `<date>_<hardware>_<theme>.json` and `.md`.

    A script calls `write` after each row, so a killed run leaves its rows, with `complete: false`.
    The end of the `with` block prints the tables. An interrupt after the first row ends the process
    there with status 130, without pictures and other files.

    `hardware` is a short name for the file; by default the GPU's, or the processor's without a GPU.
    A rank that is not `is_main` writes and prints nothing.
    """

    def __init__(
        self,
        theme: str,
        save: bool = True,
        folder: Path = RESULTS_FOLDER,
        hardware: str = "",
        is_main: bool = True,
    ) -> None:
        now = datetime.now(timezone.utc)
        self.tables: list[Table] = []
        self.paths: list[Path] = []
        self._is_main, self._save = is_main, save and is_main
        self._stem = folder / f"{now:%Y-%m-%d}_{hardware or hardware_slug()}_{theme}"
        self._raw: dict[str, Any] = {}
        self._interrupted = False
        self._record = {
            "theme": theme,
            "command": command_line(),
            "machine": machine(),
            "versions": versions(),
            "date": now.isoformat(timespec="seconds"),
            "load_at_start": os.getloadavg()[0],
        }

    def __enter__(self) -> Results:
        # Shells start background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.tables:
            return
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one (`timeout` sends two)
        self._write_files(complete=kind is None)
        if self._is_main:
            console = make_console()
            for table in self.tables:
                table.show(console)
            print(f"  {_load(self._record)}")
            if self.paths:
                print("written:", ", ".join(path.name for path in self.paths))
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED)

    def write(self, tables: Iterable[Table], raw: dict[str, Any]) -> None:
        """Replaces the tables and the raw figures."""
        self.tables, self._raw = list(tables), deepcopy(raw)
        self._write_files(complete=False)
        if self._interrupted:
            raise KeyboardInterrupt

    def file(self, end: str) -> Path:
        """Returns the path of another file of this run, such as a picture."""
        path = self._stem.with_name(self._stem.name + end)
        if path not in self.paths:
            self.paths.append(path)
        return path

    def _interrupt(self, *_: object) -> None:
        # Python may drop this exception in a destructor or a fork: `write` raises it again.
        self._interrupted = True
        raise KeyboardInterrupt

    def _write_files(self, complete: bool) -> None:
        if not self._save:
            return
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        record = {**self._record, "complete": complete, **self._raw}
        raw_path, page = self.file(".json"), self.file(".md")
        _replace(raw_path, json.dumps(record, indent=1) + "\n")
        _replace(page, _markdown(record, self.tables, raw_path.name))


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically."""
    half = path.with_name(f".{path.name}.half")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def _load(record: dict[str, Any]) -> str:
    return f"Load of the machine at the start: {record['load_at_start']:.1f}."


def command_line() -> str:
    """Returns the running command, relative to the repository's root."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = f"torchrun --nproc-per-node {ranks}" if under_torchrun else "python"
    script = Path(sys.argv[0]).resolve()
    return " ".join([launcher, f"{script.parent.name}/{script.name}", *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the distributions that figures depend on."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describes the machine: processor, usable cores, memory in GiB, kernel, and the GPU if any."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = gpu_name()
    return {
        **({"gpu": gpu} if gpu else {}),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def processor_name() -> str:
    """Returns the processor's model name, or its architecture if that is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def gpu_name() -> str:
    """Returns the model name of torch's first GPU; empty if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def hardware_slug() -> str:
    """Returns a part of a file name such as `2-core-xeon-2-80ghz` or `nvidia-h200`."""
    if gpu := gpu_name():
        return "-".join(re.findall(r"[a-z0-9]+", gpu.lower()))
    name = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|intel|amd", " ", processor_name().lower())
    words = re.findall(r"[a-z0-9]+", name)
    return "-".join([str(len(os.sched_getaffinity(0))), "core", *words])


def _markdown(record: dict[str, Any], tables: Iterable[Table], raw_name: str) -> str:
    where = record["machine"]
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    processors = ", ".join(filter(None, (where.get("gpu"), where["processor"])))
    lines = [f"# {record['theme']}, {record['date'][:10]}", "", f"`{record['command']}`", ""]
    if not record["complete"]:
        lines += ["**Incomplete**: the run ended before its last row.", ""]
    lines += [
        f"{processors}, {where['cores']} cores, {where['memory_gib']} GiB; {used}.",
        f"Raw numbers: `{raw_name}`. {_load(record)}",
        "",
    ]
    text = "\n".join(table.markdown() for table in tables)
    return "\n".join([*lines, text.strip(), ""])
