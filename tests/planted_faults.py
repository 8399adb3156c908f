"""Plants faults of one line, one at a time: does a test of `make test` find each?

`python -m tests.planted_faults [NUMBER ...]` tries them in a copy of the tree, all or those named.
The last two compile the C++ core anew, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".git", ".venv", "build", "*.cubin", ".*_cache", ".hypothesis", "__pycache__")


# File in zerocore/ or csrc/ | text | what it becomes | tests that should fail then, in tests/
TABLE = r"""
planning/planner.py | _element(types.grad) | _element(types.reduce) | planning/test_plan.py
common/alarm.py | "" if error is None | "" if error | watch/test_alarm.py
matrices/muon_rounds.py | alpha=-lr * ratio | alpha=lr * ratio | matrices/test_muon.py
optim/adamw.py | plan.kinds != kinds or | | optim/test_adamw.py optim/test_adamw_on_ranks.py
tensor/rules.py | and not _reads_shard(args, kwargs) | | tensor/test_conversions.py
tensor/implicit_unshard.py | engine.exit(unit, None) | pass | tensor/test_reads.py
tensor/reductions.py | .sum() / counts.sum() | .mean() | tensor/test_shard_functions.py
checkpoint/commit/saving.py | files.flush(file) | pass | checkpoint/test_durability.py
checkpoint/checked_reads.py | // parts, 0 | // parts - 1, 0 | checkpoint/test_checksums.py
checkpoint/dcp/save_plan.py | += nbytes | += nbytes - 1 | checkpoint/dcp/test_save_plan.py
model/casting.py | mixed.param_dtype or first | first | model/test_mixed_precision.py
model/unit_call.py | engine.fail_pass() | pass | watch/test_alarm.py
planning/step_time.py | == "reduce_scatter" | == "all_reduce" | common/test_links.py
tensor/rows.py | get_group(dim) for | get_group(0) for | fsdp/test_clip.py
hooks/optimizer_rules.py | hooked.hooked = True | hooked.hooked = False | hooks/test_patches.py
fsdp/module.py | reduces=requires_gradient_sync, | reduces=True, | fsdp/test_controls.py
sharding/builder.py | _name_of(ranks.near) | _name_of(ranks.shard) | sharding/test_near_ranks.py
weights/parked.py | take=state.engine.take_memory | | async_device/test_registered.py
plan/schedule.cpp | next_entered(1 + prefetch_) | next_entered(prefetch_) | plan/test_schedule.py
memory/bucket_pool.cpp | *offset + slot.nbytes} | *offset} | engine/test_hand_overs.py
kernels/cpu/adamw.cpp | = ++*call.tensors[i].step | = *call.tensors[i].step | kernels/test_adamw.py
"""


@dataclass(frozen=True)
class Fault:
    """Text of one line of a file, what it becomes, and tests in `tests/`."""

    name: str
    old: str
    new: str
    tests: str

    @property
    def file(self) -> str:
        """From the root of the repository."""
        return f"{'csrc' if self.name.endswith('.cpp') else 'zerocore'}/{self.name}"


FAULTS = [Fault(*map(str.strip, line.split("|"))) for line in TABLE.strip().splitlines()]


def is_found(fault: Fault, tree: Path) -> bool:
    """Whether a test fails in the copy with the fault, and not because nothing ran."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) == 0:
        raise ValueError(f"{fault.file} does not have {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new))
    env = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        if path.suffix == ".cpp" and not fault.name.startswith("plan/"):  # as _C_testing compiles
            _build(tree, env)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [f"tests/{each}" for each in fault.tests.split()]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def _build(tree: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True)


def main() -> None:
    """Prints a line for each fault; ends with 1 if one is not found."""
    numbers = [int(word) for word in sys.argv[1:]] or range(len(FAULTS))
    found = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for number in numbers:
            fault, start = FAULTS[number], time.monotonic()
            is_one = is_found(fault, tree)
            found += is_one
            what = "found" if is_one else "NOT FOUND"
            seconds = time.monotonic() - start
            print(f"{number:2} {what:9} {seconds:4.0f} s  {fault.file}: {fault.old}", flush=True)
    print(f"{found} of {len(numbers)} found")
    sys.exit(found != len(numbers))


if __name__ == "__main__":
    main()
