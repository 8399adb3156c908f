"""Faults of one of three ranks on nodes of their own: what becomes of the others.

``python -m tests.distributed.network_faults`` runs all of them (needs root and iproute2),
``--only stop/save/0`` some. ``python benchmarks/network.py faults`` makes a table.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.nodes import Nodes
from zerocore.checkpoint.commit import files, saving  # noqa: F401  (imported before the fork)
from zerocore.checkpoint.dcp.loading import TrainingLoad
from zerocore.common.alarm import STALL_SECONDS

PROGRAM = "tests.distributed.network_faults"
WORLD_SIZE = 3
STEPS = 6
FAULTY_STEP = 3
LIMIT = 4.0  # of silence
PATIENCE = 15.0  # behind it
BLIP_SECONDS = 5.0
BLIP_LIMIT = 30.0
START_SECONDS = 90.0
KINDS = ("kill", "stop", "cut", "blip")
PHASES = ("forward", "backward", "step", "save", "load", "barrier")


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in a part of a step."""

    kind: str
    phase: str
    victim: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.kind}/{self.phase}/{self.victim}"


# -- on a rank -----------------------------------------------------------------------------------


def train(fault: Fault, folder: Path, pull: list[str], plug: list[str]) -> list[float]:
    """Trains, saves in the background and loads; the losses."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model = zerocore.shard(nn.Sequential(*layers), stage=3, units=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = zerocore.Checkpoints(folder / "checkpoints", model, optimizer)
    losses = []
    for step in range(STEPS):
        trigger = Trigger(fault, folder, pull, plug)
        if step == FAULTY_STEP and dist.get_rank() == fault.victim:
            arm(trigger, model)
        if step == FAULTY_STEP and fault.phase == "barrier":
            meet(trigger)
        loss = model(torch.full((4, 16), 0.1 * step + dist.get_rank())).square().mean()
        loss.backward()
        zerocore.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step in (1, FAULTY_STEP):
            checkpoints.save(step)
        if step == FAULTY_STEP:
            checkpoints.wait()
            checkpoints.load(1)
    return losses


@dataclass
class Trigger:
    """Lets the fault happen, once."""

    fault: Fault
    folder: Path
    pull: list[str]
    plug: list[str]
    pulled: bool = False

    def __call__(self, *args: Any) -> None:
        if self.pulled:
            return
        self.pulled = True
        (self.folder / "fault").write_text(str(time.time()))
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.kind in ("cut", "blip"):
            subprocess.run(self.pull, check=True)
        if self.fault.kind == "blip":
            later = f"sleep {BLIP_SECONDS}; {shlex.join(self.plug)}"
            subprocess.Popen(["sh", "-c", later])


def arm(trigger: Trigger, model: nn.Module) -> None:
    """Puts the fault in its place in what this rank does."""
    phase = trigger.fault.phase
    middle = model.get_submodule("2")
    if phase == "forward":
        middle.register_forward_pre_hook(trigger)
    elif phase == "backward":
        middle.register_forward_hook(lambda _, __, output: output.register_hook(trigger) and None)
    elif phase == "step":
        zerocore.clip_grad_norm_ = before(zerocore.clip_grad_norm_, trigger)
    elif phase == "save":
        files.flush = before(files.flush, trigger)
    elif phase == "load":
        TrainingLoad._verify = before(TrainingLoad._verify, trigger)  # type: ignore[method-assign]


def before(function: Callable[..., Any], trigger: Trigger) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        trigger()
        return function(*args, **kwargs)

    return both


def meet(trigger: Trigger) -> None:
    """A collective of the program's own, to which one rank never comes and another one does not."""
    if dist.get_rank() == trigger.fault.victim:
        trigger()
    if dist.get_rank() != (trigger.fault.victim + 1) % WORLD_SIZE or trigger.fault.kind == "blip":
        dist.barrier()


# -- around the ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a rank's process ended: its code, if it did, seconds after the fault, and its words."""

    rank: int
    code: int | None
    seconds: float
    output: str

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("zerocore on rank")]

    @property
    def losses(self) -> str:
        return "".join(line for line in self.output.splitlines() if line.startswith("losses"))


class Trial:
    """Three ranks that train, one of them with the fault.

    They are forked from this process, which has imported all of it, and end as programs do.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self._nodes = Nodes(WORLD_SIZE)
        self._nodes.__enter__()
        self._begun = time.time()
        self._fault_time: float | None = None
        self._processes: dict[int, int] = {}
        try:
            for rank in range(WORLD_SIZE):
                self._processes[rank] = self._fork(rank)
        except BaseException:
            self.close()
            raise
        self._ends: dict[int, End] = {}
        healthy = fault.kind in ("cut", "blip")
        self._awaited = {rank for rank in range(WORLD_SIZE) if healthy or rank != fault.victim}

    def _fork(self, rank: int) -> int:
        process = os.fork()
        if process:
            return process
        log = os.open(self._folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._nodes.enter(rank)
        limit = BLIP_LIMIT if self.fault.kind == "blip" else LIMIT
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(WORLD_SIZE),
            MASTER_ADDR=self._nodes.address(0),
            MASTER_PORT="29400",
            GLOO_SOCKET_IFNAME="eth0",
        )
        os.environ[STALL_SECONDS] = str(limit)
        victim = self.fault.victim
        cables = [self._nodes.set_cable(victim, state) for state in ("down", "up")]
        print("losses", *train(self.fault, self._folder, *cables))
        sys.exit(0)

    def poll(self) -> list[End] | None:
        """How each rank ended that can, when all of them have or the time is over."""
        now = time.time()
        mark = self._folder / "fault"
        if self._fault_time is None and mark.exists():
            self._fault_time = float(mark.read_text() or now)
        for rank in self._awaited - set(self._ends):
            process, status = os.waitpid(self._processes[rank], os.WNOHANG)
            if process:
                del self._processes[rank]
                self._ends[rank] = self._end(rank, os.waitstatus_to_exitcode(status))
        fault_time = self._fault_time
        limit = START_SECONDS if fault_time is None else LIMIT + 2 * PATIENCE
        if set(self._ends) != self._awaited and now < (fault_time or self._begun) + limit:
            return None
        for rank in self._awaited - set(self._ends):
            self._ends[rank] = self._end(rank, None)
        return [self._ends[rank] for rank in sorted(self._ends)]

    def _end(self, rank: int, code: int | None) -> End:
        log = self._folder / f"rank{rank}.log"
        seconds = time.time() - (self._fault_time or self._begun)
        return End(rank, code, seconds, log.read_text(errors="replace"))

    def close(self) -> None:
        """Ends the processes and removes the nodes; not where a rank's error passes by."""
        if os.getpid() != self._owner:
            return
        for process in self._processes.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self._nodes.__exit__(None, None, None)
        shutil.rmtree(self._folder)


def mistakes(fault: Fault, ends: list[End]) -> list[str]:
    """The violations: each process must end by itself, soon, with a sentence that is true."""
    if fault.kind == "blip":
        found = [f"rank {end.rank} ended with {end.code}" for end in ends if end.code != 0]
        return found + [f"rank {end.rank} lost losses" for end in ends if not end.losses]
    found = []
    for end in ends:
        if end.code is None:
            found.append(f"rank {end.rank} did not end")
        elif end.code <= 0:
            found.append(f"rank {end.rank} ended with {end.code}")
        if end.seconds > LIMIT + PATIENCE:
            found.append(f"rank {end.rank} ended after {end.seconds:.1f} s")
        said = " ".join(end.sentences)
        if not said:
            found.append(f"rank {end.rank} said nothing")
        elif not is_true(fault, end.rank, said):
            found.append(f"rank {end.rank} said: {said}")
    return found


def is_true(fault: Fault, rank: int, said: str) -> bool:
    """Whether those that did not answer are named, or the holder of the store, and no others."""
    store = "which rank 0 holds unless a launcher does,"
    found = re.findall(r"ranks? ([\d, ]+) did not answer", said.replace(store, "rank 0"))
    silent = {int(number) for numbers in found for number in numbers.split(",")}
    if fault.kind == "cut" and rank == fault.victim:
        return silent == ({1, 2} if rank == 0 else {0})  # without the store it can ask nobody
    return silent == {fault.victim}


def all_faults(times: int = 1) -> list[Fault]:
    return [
        Fault(kind, phase, victim, attempt)
        for attempt in range(times)
        for kind in KINDS
        for phase in PHASES
        for victim in range(WORLD_SIZE)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of kind/phase/victim")
    parser.add_argument("--at-a-time", type=int, default=2)
    options = parser.parse_args()
    chosen = [each for each in all_faults() if any(part in str(each) for part in options.only)]
    results = play(chosen, options.at_a_time)
    failed = sum(bool(found) for _, found in results.values())
    print(f"{len(results)} faults, {failed} failed")
    sys.exit(failed > 0)


def play(faults: list[Fault], at_a_time: int) -> dict[Fault, tuple[list[End], list[str]]]:
    """How the ranks ended and what is wrong with it, by fault."""
    waiting, running = list(reversed(faults)), list[Trial]()
    results = {}
    try:
        while waiting or running:
            if waiting and len(running) < at_a_time:
                running.append(Trial(waiting.pop()))
            for trial in list(running):
                ends = trial.poll()
                if ends is not None:
                    running.remove(trial)
                    trial.close()
                    results[trial.fault] = (ends, mistakes(trial.fault, ends))
                    report(trial.fault, *results[trial.fault])
            time.sleep(0.05)
    finally:
        for trial in running:
            trial.close()
    return results


def report(fault: Fault, ends: list[End], found: list[str]) -> None:
    seconds = ", ".join(f"{end.seconds:.1f}" for end in ends)
    print(fault, "ended after", seconds, "s:", "; ".join(found) or "ok", flush=True)
    for end in ends if found else []:
        print(f"--- rank {end.rank}\n{end.output}", flush=True)


if __name__ == "__main__":
    main()
