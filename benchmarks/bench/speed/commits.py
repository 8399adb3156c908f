"""Builds commits of this repository outside of the checkout, and keeps the builds."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zerocore" / "speed"
NUM_KEPT = 8  # builds, of some MB each
LAST_LINES = 12


class SpeedError(Exception):
    """Raised if the comparison cannot run; the text names the commit and the cause."""


def resolve(name: str) -> str:
    """Returns the full hash of a commit.

    Raises:
        SpeedError: the repository has no such commit.
    """
    # Git would read a name that begins with a dash as an option.
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode != 0:
        raise SpeedError(
            f"BASE={name} is not a commit of this repository; "
            "give a hash, a branch or a tag that `git log` knows, or fetch it"
        )
    return found.stdout.decode().strip()


def head() -> str:
    """Returns the commit that is checked out."""
    return resolve("HEAD")


def has_changes() -> bool:
    """Whether the package or its sources differ from the commit that is checked out."""
    changed = _git("status", "--porcelain", "--", "csrc", "zerocore", "setup.py")
    return bool(changed.stdout.strip())


def described(commit: str) -> str:
    """Returns a commit's short hash, date and subject."""
    return _git("log", "-1", "--format=%h, %cs: %s", commit).stdout.decode().strip()


def build(commit: str) -> Path:
    """Returns the folder from which Python imports a commit's zerocore; builds it the first time.

    Raises:
        SpeedError: the commit does not build; the text has the compiler's last lines.
    """
    abi = sysconfig.get_config_var("SOABI")
    folder = CACHE / f"{commit[:12]}-{abi}-torch{torch.__version__}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as name:
            finished = _built(commit, Path(name))
            if not folder.exists():  # another process may have built it
                finished.rename(folder)
    os.utime(folder)
    _drop_oldest()
    return folder


def _built(commit: str, parent: Path) -> Path:
    """Builds a commit into a folder in `parent` with the package and its extension only."""
    tree, finished = parent / "tree", parent / "finished"
    archive = _git("archive", commit)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tree, **safely)
    if not (tree / "setup.py").exists():
        raise SpeedError(f"{commit[:12]} does not build: it has no setup.py")
    # The ninja of this Python's folder, which may not be in PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "PATH": path, "ZEROCORE_WERROR": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0 or not [*tree.glob("zerocore/_C.*.so")]:
        raise SpeedError(f"{commit[:12]} does not build:\n{last_lines(done.stdout)}")
    finished.mkdir()
    (tree / "zerocore").rename(finished / "zerocore")
    return finished


def last_lines(text: str) -> str:
    """Returns the last lines of a program's output."""
    return "\n".join(line[:500] for line in text.strip().splitlines()[-LAST_LINES:])


def _drop_oldest() -> None:
    builds = sorted(CACHE.glob("*-torch*"), key=lambda path: path.stat().st_mtime)
    for path in builds[:-NUM_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
