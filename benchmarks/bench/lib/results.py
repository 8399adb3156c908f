"""Dated result files: what was run, where, with which versions, and the raw numbers."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

# Where the result files of all benchmarks go.
RESULTS_FOLDER = Path(
    os.environ.get("ZEROCORE_RESULTS", Path(__file__).resolve().parents[2] / "results")
)
VERSIONED = ("torch", "zerocore", "deepspeed", "numpy")


def write_results(
    theme: str,
    raw: dict[str, Any],
    tables: str,
    hardware: str = "",
    folder: Path = RESULTS_FOLDER,
) -> list[Path]:
    """Writes `<date>_<hardware>_<theme>.json` (all of `raw`) and `.md` (`tables`, markdown).

    `hardware` is a short name for the file; by default it is taken from the GPU, or the processor
    where there is none. Returns the two paths.
    """
    record = {"theme": theme, "command": command_line(), "machine": machine(), **raw}
    record["versions"] = versions()
    stamp = datetime.now(timezone.utc)
    record["date"] = stamp.isoformat(timespec="seconds")
    stem = f"{stamp:%Y-%m-%d}_{hardware or hardware_slug()}_{theme}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{suffix}" for suffix in (".json", ".md")]
    paths[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(_markdown(record, tables, paths[0].name), encoding="utf-8")
    return paths


def command_line() -> str:
    """The command that is running, from the repository's root."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = f"torchrun --nproc-per-node {ranks}" if under_torchrun else "python"
    script = Path(sys.argv[0]).resolve()
    return " ".join([launcher, f"{script.parent.name}/{script.name}", *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Python and the installed distributions that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, kernel, and the GPU if there is one."""
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
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def gpu_name() -> str:
    """The model name of the first GPU that torch sees; empty where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def hardware_slug() -> str:
    """A file-name part such as `2-core-xeon-2-80ghz` or `nvidia-h200`."""
    if gpu := gpu_name():
        return "-".join(re.findall(r"[a-z0-9]+", gpu.lower()))
    name = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|intel|amd", " ", processor_name().lower())
    words = re.findall(r"[a-z0-9]+", name)
    return "-".join([str(len(os.sched_getaffinity(0))), "core", *words])


def _markdown(record: dict[str, Any], tables: str, raw_name: str) -> str:
    where = record["machine"]
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    processors = ", ".join(filter(None, (where.get("gpu"), where["processor"])))
    return "\n".join(
        [
            f"# {record['theme']}, {record['date'][:10]}",
            "",
            f"`{record['command']}`",
            "",
            f"{processors}, {where['cores']} cores, {where['memory_gib']} GiB; {used}.",
            f"Raw numbers: `{raw_name}`.",
            "",
            tables.strip(),
            "",
        ]
    )
