"""Describes the installation for a bug report, one fact a line."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import zerocore
from zerocore import _C
from zerocore.reporting.nvml import NvmlUnavailable, driver_version

_BUILD = r"GCC [\d.]+|clang [\d.]+|CPU capability usage: \w+"
_BACKENDS = ("gloo", "nccl", "mpi", "ucc")


def environment() -> dict[str, str]:
    """Returns facts by name, in order; a missing library has a fact, too."""
    return {
        "zerocore": f"{zerocore.__version__}, {Path(_C.__file__).name}",
        "zerocore build": _C.build,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores",
        "torch": f"{torch.__version__}, C++11 ABI {int(torch.compiled_with_cxx11_abi())}",
        "torch build": ", ".join(re.findall(_BUILD, torch.__config__.show())) or "not known",
        "CUDA": _cuda(),
        "NCCL": _nccl(),
        "c10d": ", ".join(filter(dist.is_backend_available, _BACKENDS)) or "no backend",
        "NVML": _nvml(),
        "transformers": _version("transformers"),
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, no device"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {len(names)} x {names[0]}"


def _nccl() -> str:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "torch was built without NCCL"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _nvml() -> str:
    try:
        driver = f"driver {driver_version()}"
    except NvmlUnavailable as error:
        driver = str(error)
    return f"nvidia-ml-py {_version('nvidia-ml-py')}, {driver}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
