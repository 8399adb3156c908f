"""Builds the C++ extension `zerocore._C`; the package metadata is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent.resolve()
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"]
# -ffp-contract=off: all processors round alike. -fno-math-errno: square roots need not set errno.
# -fopenmp: at::parallel_for has threads. Torch has loaded the OpenMP library, so none is linked.
CXX_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fopenmp"]
HOST_FLAGS = "-fvisibility=hidden,-Wall,-Wextra"  # of the compiler behind nvcc
# -fmad=false: a GPU then rounds as the CPU does. It costs no time: memory bounds these kernels.
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xcompiler", HOST_FLAGS]
# GCC collects garbage at 128 MiB and at each doubling, a tenth of the time to compile a file with
# torch's headers. From 512 MiB on, it collects once or twice.
MEMORY_FLAGS = ["--param", "ggc-min-heapsize=524288"]
# For the checks before a change lands, not for installs: other compilers warn about other things.
if os.environ.get("ZEROCORE_WERROR") == "1":
    CXX_FLAGS.append("-Werror")
    NVCC_FLAGS.append("-Werror=all-warnings")
DEFAULT_CUDA_ARCHS = "8.0;9.0;10.0+PTX"  # A100, H100, B200 and later GPUs


def find_cuda_home() -> str | None:
    """Returns the CUDA toolkit's folder: CUDA_HOME, or the folder that the nvcc on PATH reports."""
    nvcc = shutil.which("nvcc")
    if "CUDA_HOME" in os.environ or nvcc is None:
        return os.environ.get("CUDA_HOME")
    # The nvcc on PATH may be a wrapper script, so ask it rather than take its parent's parent.
    command = [nvcc, "-v", "-dryrun", "-x", "cu", os.devnull]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    here = re.search(r"_HERE_=(.+)", answer)
    return os.path.dirname(here.group(1)) if here else None


def use_ccache() -> None:
    """Compiles through ccache if it is installed: checkouts then share their object files."""
    compilers = [
        path for path in map(Path, ("/usr/lib/ccache", "/usr/lib64/ccache")) if path.is_dir()
    ]
    if shutil.which("ccache") is None or not compilers:
        return
    os.environ["PATH"] = f"{compilers[0]}{os.pathsep}{os.environ['PATH']}"
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))  # all checkouts get the same names
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")
    if "CUDA_HOME" in os.environ:
        os.environ.setdefault("PYTORCH_NVCC", f"ccache {os.environ['CUDA_HOME']}/bin/nvcc")


# torch.utils.cpp_extension reads CUDA_HOME once, when it is imported.
if cuda_home := find_cuda_home():
    os.environ["CUDA_HOME"] = cuda_home
use_ccache()

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402


class BuildExtension(cpp_extension.BuildExtension):
    """A build_ext that keeps object files between builds: ninja compiles only changed files."""

    def finalize_options(self) -> None:
        super().finalize_options()
        abi = sysconfig.get_config_var("SOABI")
        self.build_temp = str(ROOT / "build" / f"temp.{abi}-torch{torch.__version__}")


def wants_cuda() -> bool:
    """Returns whether to build for CUDA: as ZEROCORE_CUDA=0|1 says, else if torch and nvcc can."""
    toolkit = cpp_extension.CUDA_HOME or ""
    can_build = torch.version.cuda is not None and Path(toolkit, "bin", "nvcc").exists()
    choice = os.environ.get("ZEROCORE_CUDA") or str(int(can_build))
    if choice not in ("0", "1"):
        raise ValueError(f"ZEROCORE_CUDA must be 0 or 1, got {choice!r}")
    if choice == "1" and not can_build:
        raise RuntimeError(
            "ZEROCORE_CUDA=1 needs a torch that was built for CUDA and nvcc on PATH or CUDA_HOME; "
            f"found torch {torch.__version__} and CUDA_HOME={toolkit!r}. "
            "Install what is missing, or set ZEROCORE_CUDA=0 to build for the CPU."
        )
    return choice == "1"


def read_sources() -> list[list[str]]:
    """Returns the paths in csrc/sources.txt by line; CUDA files only if they are compiled."""
    lines = (ROOT / "csrc" / "sources.txt").read_text().splitlines()
    groups = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [group for group in groups if not group[0].endswith(".cu") or wants_cuda()]


def join_sources(group: list[str]) -> str:
    """Returns a source that joins a line's; rewrites it only if it changes, to keep its object."""
    if len(group) == 1:
        return group[0]
    path = Path("build", "grouped", Path(group[0]).relative_to("csrc"))
    text = "".join(
        f'#include "{Path(source).relative_to("csrc").as_posix()}"\n' for source in group
    )
    joined = ROOT / path
    if not joined.exists() or joined.read_text() != text:
        joined.parent.mkdir(parents=True, exist_ok=True)
        joined.write_text(text)
    return str(path)


def describe_cuda_build() -> str:
    """Returns the toolkit's version and the targets: ``"13.0 for compute_90 sm_80 sm_90"``."""
    nvcc = str(Path(cpp_extension.CUDA_HOME or "", "bin", "nvcc"))
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", answer)
    archs = re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))
    return f"{release[1] if release else 'not known'} for {' '.join(archs)}"


def define_macros(has_cuda: bool) -> list[tuple[str, str]]:
    """Returns facts of this build for ``python -m zerocore env``; no paths."""
    facts = {"ZEROCORE_CXX_FLAGS": " ".join(CXX_FLAGS)}
    if has_cuda:
        facts["ZEROCORE_CUDA_BUILD"] = describe_cuda_build()
    return [(name, f'"{fact}"') for name, fact in facts.items()]


def make_extension() -> Extension:
    """Makes the extension module: a CUDA extension only if there are CUDA sources to compile."""
    groups = read_sources()
    sources = [path for group in groups for path in group]
    has_cuda = any(path.endswith(".cu") for path in sources)
    if has_cuda and not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS)
    # A folder given with both -I and -isystem counts as -isystem. So our warnings are errors
    # while those in torch's headers (-Wunused-parameter, over a hundred) stay silent.
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    headers = [
        str(p.relative_to(ROOT)) for end in ("h", "cuh") for p in ROOT.glob(f"csrc/**/*.{end}")
    ]
    make = cpp_extension.CUDAExtension if has_cuda else cpp_extension.CppExtension
    return make(
        "zerocore._C",
        [join_sources(group) for group in groups],
        include_dirs=[str(ROOT / "csrc")],
        define_macros=define_macros(has_cuda),
        depends=[*headers, *sources, "csrc/sources.txt", "setup.py"],
        extra_compile_args={"cxx": CXX_FLAGS + MEMORY_FLAGS + system, "nvcc": NVCC_FLAGS + system},
    )


def torch_requirement() -> str:
    """Returns the releases of torch that can load the extension, given the one it is built with."""
    major, minor = torch.__version__.split(".")[:2]
    return f"torch=={major}.{minor}.*"


setup(
    ext_modules=[make_extension()],
    install_requires=[torch_requirement()],
    cmdclass={"build_ext": BuildExtension},
)
