"""Loads changed files: each is what was saved, or an error that names a file, soon and in bounds.

python -m tests.checkpoint.fuzz 100000 [FIRST_SEED]
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zerocore
from tests.checkpoint import mutants
from zerocore.checkpoint.convert import open_weights

MAX_SECONDS, MAX_NBYTES = 2.0, 200 << 20
PART = "model-00002-of-00002.safetensors"
HANG_SECONDS = 60  # of a machine that does other things, too


@dataclass(frozen=True)
class Case:
    """A file that is changed.

    Attributes:
        kind: of the folder.
        name: of the file.
        mutate: makes other bytes of it; None puts something else in its place.
        is_signed: whether the checksums say then what the forged file is.
    """

    kind: str
    name: str
    mutate: mutants.Mutate | None
    is_signed: bool = False


def _sums_changed(data: bytes, choose: random.Random) -> bytes:
    return mutants.sums_signed(mutants.json_changed(data[:-10], choose))


def _cases() -> list[Case]:
    m, found = mutants, []
    small = [(".metadata", m.pickle_changed), ("rank-0.pt", m.zip_changed)]
    for name, mutate in small:
        found += [Case("ours", name, m.bytes_changed)]
        found += [Case("ours", name, change, True) for change in (m.bytes_changed, mutate, mutate)]
    for kind in ("ours", "hf"):
        found += [Case(kind, "checksums.json", _sums_changed, True)]
        found += [Case(kind, "checksums.json", m.bytes_changed)]
    found += [Case("ours", name, m.bytes_changed) for name in ("__0_0.distcp", "__0_1.distcp")]
    found += [Case("torch", ".metadata", change) for change in (m.bytes_changed, m.pickle_changed)]
    found += [Case("torch", "__0_0.distcp", m.bytes_changed, True)]
    for kind, name in {"hf": "model.safetensors", "sharded": PART}.items():
        found += [Case(kind, name, m.bytes_changed), Case(kind, name, m.header_changed, True)]
    found += [Case("plain", "model.safetensors", m.header_changed, True)]
    index = "model.safetensors.index.json"
    found += [Case("sharded", index, change, True) for change in (m.bytes_changed, m.json_changed)]
    found += [
        Case(kind, name, None)
        for kind, names in {
            "ours": (".metadata", "checksums.json", "rank-0.pt", "__0_0.distcp", "__0_1.distcp"),
            "torch": (".metadata", "__0_0.distcp"),
            "hf": ("model.safetensors",),
            "sharded": (index, PART),
        }.items()
        for name in names
    ]
    return found


class Fuzzer:
    """Folders of each kind, and what loads them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        torch.manual_seed(3)
        self.model = zerocore.shard(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.expected = self._values()
        self.cases = _cases()
        self.signal_hangs()
        self.checkpoints = zerocore.Checkpoints(root / "ours", self.model, self.optimizer)
        self.checkpoints.save(1).wait()
        zerocore.save_safetensors(self.model, root / "hf")
        zerocore.save_safetensors(self.model, root / "sharded", max_file_size=160)
        tensors = {"model": dict(self.model.state_dict())}
        dcp.save(tensors, checkpoint_id=root / "torch", no_dist=True)
        self._write_plain(root / "plain")
        self._originals = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        shutil.copytree(root / "torch", root / "other")
        for folder in ("ours/step-00000001", "torch", "hf", "sharded"):
            os.mkfifo(root / folder / "pipe")
            (root / folder / "folder").mkdir()
            (root / folder / "endless").symlink_to("/dev/zero")

    def _write_plain(self, folder: Path) -> None:
        """Without checksums, as other libraries write."""
        folder.mkdir()
        shutil.copy(self._root / "hf" / "model.safetensors", folder)

    @staticmethod
    def signal_hangs() -> None:
        def stop(*_: Any) -> None:
            raise BaseException("it hangs")

        signal.signal(signal.SIGALRM, stop)

    def _values(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in zerocore.full_state_dict(self.model).items()}

    def folder_of(self, kind: str) -> Path:
        return self._root / kind / ("step-00000001" if kind == "ours" else "")

    def make(self, case: Case, choose: random.Random) -> None:
        """Changes the file of a case."""
        folder = self.folder_of(case.kind)
        path = folder / case.name
        if case.mutate is None:
            mutants.replace_file(path, choose)
            return
        path.write_bytes(case.mutate(self._originals[path], choose))
        if case.is_signed and case.name != "checksums.json":
            mutants.sign_folder(folder, case.name)

    def restore(self, case: Case) -> None:
        """Makes the folder as it was."""
        folder = self.folder_of(case.kind)
        for name in {case.name, "checksums.json"}:
            path = folder / name
            if path in self._originals:
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif path.is_symlink() or path.exists():
                    path.unlink()
                path.write_bytes(self._originals[path])

    def load(self, kind: str, choose: random.Random) -> dict[str, Tensor] | None:
        """Loads a folder in one of the ways that it can be loaded; values, if all are checked."""
        folder = self.folder_of(kind)
        if kind == "torch" or choose.random() < 0.2:
            weights = open_weights(folder)
            for name in weights.facts:
                weights.read(name)
            return None
        if kind == "ours":
            self.checkpoints.load()
        else:
            zerocore.load_safetensors(self.model, folder)
        return self._values()

    def run(self, seed: int) -> str:
        """The outcome of a mutant; one that begins with FAILED is none that should be."""
        choose = random.Random(seed)
        case = choose.choice(self.cases)
        self.make(case, choose)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins here
        before, began = _status("VmRSS"), time.process_time()
        signal.alarm(HANG_SECONDS)
        try:
            outcome = self._outcome(case, lambda: self.load(case.kind, choose))
        finally:
            signal.alarm(0)
            seconds, nbytes = time.process_time() - began, _status("VmHWM") - before
            self.restore(case)
        if seconds > MAX_SECONDS or nbytes > MAX_NBYTES:
            return f"FAILED: {seconds:.1f} s, {nbytes >> 20} MiB: {outcome}"
        return outcome

    def _outcome(self, case: Case, load: Callable[[], dict[str, Tensor] | None]) -> str:
        try:
            found = load()
        except (ValueError, OSError) as error:
            text = str(error)
            if len(text) > 3000 or not text.isprintable():
                return f"FAILED: a message of {len(text)} characters: {text[:300]!r}"
            return "an error" if str(self._root) in text else f"FAILED: no file in {error!r}"
        except BaseException as error:
            traceback.print_exc(limit=-4)
            return f"FAILED: {type(error).__name__}: {error!s:.300}"
        if case.is_signed or found is None:
            return "loaded what was forged"
        for name, value in self.expected.items():
            if not torch.equal(found[name], value):
                return f"FAILED: '{name}' is another value"
        return "loaded"


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) << 10


def run_mutants(count: int, first: int, root: Path) -> Counter[str]:
    """How often each outcome came; those that failed are printed with their seed."""
    fuzzer = Fuzzer(root)
    fuzzer.run(first)  # what is loaded once
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        outcome = fuzzer.run(seed)
        if outcome.startswith("FAILED"):
            print(f"seed {seed}: {outcome}", flush=True)
            outcome = "FAILED"
        found[outcome] += 1
    return found


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        found = run_mutants(count, first, Path(folder))
    print(f"{count} mutants: {dict(sorted(found.items()))}")
    sys.exit("FAILED" in found)


if __name__ == "__main__":
    main()
