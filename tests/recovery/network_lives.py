"""Ranks on nodes of their own that are lost, and how the job goes on: seconds and losses.

``python -m tests.recovery.network_lives`` loses one of three or four ranks at each point in each
way (needs root and iproute2); ``--only 3/elastic/kill/forward/0`` some, ``--times 3`` each
three times, and ``--markdown FILE`` writes the seconds.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.nodes import Nodes
from tests.recovery import lives
from tests.repository.test_examples import rank_environment

WAYS = {
    "disk": "all processes start again, `Checkpoints` on a disk",
    "peers": "all processes start again, `PeerCheckpoints`",
    "torchrun": "torchrun starts its processes again, `PeerCheckpoints`",
    "elastic": "`run_elastic`, `PeerCheckpoints`",
}
KINDS = {
    "kill": "a process is killed",
    "stop": "it is stopped",
    "blip": "its node's link is down for 6 s",
    "cut": "for good",
}
LIMIT, DOWN_SECONDS, END_SECONDS = 5.0, 6, 180.0
# Of torch's rendezvous, so that a node that is cut off is missed soon.
SOON = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@dataclass(frozen=True)
class Fault:
    num_ranks: int
    way: str
    kind: str
    point: str
    victim: int

    def __str__(self) -> str:
        return f"{self.num_ranks}/{self.way}/{self.kind}/{self.point}/{self.victim}"

    @property
    def first_victim(self) -> int:
        """The rank that is killed in a forward before the fault, which is in the load behind it.

        It is no neighbour of the victim, so that each of their files has a copy. -1: none.
        """
        return (self.victim + 2) % self.num_ranks if self.point == "load" else -1

    def marks(self, folder: Path) -> dict[int, Path]:
        """Files that ranks write when they are lost."""
        return {self.first_victim: folder / "first", self.victim: folder / "fault"}


def all_faults() -> list[Fault]:
    """Three ranks of which each is lost, or, as with four ranks, others at each point and kind.

    A disk, which is there for comparison, has no copies.
    """
    faults = []
    for num_ranks, way, (turn, kind) in product((3, 4), WAYS, enumerate(KINDS)):
        points = list(lives.POINTS)
        if way == "disk":
            points = [point for point in points if point not in ("copy", "load")]
        elif num_ranks == 3:
            points.remove("load")  # another rank is lost before
        for number, point in enumerate(points):
            is_each = num_ranks == 3 and way in ("peers", "elastic")
            other = (number + turn) % num_ranks
            if (way, point) == ("disk", "commit"):
                other = 0  # which completes a checkpoint there
            victims = range(num_ranks) if is_each else [other]
            faults += [Fault(num_ranks, way, kind, point, victim) for victim in victims]
    return faults


# -- on a node -----------------------------------------------------------------------------------


def run_rank(fault: Fault, folder: Path, node: int, endpoint: str, pull: list[str]) -> None:
    """One process's training, which notes each step with its time, ranks and loss."""
    marks = fault.marks(folder)
    mark = marks.get(node)

    def lose(*_: Any) -> None:
        if mark is None or mark.exists():
            return
        mark.write_text(str(time.time()))
        if node == fault.first_victim or fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            subprocess.run(pull, check=True)
        if fault.kind == "blip":  # also if this process ends
            plug = shlex.join([*pull[:-1], "up"])
            subprocess.Popen(f"sleep {DOWN_SECONDS}; {plug}", shell=True, start_new_session=True)

    def took(step: int, loss: float) -> None:
        with open(folder / f"steps{node}", "a") as file:
            print(time.time(), step, dist.get_world_size(), loss.hex(), file=file)

    def train(life: Any = None) -> Any:
        point = "" if mark is None or mark.exists() else fault.point
        if node == fault.first_victim:
            point = point and "forward"
        elif point == "load" and not marks[fault.first_victim].exists():
            point = ""
        make = zerocore.Checkpoints if fault.way == "disk" else zerocore.recovery.PeerCheckpoints
        own = folder / ("disk" if fault.way == "disk" else f"node{node}")
        return lives.train(own, point, lose, True, make=make, took=took)

    timeout = timedelta(seconds=LIMIT)
    if fault.way == "elastic":
        ranks = (2, fault.num_ranks)
        zerocore.run_elastic(train, endpoint, ranks, timeout=timeout, is_host="false", **SOON)
    else:
        dist.init_process_group("gloo", timeout=timeout)
        train()


# -- around the nodes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a job went on: seconds from the fault to the step that it lost, and what is wrong."""

    seconds: float
    mistakes: tuple[str, ...]


class Job:
    """The processes of a fault's job, on nodes of which the last one holds the store."""

    def __init__(self, fault: Fault, nodes: Nodes, folder: Path) -> None:
        self._fault, self._nodes, self._folder = fault, nodes, folder
        self._processes: dict[int, subprocess.Popen[Any]] = {}
        self._num_starts = 0
        self._old: set[int] = set()
        store = "from torch.distributed import TCPStore as T; import time; s = T('0.0.0.0', 29400, "
        store += "is_master=True, wait_for_workers=False); time.sleep(1e6)"
        self._store = self._start(fault.num_ranks, ["-c", store], {})

    def start(self, living: list[int]) -> None:
        """One process, or torchrun's agent, on each of the nodes."""
        self._num_starts += 1
        fault, nodes = self._fault, self._nodes
        store = f"{nodes.address(fault.num_ranks)}:29400"
        for rank, node in enumerate(living):
            words = ["-m", "tests.recovery.network_lives", "--rank", str(fault), str(self._folder)]
            words += [str(node), store, *nodes.set_cable(fault.victim, "down")]
            env = {"RANK": rank, "WORLD_SIZE": len(living), "MASTER_PORT": 29500 + self._num_starts}
            env["MASTER_ADDR"] = nodes.address(living[0])
            if fault.way == "torchrun":
                # As examples/cluster/torchrun.sh has it.
                env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
                words = [*self._agent(nodes.address(node), store), *words]
            self._processes[node] = self._start(node, words, env)

    def _agent(self, address: str, store: str) -> list[str]:
        conf = ",".join(f"{name}={value}" for name, value in {"is_host": "false", **SOON}.items())
        return [
            *("-m", "torch.distributed.run", "--nnodes", f"2:{self._fault.num_ranks}"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", store, "--rdzv-conf", conf),
            *("--local-addr", address, "--max-restarts", "3"),
        ]

    def _start(self, node: int, words: list[str], env: dict[str, Any]) -> subprocess.Popen[Any]:
        inside = ["ip", "netns", "exec", self._nodes.names[node], sys.executable, *words]
        env = {"GLOO_SOCKET_IFNAME": "eth0", **{name: str(value) for name, value in env.items()}}
        with open(self._folder / f"log{node}", "a") as log:
            return subprocess.Popen(inside, env=rank_environment() | env, stdout=log, stderr=log)

    def run(self) -> list[int | None]:
        """Until the nodes that live have ended; what is not elastic starts again."""
        living = list(range(self._fault.num_ranks))
        self.start(living)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [self._processes[node].poll() for node in living if node not in self._lost()]
            if None in codes:
                continue
            starts_itself = self._fault.way in ("torchrun", "elastic")
            if not any(codes) or starts_itself or self._num_starts == 3:
                return codes
            self.end()  # also the one that is stopped
            self._old = self._lost()
            living = [node for node in living if not self._is_cut(node)]
            self.start(living)
        return codes

    def _lost(self) -> set[int]:
        """Nodes whose processes were lost since the last start."""
        marks = self._fault.marks(self._folder)
        return {node for node, mark in marks.items() if mark.exists()} - self._old

    def _is_cut(self, node: int) -> bool:
        return self._fault.kind == "cut" and node == self._fault.victim and node in self._old

    def end(self) -> None:
        for node, process in self._processes.items():
            process.kill()
            process.wait()
            if self._fault.way == "torchrun":  # the agent's workers
                inside = ["ip", "netns", "pids", self._nodes.names[node]]
                left = subprocess.run(inside, capture_output=True, text=True).stdout.split()
                subprocess.run(["kill", "-9", *left], capture_output=True)

    def close(self) -> None:
        self.end()
        self._store.kill()
        self._store.wait()


def play(fault: Fault) -> End:
    folder = Path(tempfile.mkdtemp(prefix="lives-"))
    with Nodes(fault.num_ranks + 1) as nodes:
        job = Job(fault, nodes, folder)
        try:
            codes = job.run()
        finally:
            job.close()
    found = [f"the others ended with {codes}"] if any(codes) else []
    mark = fault.marks(folder)[fault.victim]
    begun = float(mark.read_text()) if mark.exists() else float("inf")
    steps = [step for path in folder.glob("steps*") for step in steps_of(path)]
    found += [text for step in steps if (text := step.mistake(fault.num_ranks))]
    behind = [step for step in steps if step.at > begun]
    ended = [step for step in behind if step.number == lives.NUM_STEPS]
    num_left = fault.num_ranks - 1 - (fault.way == "elastic" and fault.point == "load")
    if len(ended) < num_left:
        found.append(f"{len(ended)} ranks came to the end behind the fault")
    # The step that is lost may end on other ranks; for the next one all are needed.
    again = min((step.at for step in behind if step.number > lives.LAST), default=float("nan"))
    if found:
        found += [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in folder.glob("log*")]
    shutil.rmtree(folder)
    return End(again - begun, tuple(found))


@dataclass(frozen=True)
class Step:
    """A line that a rank has noted."""

    at: float
    number: int
    num_ranks: int
    loss: float

    def mistake(self, num_ranks: int) -> str:
        """Equal where there are as many ranks as before; else sums have another order."""
        expected = undisturbed(num_ranks)[self.number - 1]
        is_same = self.loss == expected
        if is_same or (self.num_ranks < num_ranks and abs(self.loss / expected - 1) < 1e-4):
            return ""
        return f"step {self.number} on {self.num_ranks} ranks: {self.loss}, expected {expected}"


def steps_of(path: Path) -> list[Step]:
    lines = map(str.split, path.read_text().splitlines())
    return [
        Step(float(at), int(n), int(ranks), float.fromhex(loss)) for at, n, ranks, loss in lines
    ]


@cache
def undisturbed(num_ranks: int) -> list[float]:
    folder = Path(tempfile.mkdtemp(prefix="whole-"))
    return run_ranks(lives.undisturbed, num_ranks, folder, True)[0]


def markdown(seconds: dict[Fault, list[float]], num_failed: int) -> str:
    """Medians over points and victims."""
    lines = [
        "# Seconds from a fault to the step that it lost",
        "",
        "Measured by `python -m tests.recovery.network_lives`: nodes are network namespaces of "
        f"this machine. The process group's timeout is {LIMIT:g} s, and the model is so small "
        "that the time is that of the way, not of its bytes. Medians, and all between.",
        "",
        f"{sum(map(len, seconds.values()))} faults, of which {num_failed} failed, at each point "
        f"({', '.join(lives.POINTS)}; a load is behind the loss of another rank). Of three ranks "
        "that keep `PeerCheckpoints` without torchrun each is lost at each point, else another one "
        "at each point and kind. Losses are those of an undisturbed run, on as many ranks bit for "
        "bit. 0.0: the others had begun the next step before they missed the rank.",
        "",
        "| way | " + " | ".join(KINDS.values()) + " |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for way, name in WAYS.items():
        cells = [name]
        for kind in KINDS:
            found = [
                s for f, each in seconds.items() if (f.way, f.kind) == (way, kind) for s in each
            ]
            cells.append(
                f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"
                if found
                else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of 3/way/kind/point/rank")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--at-a-time", type=int, default=2, help="faults side by side")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    chosen = [each for each in all_faults() if any(part in str(each) for part in options.only)]
    for num_ranks in {fault.num_ranks for fault in chosen}:
        undisturbed(num_ranks)  # forks, which no other thread may see
    seconds, num_failed = defaultdict[Fault, list[float]](list), 0
    with ThreadPoolExecutor(options.at_a_time) as pool:
        for fault, found in pool.map(lambda f: (f, play(f)), chosen * options.times):
            seconds[fault].append(found.seconds)
            num_failed += bool(found.mistakes)
            print(fault, f"{found.seconds:.1f} s:", "\n".join(found.mistakes) or "ok", flush=True)
    print(f"{len(chosen) * options.times} faults, {num_failed} failed")
    if options.markdown:
        options.markdown.write_text(markdown(seconds, num_failed))
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        ranks, way, kind, point, victim = sys.argv[2].split("/")
        folder, node, endpoint, *pull = sys.argv[3:]
        fault = Fault(int(ranks), way, kind, point, int(victim))
        run_rank(fault, Path(folder), int(node), endpoint, pull)
    else:
        main()
