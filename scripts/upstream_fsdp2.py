"""One table of PyTorch's own FSDP2 tests under ``torch.distributed.fsdp`` and ``zerocore.fsdp``.

python scripts/upstream_fsdp2.py --tests PYTORCH/test/distributed/_composable/fsdp --relax

The files are PyTorch's and are not part of this repository; take those of the installed version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench.lib.results import Results  # noqa: E402
from bench.lib.tables import Table  # noqa: E402

ENGINES = ("torch", "zerocore")
Rows = dict[str, dict[str, Any]]  # of one engine, by file and test


def parse_options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, nargs="+", required=True, help="folders or files")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument(
        "--relax", action="store_true", help="run on the CPU what asks for more devices than exist"
    )
    parser.add_argument("--ranks", type=int, default=2, help="where a test leaves it open")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a test")
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--min-pass", type=int, default=0, help="of zerocore, else exit with 1")
    parser.add_argument("--source", nargs="*", default=[], help="repository@commit of the files")
    parser.add_argument("--logs", type=Path, default=None, help="folder for what tests print")
    parser.add_argument(
        "--resume", action="store_true", help="take the answers that lie in --logs already"
    )
    parser.add_argument("--write", action="store_true", help="write a dated result")
    return parser.parse_args()


def test_files(places: list[Path]) -> list[Path]:
    """The test files of the folders, sorted by name."""
    found = [place.glob("test_*.py") if place.is_dir() else [place] for place in places]
    return sorted(chain.from_iterable(found), key=lambda path: path.name)


def run_engine(engine: str, files: list[Path], options: argparse.Namespace, logs: Path) -> Rows:
    """The rows of all tests, by file and name."""
    logs = logs / engine
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "upstream_harness.py"), "--engine", engine]
    command += ["--logs", str(logs), "--limit", str(options.limit), "--only", options.only]
    command += ["--resume"] if options.resume else []
    command += ["--ranks", str(options.ranks)] if options.relax else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    rows: Rows = {}
    for path in files:
        with subprocess.Popen(
            [*command, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                row = json.loads(line)
                rows[f"{row['file']}: {row['test']}"] = row
                print(f"{engine}: {row['test']}: {row['status']} {row['reason'][:100]}", flush=True)
        if worker.returncode != 0:
            print(f"{engine}: {path.name} could not be loaded", flush=True)
    return rows


def tables_of(results: dict[str, Rows], options: argparse.Namespace) -> list[Table]:
    """Counts by file, and every test."""
    names = sorted({name for rows in results.values() for name in rows})
    counts = Table("Passed, by file", ["file", "tests", *results, "of torch's"])
    of_file = {file: [n for n in names if n.startswith(f"{file}: ")] for file in map(_file, names)}
    for file, tests in [*of_file.items(), ("all", names)]:
        passed = {
            engine: {n for n in tests if _passed(rows, n)} for engine, rows in results.items()
        }
        shared = set.intersection(*passed.values())
        counts.add(file, str(len(tests)), *(str(len(p)) for p in passed.values()), str(len(shared)))
    counts.notes += [f"Files: {source}." for source in options.source]
    if options.relax:
        counts.notes.append(
            "Relaxed for the CPU: tests that ask for devices run on gloo ranks, "
            f"{options.ranks} where the number is open; ranks that are threads are processes."
        )
    every = Table("Every test", ["test", *results, "why not"])
    for name in names:
        rows = [results[engine].get(name, {}) for engine in results]
        reason = next((row["reason"] for row in reversed(rows) if row.get("reason")), "")
        every.add(name, *(row.get("status", "-") for row in rows), reason.replace("|", "/")[:110])
    return [counts, every]


def _file(name: str) -> str:
    return name.split(": ")[0]


def _passed(rows: Rows, name: str) -> bool:
    return rows.get(name, {}).get("status") == "passed"


def failures(results: dict[str, Rows], min_pass: int) -> list[str]:
    """The expectations that the run does not meet."""
    ours = results.get("zerocore", {})
    count = Counter(row["status"] for row in ours.values())
    found = [] if count["passed"] >= min_pass else [f"{count['passed']} passed, not {min_pass}"]
    for name, row in ours.items():
        if row["status"] in ("hung", "crashed") and _passed(results.get("torch", {}), name):
            found.append(f"{row['status']}, where torch's passes: {name}")
    return found


def main() -> int:
    """Runs both engines, one after the other; 1 if something is missing."""
    options = parse_options()
    logs = options.logs or Path(tempfile.mkdtemp())
    files = test_files(options.tests)
    rows = {engine: run_engine(engine, files, options, logs) for engine in options.engine}
    with Results("upstream_fsdp2", options.write) as written:
        written.write(tables_of(rows, options), {"source": options.source, "rows": rows})
    problems = failures(rows, options.min_pass)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
