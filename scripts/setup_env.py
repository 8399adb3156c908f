"""Creates the virtual environment that `make` works in, with as few downloads as it can.

    python3 scripts/setup_env.py create .venv              torch and what compiles the C++ core
    .venv/bin/python scripts/setup_env.py install test     one extra of pyproject.toml

Where the Python that runs `create` has a suitable torch, the environment sees that Python's
packages; nothing that is there already is downloaded. Standard library and pip only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
# Which build `torch==2.13.0` is, CPU or CUDA, is up to the packages that pip is configured to
# see. To choose another one, install it in $(PYTHON) first: a suitable torch there is used.
CPU_TORCH = "torch==2.13.0"
CUDA_TORCH = "torch==2.11.0"
BUILD_REQUIREMENTS = ["setuptools>=77.0.3", "ninja>=1.11.1"]
# Installed with an extra into the folder `alone` of the environment, without what they require.
# verl wants an older transformers than ours, and has packages of the names `tests` and `scripts`.
ALONE = {"test": ["verl==0.9.1"]}


def find_torch() -> str | None:
    """Version of the torch that this Python imports, if zerocore can be built on it."""
    try:
        import torch
    except Exception as error:  # an import can fail in many ways, a missing CUDA library is one
        print(f"no torch in {sys.executable}: {error}")
        return None
    version = str(torch.__version__)
    release = tuple(int(part) for part in version.split(".")[:2])
    return version if OLDEST_TORCH <= release <= NEWEST_TORCH else None


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    try:
        driver = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
    except OSError:
        return False
    return driver.returncode == 0


def missing(requirements: list[str], extra: str = "") -> list[str]:
    """Those of `requirements` that no installed package meets, as pip takes them."""
    from pip._vendor.packaging.requirements import Requirement

    result = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            requirement.marker = None
            result.append(str(requirement))
    return result


def pip_install(python: str, requirements: list[str], *options: str) -> None:
    """Installs into the environment of `python`; no call of pip when there is nothing to do."""
    if requirements:
        print("installing", *requirements, flush=True)
        command = [python, "-m", "pip", "install", "--quiet", *options, *requirements]
        subprocess.run(command, check=True)


def create_sharing(folder: Path) -> None:
    """An environment that sees this Python's packages, also where this is itself a venv."""
    in_venv = sys.prefix != sys.base_prefix
    has_pip = importlib.util.find_spec("pip") is not None
    # A pip, and on old Pythons a setuptools, of its own would hide the ones that are here.
    venv.create(
        folder, system_site_packages=not in_venv, clear=True, symlinks=True, with_pip=not has_pip
    )
    if in_venv:  # system_site_packages would mean those of the Python below this environment
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in packages]
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "shared.pth").write_text("".join(lines))


def create(folder: Path) -> None:
    """Makes `folder` an environment with torch and what compiles the C++ core."""
    python = str(folder / "bin" / "python")
    torch_version = find_torch()
    if torch_version:
        print(f"using torch {torch_version} of {sys.executable}")
        create_sharing(folder)
        pip_install(python, missing(BUILD_REQUIREMENTS))
    else:
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        torch = CUDA_TORCH if has_gpu() else CPU_TORCH
        pip_install(python, [torch, *BUILD_REQUIREMENTS])


def install(extras: list[str]) -> None:
    """Installs what is missing of the extras of the installed zerocore into this environment."""
    requirements = importlib.metadata.requires("zerocore") or []
    for extra in extras:
        pip_install(sys.executable, missing(requirements, extra))
        folder = str(Path(sys.prefix) / "alone")
        alone = ("--no-deps", "--upgrade", "--target", folder)
        pip_install(sys.executable, ALONE.get(extra, []), *alone)


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (this very check says so to older ones)
        sys.exit(f"zerocore needs Python 3.10 or newer, {sys.executable} is older")
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    os.environ["PIP_NO_COMPILE"] = "1"  # Python compiles the few of torch's modules that it imports
    command, *arguments = sys.argv[1:] or ["help"]
    if command == "create" and len(arguments) == 1:
        create(Path(arguments[0]).absolute())
    elif command == "install" and arguments:
        install(arguments)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
