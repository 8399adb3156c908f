"""Does what a reader of README does, in a copy of the checkout, and says how long each step took.

    python scripts/first_steps.py                  all of README but make, which has its own targets
    python scripts/first_steps.py --page docs/installing.md --only pip

Commands and Python blocks run in the page's order, in a new virtual environment that sees the
packages of the running Python, so that its torch is not downloaded. A Python block runs alone, and
then on two ranks under torchrun. The first step that fails ends it, with what was printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from setup_env import create_sharing

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TWO_RANKS = "torchrun --standalone --nproc-per-node 2"


def steps(text: str, folder: Path) -> Iterator[str]:
    """The page's commands in order; Python blocks are written to files and run twice."""
    for number, (language, block) in enumerate(BLOCK.findall(text)):
        if language == "bash":
            lines = (line.partition("#")[0].strip() for line in block.splitlines())
            yield from filter(None, lines)
        else:
            (folder / f"block{number}.py").write_text(block)
            yield f"python block{number}.py"
            yield f"{TWO_RANKS} block{number}.py"


def copy_checkout(folder: Path) -> None:
    """The files that git tracks, as a clone has them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(command: str, folder: Path) -> float:
    """Seconds that it took; exits with its output if it fails."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["PATH"] = f"{folder / '.venv' / 'bin'}:{env['PATH']}"
    began = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-5000:]}\nfailed: {command}")
    return time.perf_counter() - began


def add_torchrun(folder: Path) -> None:
    """As pip writes it for a torch of this environment; a shared one's imports another Python."""
    script = folder / ".venv" / "bin" / "torchrun"
    script.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n')
    script.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    parser.add_argument("--skip", default="make |python benchmarks/", help="a regular expression")
    parser.add_argument("--only", default="", help="what steps begin with, as an expression")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-steps-") as name:
        folder = Path(name)
        copy_checkout(folder)
        create_sharing(folder / ".venv")
        add_torchrun(folder)
        total = 0.0
        for command in steps(options.page.read_text(), folder):
            if re.match(options.skip, command) or not re.match(options.only, command):
                continue
            seconds = run(command, folder)
            total += seconds
            print(f"{seconds:7.1f} s  {command}", flush=True)
        print(f"{total:7.1f} s")


if __name__ == "__main__":
    main()
