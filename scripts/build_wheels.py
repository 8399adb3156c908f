"""Builds a wheel of zerocore for each release of torch that is named, checks and tries it.

    python scripts/build_wheels.py dist 2.13.0 2.12.0

The running Python's torch is taken where it has that version; others are installed with pip, in an
environment of their own. A wheel's version says what it is for: 0.1.0+torch2.13.cpu. It must link
to nothing but torch and the system, and train in an environment without a compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "scripts", "zerocore", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TORCH = r"lib(c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python|cudart)\.so(\.\d+)*"
SYSTEM = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d"
TRIAL = """
import torch, zerocore
torch.manual_seed(0)
model = zerocore.shard(torch.nn.Linear(8, 8), stage=3)
optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
before = model(torch.ones(1, 8)).square().mean()
before.backward()
optimizer.step()
assert model(torch.ones(1, 8)).square().mean() < before
print(zerocore.__file__)
"""


def run(*command: str | Path, **environment: str) -> str:
    """The standard output of a command; its failure is an error that shows all it wrote."""
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def python_with(torch_version: str, folder: Path) -> str:
    """A Python that imports this torch: the running one, or that of a new environment."""
    ask = "import torch; print(torch.__version__.split('+')[0])"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if asked.stdout.strip() == torch_version:
        return sys.executable
    venv.create(folder, symlinks=True, with_pip=True)
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", f"torch=={torch_version}", "setuptools>=77.0.3")
    run(python, "-m", "pip", "install", "-q", "ninja", "numpy", "wheel")
    return python


def local_version(torch_version: str, cuda: str | None) -> str:
    """The part of the wheel's version behind the ``+``."""
    major, minor = torch_version.split(".")[:2]
    return f"torch{major}.{minor}.{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"


def build(python: str, out: Path, folder: Path) -> Path:
    """Compiles a copy of the sources, without what earlier builds left; returns the wheel."""
    ask = "import torch; print(torch.__version__, torch.version.cuda or '')"
    version, _, cuda = run(python, "-c", ask).strip().partition(" ")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        ignored = {"ignore": shutil.ignore_patterns("*.so", "__pycache__")}
        copy(ROOT / name, folder / name, **(ignored if copy is shutil.copytree else {}))
    tag = folder / "tag.cfg"
    tag.write_text(f"[egg_info]\ntag_build = +{local_version(version, cuda or None)}\n")
    words = ("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out / "new", folder)
    run(python, "-m", "pip", *words, DIST_EXTRA_CONFIG=str(tag))
    (wheel,) = (out / "new").glob("zerocore-*.whl")
    target = wheel.replace(out / wheel.name)
    (out / "new").rmdir()
    return target


def links(library: Path) -> list[str]:
    """The libraries that it needs, and folders that it looks in, which are mistakes."""
    dynamic = run("readelf", "-dW", library)
    return re.findall(r"\((?:NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", dynamic)


def newest_glibc(library: Path) -> str:
    """The version of glibc that the system must have at least."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "-VW", library))
    return ".".join(map(str, max((int(major), int(minor)) for major, minor in found)))


def check(python: str, wheel: Path, folder: Path) -> str:
    """Raises a RuntimeError if the wheel links to more than torch and the system, or fails."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (library,) = folder.glob("zerocore/_C*.so")
    foreign = [name for name in links(library) if not re.fullmatch(f"{TORCH}|{SYSTEM}", name)]
    if foreign:
        raise RuntimeError(f"{wheel.name} links to {', '.join(foreign)}")
    imported = run(python, "-P", "-c", TRIAL, PYTHONPATH=str(folder)).strip()
    if not imported.startswith(str(folder)):
        raise RuntimeError(f"tried {imported} instead of {wheel.name}")
    return f"{wheel.name}: links to torch and the system, glibc {newest_glibc(library)} or newer"


def main() -> None:
    if "--help" in sys.argv or len(sys.argv) < 3:
        print(__doc__)
        sys.exit("--help" not in sys.argv)
    out = Path(sys.argv[1]).absolute()
    for version in sys.argv[2:]:
        with tempfile.TemporaryDirectory(prefix="zerocore-wheel-") as folder:
            parts = [Path(folder, name) for name in ("python", "sources", "wheel")]
            for part in (out, *parts[1:]):
                part.mkdir(parents=True, exist_ok=True)
            python = python_with(version, parts[0])
            print(check(python, build(python, out, parts[1]), parts[2]), flush=True)


if __name__ == "__main__":
    main()
