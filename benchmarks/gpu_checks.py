"""Runs short checks of a GPU, each in a process with a time limit that writes a line of JSON.

python benchmarks/gpu_checks.py --list
python benchmarks/gpu_checks.py NAME...       all at once on a GPU, else one after the other

A line has the check's name, "ok", "failed" or "skipped", its seconds, and figures or the end of its
output. It goes to the standard output and to the file that ZEROCORE_CHECKS names. ZEROCORE_LOGS
names a folder for whole outputs. The status is 1 if a check has failed. A check that exceeds
ZEROCORE_CHECK_LIMIT seconds ends by force, after pytest has printed all stacks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = float(os.environ.get("ZEROCORE_CHECK_LIMIT", "60"))
FACTS = "FACTS "  # before the figures of a check in its output

# Tests that a check runs: paths below tests/gpu, then options of pytest.
TESTS: dict[str, str] = {
    "kernels": "test_kernels.py -k 'not 2000'",
    "adamw": "test_adamw.py -k 'not 600'",
    "parity": "test_parity.py -k 'test_stages and (plain-1] or all-1])'",
    "one_rank": "test_parity.py -k 'one_rank or without_a_group or another_stream or meta_device'",
    "parity_bf16": "test_parity.py -k mixed_precision",
    "failed_steps": "test_parity.py -k failed",
    "steady": "test_steady_state.py -k 'waits and (-plain- or -all- or bf16_full)'",
    "copies": "test_steady_state.py -k host_and_copies",
    "uses": "test_uses.py -k 'offload or muon or fsdp'",
    "states": "test_uses.py -k 'save or parked'",
    "wires": "test_uses.py -k narrow",
    "captures": "test_uses.py -k capture",
    "events": "test_events.py -k '1] or clock or twice'",
    "link": "test_emulated_link.py",
    "delays": "test_delays.py -k 'stage3-1 or missing'",
}


# -- checks that are not tests --------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describes the GPU, its driver and libraries; checks that this build computes on it."""
    import torch

    from zerocore import _C

    facts: dict[str, Any] = {"build": _C.build, "torch": torch.__version__}
    if not torch.cuda.is_available():
        return facts
    from bench.memory.nvml import NvmlDevice
    from zerocore.reporting.nvml import driver_version

    assert _C.HAS_CUDA_KERNELS, "this build has no CUDA code"
    assert (torch.ones(1, device="cuda") + 1).item() == 2
    chip = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    with NvmlDevice() as nvml:
        used = nvml.used_nbytes()
    facts |= {"gpu": chip.name, "sms": chip.multi_processor_count, "driver": driver_version()}
    facts |= {"nccl": torch.cuda.nccl.version(), "cores": os.cpu_count()}
    return facts | {"free": free, "total": total, "nvml_used": used}


def rates() -> dict[str, float]:
    """Measures this GPU's GB/s of copies (read and written, or over PCIe) and bf16 TFLOP/s."""
    import torch

    from zerocore import _C

    if not torch.cuda.is_available():
        return {}
    nbytes = 1 << 30
    began = time.perf_counter()
    host = _C.HostMemory(nbytes, pinned_nbytes=nbytes).view(0, nbytes, torch.uint8)
    found = {"pin_gb_per_s": nbytes / (time.perf_counter() - began) / 1e9}
    one, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    found["copy_gb_per_s"] = 2 * nbytes / _seconds(lambda: other.copy_(one)) / 1e9
    to_device, to_host = lambda: one.copy_(host, True), lambda: host.copy_(one, True)
    found["to_device_gb_per_s"] = nbytes / _seconds(to_device) / 1e9
    found["to_host_gb_per_s"] = nbytes / _seconds(to_host) / 1e9
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    found["bf16_tflop_per_s"] = 2 * 8192**3 / _seconds(lambda: square @ square) / 1e12
    return {name: round(rate, 1) for name, rate in found.items()}


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the median time of a call on the device."""
    import torch

    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[3:])


HERE: dict[str, Callable[[], dict[str, Any]]] = {"machine": machine, "rates": rates}


# -- running them ---------------------------------------------------------------------------------


@dataclass
class Running:
    """A check's process and the file of its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def command_of(name: str) -> list[str]:
    """Returns the command of a check."""
    if name in HERE:
        return [sys.executable, __file__, "--here", name]
    from shlex import split

    path, *options = split(TESTS[name])
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", ""]
    limits = [f"--timeout={LIMIT_S:.0f}", "--timeout-method=thread", "-W", "default"]
    return [*pytest, *limits, "--rehearse", f"tests/gpu/{path}", *options]


def start(name: str) -> Running:
    folder = os.environ.get("ZEROCORE_LOGS")
    # Both stay open until the check has ended.
    log: IO[bytes] = (
        Path(folder, f"{name}.log").open("w+b") if folder else tempfile.TemporaryFile("w+b")  # noqa: SIM115
    )
    # In a session of its own, so that processes that the check starts end with it.
    process = subprocess.Popen(
        command_of(name), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    return Running(name, process, log, time.monotonic())


def result_of(check: Running, by_force: bool) -> dict[str, Any]:
    """Returns the line of a check that has ended."""
    text, status = check.text(), check.process.returncode
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    facts = [line for line in lines if line.startswith(FACTS)]
    # Pytest ends with 5 if the machine has nothing for these tests, or all were skipped.
    passed = [line for line in lines if re.search(r"\d+ passed", line)]
    skipped = status == 5 or (status == 0 and not passed and not facts)
    result = "skipped" if skipped else "ok" if status == 0 and not by_force else "failed"
    line = {"check": check.name, "result": result, "s": round(time.monotonic() - check.began, 1)}
    if result == "failed":
        errors = [line[:200] for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
        ended = f"ended by force after {LIMIT_S:.0f} s; " if by_force else f"status {status}; "
        return line | {"error": ended + " | ".join([*errors[-6:], lines[-1][:200]])}
    return line | {
        "found": json.loads(facts[-1][len(FACTS) :]) if facts else (passed or lines)[-1].strip("= ")
    }


def finish(check: Running, by_force: bool = False) -> bool:
    """Writes the line of a check; returns False if it failed."""
    if by_force:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            check.process.send_signal(signal.SIGABRT)  # pytest's faulthandler prints all stacks
            check.process.wait(0.2)
        with suppress(ProcessLookupError):
            os.killpg(check.process.pid, signal.SIGKILL)
    check.process.wait()
    line = result_of(check, by_force)
    print(json.dumps(line), flush=True)
    if path := os.environ.get("ZEROCORE_CHECKS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return line["result"] != "failed"


def run(names: list[str], at_once: int) -> bool:
    """Runs checks, at most `at_once` at a time; returns False if one failed."""
    waiting, running, good = list(names), [], True
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the checks end with this process
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(start(waiting.pop(0)))
            time.sleep(0.05)
            for check in list(running):
                is_late = time.monotonic() - check.began > LIMIT_S
                if is_late or check.process.poll() is not None:
                    running.remove(check)
                    good = finish(check, by_force=check.process.poll() is None) and good
    finally:
        for check in running:  # an interrupt
            finish(check, by_force=True)
    return good


def main(names: list[str]) -> int:
    everything = [*HERE, *TESTS]
    if names[:1] == ["--here"]:
        sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
        print(FACTS + json.dumps(HERE[names[1]]()), flush=True)
        return 0
    if names == ["--list"] or not set(names) <= set(everything):
        print(*everything)
        if names != ["--list"]:
            print("no such check:", *(set(names) - set(everything)), file=sys.stderr)
        return 0 if names == ["--list"] else 2
    on_gpu = any(Path("/dev").glob("nvidia[0-9]*"))  # a container's only GPU may not be number 0
    return 0 if run(names or everything, len(everything) if on_gpu else 1) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
