"""Runs PyTorch's own FSDP2 tests for one engine: each in a process of its own, its ranks in others.

A worker imports torch and the test files once and forks for each test, so a test costs what it does
and a hang or a crash costs a row. Prints one line of JSON for each test.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

MOST_RANKS = 8
# Ports of the files to other devices are turned back to the one that there is.
CURRENT = r"device_type.type, torch.get_device_module\(device_type\).current_device\(\)"
PORTS = (
    (rf"torch.device\(\s*{CURRENT}\s*\)", "torch.device(device_type.type)"),
    (r"^(import torch_npu|from torch_npu\..*)$", ""),
    (r"^ *@SupportedDevices\(.*\)$", ""),
    (r"\bFSDPNPUTest\b", "FSDPTest"),
    (r"skipIfUnsupportMultiNPU", "skip_if_lt_x_gpu"),
    (r"\.npu\(\)", '.to("cpu")'),
    (r"torch\.(npu|xpu)\.", "torch.cpu."),
    (r"torch\.accelerator\.current_accelerator\(\)\.type", '"cpu"'),
    (r"\"npu(:0)?\"", '"cpu"'),
    (r"type='npu'", "type='cpu'"),
)
# Lines that a port took out with the names above.
PORTED_IMPORTS = (
    "from torch.testing._internal.common_fsdp import FSDPTest\n"
    "from torch.testing._internal.common_distributed import skip_if_lt_x_gpu\n"
)


@dataclass
class Row:
    """How a test ended: passed, failed, skipped, hung or crashed."""

    file: str
    test: str
    status: str
    seconds: float
    reason: str = ""


def relax() -> None:
    """Makes the harness run on the CPU: what it asks of devices, and threads that play ranks."""
    from torch.testing._internal import common_distributed, common_utils

    torch.cpu._sleep = lambda *_: None  # what it delays runs in order on the CPU
    common_utils.device_sleep = lambda *_: None
    common_utils.get_cycles_per_ms = lambda *_: 1.0
    from torch.testing._internal import common_fsdp

    torch.cpu.device_count = lambda: MOST_RANKS
    common_distributed.skip_if_lt_x_gpu = _needing
    if "_run" in common_fsdp.FSDPTest.__dict__:
        del common_fsdp.FSDPTest._run  # the mixin's lets the CPU pass
    case = common_distributed.MultiProcessTestCase
    case._spawn_processes = lambda self: self._start_processes(
        multiprocessing.get_context("fork").Process
    )
    # Every rank has the reference: each takes its part of its own, without a message.
    common_fsdp.distribute_tensor = partial(common_fsdp.distribute_tensor, src_data_rank=None)
    common_fsdp.FSDPTestMultiThread = _threads_as_processes(common_fsdp.FSDPTest)
    _drop_device_ids()
    _attend_to_local_heads()


def _needing(count: int, **_: Any) -> Any:
    def note(test: Any) -> Any:
        test.needed_ranks = count
        return test

    return note


def _threads_as_processes(base: Any) -> Any:
    class FSDPTestMultiThread(base):  # type: ignore[misc]
        """Tests for ranks that are threads, with ranks that are processes."""

        def perThreadSetUp(self) -> None:
            torch._dynamo.reset()

        def perThreadTearDown(self) -> None:
            torch._dynamo.reset()

        def run_test(self, *args: Any, **kwargs: Any) -> None:
            self.perThreadSetUp()
            super().run_test(*args, **kwargs)

    return FSDPTestMultiThread


def _drop_device_ids() -> None:
    """``device_ids=[rank]`` means nothing to a module on the CPU, and DDP refuses it."""
    import torch.distributed._composable as composable

    stock = composable.replicate

    @wraps(stock)
    def replicate(module: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return stock(module, **kwargs)

    replicate.state = stock.state
    composable.replicate = replicate


def _attend_to_local_heads() -> None:
    """DTensor has no rule for attention on the CPU. A rank attends to its batch and its heads."""
    from torch.distributed.tensor import DTensor

    stock = torch.nn.functional.scaled_dot_product_attention

    @wraps(stock)
    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = (query, key, value)
        if not all(isinstance(each, DTensor) and _is_of_heads(each) for each in given):
            return stock(*given, *args, **kwargs)
        found = stock(*(each.to_local() for each in given), *args, **kwargs)
        return DTensor.from_local(found, query.device_mesh, query.placements)

    torch.nn.functional.scaled_dot_product_attention = attend


def _is_of_heads(tensor: Any) -> bool:
    """Whether each rank holds the whole sequence of its own heads."""
    return all(
        placement.is_replicate() or (placement.is_shard() and placement.dim in (0, 1))
        for placement in tensor.placements
    )


def load(path: Path) -> types.ModuleType:
    """The module of a test file, whose port is undone."""
    text = path.read_text()
    original = text
    for pattern, replacement in PORTS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    if "torch_npu" in original:
        text = PORTED_IMPORTS + text
    copy = Path(tempfile.mkdtemp()) / path.name  # a file, so that tests may read their source
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def cases_of(module: types.ModuleType, num_ranks: int | None) -> Iterator[unittest.TestCase]:
    """The tests of a file; where its world size follows the devices, with that many ranks."""
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, unittest.TestCase)):
            continue
        if cls.__module__ != module.__name__:
            continue
        if num_ranks is not None:
            _limit_ranks(cls, num_ranks)
        for name in unittest.defaultTestLoader.getTestCaseNames(cls):
            yield cls(name)


def _limit_ranks(cls: Any, num_ranks: int) -> None:
    stock = cls.__dict__.get("world_size")
    if stock is None or "device_count" not in inspect.getsource(stock.fget):
        return

    named = re.search(r"WorldSize(\d+)$", cls.__name__)

    def world_size(self: Any) -> int:
        test = getattr(type(self), self._testMethodName)
        needed = int(named[1]) if named else getattr(test, "needed_ranks", 1)
        return min(stock.fget(self), max(num_ranks, needed))

    cls.world_size = property(world_size)


def run_case(case: Any, file: str, limit_s: float, logs: Path, resume: bool) -> Row:
    """Forks, runs the test there, and waits for its end or kills it and its ranks.

    With ``resume`` an answer that lies in ``logs`` is taken instead.
    """
    name = f"{type(case).__name__}.{case._testMethodName}"
    if getattr(case, "world_size", 1) > MOST_RANKS:
        return Row(file, name, "skipped", 0.0, f"{case.world_size} ranks")
    log, answer = logs / f"{file}.{name}.log", logs / f"{file}.{name}.json"
    if resume and answer.exists():
        return Row(file, name, *json.loads(answer.read_text()))
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _run_in_child(case, log, answer, limit_s)
    if not _wait(pid, limit_s):
        answer.write_text(json.dumps(["hung", limit_s, f"no end within {limit_s:.0f} s"]))
    elif not answer.exists():
        answer.write_text(json.dumps(["crashed", 0.0, "the process ended without an answer"]))
    return Row(file, name, *json.loads(answer.read_text()))


def _run_in_child(case: Any, log: Path, answer: Path, limit_s: float) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stock = case.run_test if hasattr(case, "run_test") else None
    if stock is not None:
        type(case).run_test = _with_stacks(type(case).run_test, limit_s)
    result = unittest.TestResult()
    begin = time.monotonic()
    try:
        case.run(result)
        status, reason = _outcome(result)
        answer.write_text(json.dumps([status, round(time.monotonic() - begin, 1), reason]))
    finally:
        os._exit(0)


def _with_stacks(run_test: Any, limit_s: float) -> Any:
    """A rank that is about to be killed says where it is."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        faulthandler.dump_traceback_later(limit_s - 2)
        run_test(self, *args, **kwargs)
        faulthandler.cancel_dump_traceback_later()

    return run


def _outcome(result: unittest.TestResult) -> tuple[str, str]:
    for _, text in [*result.errors, *result.failures]:
        print(text, flush=True)
        died = re.search(r"exit code (-\d+)|signal", text)
        return ("crashed" if died else "failed", _last_error(text))
    for _, reason in result.skipped:
        return "skipped", str(reason)
    return "passed", ""


def _last_error(text: str) -> str:
    """The first rank's exception, in one line."""
    ranks = text.split("exited with error code")
    lines = (ranks[1] if len(ranks) > 1 else text).splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*", line)]
    found = errors[0] if errors else next((line for line in lines if line.strip()), "")
    return found.strip()[:200]


def _wait(pid: int, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    ended = False
    while not ended and time.monotonic() < end:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also ranks that were left over
    if not ended:
        os.waitpid(pid, 0)
    return ended


def main() -> None:
    """Prints the rows of all tests of the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--engine", choices=("torch", "zerocore"), required=True)
    parser.add_argument("--ranks", type=int, default=None, help="relax the harness to as many")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.engine == "zerocore":
        import zerocore.fsdp

        zerocore.fsdp.install()  # before the harness imports the names
    if options.ranks is not None:
        relax()
    for path in options.files:
        sys.path.insert(0, str(path.parent))
        for case in cases_of(load(path), options.ranks):
            if re.search(options.only, f"{path.stem}.{case.id()}"):
                row = run_case(case, path.stem, options.limit, options.logs, options.resume)
                print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
