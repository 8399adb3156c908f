"""Trains a GPT on one rank of a slow network, under each system in turns, and times the steps."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.lib.models import GPT, GPT_SIZES
from bench.lib.steps import build_step
from bench.lib.systems import FP32, OURS, System, import_zerocore, is_installed, wrap_model
from bench.lib.systems import SYSTEMS as ALL_SYSTEMS
from bench.step.run import LEARNING_RATE

SIZE = GPT_SIZES["29m"]
STEPS_A_TURN = 2
PIECE_NBYTES = 1 << 20
PIECES_ON_THEIR_WAY = 4
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
PLAIN = System("plain", None, "plain, no communication")
SYSTEMS = tuple(system for system in ALL_SYSTEMS if system.stage not in (None, 1))


def choose(near: int, only: str) -> list[System]:
    """Returns the systems of some stages; with `near` ranks in a node also those that use them."""
    hybrid = [
        System("fsdp2", 3, "FSDP2, near ranks", near=near),
        System("fsdp2", 3, "FSDP2, async, near ranks", overlap=True, near=near),
        System("zerocore", 3, "zerocore stage 3, near ranks", near=near),
        System("fully_shard", 3, "zerocore.fsdp, near ranks", near=near),
    ]
    systems = [*SYSTEMS, *(hybrid if near > 1 else [])]
    wanted = [int(stage) for stage in only.split(",")]
    return [s for s in systems if s.stage in wanted and is_installed(s.peer)]


@dataclass
class Times:
    """Figures of a system's timed steps on this rank."""

    step_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)  # from the timeline of one step a turn
    sent_nbytes: list[int] = field(default_factory=list)  # sent by the node
    floor_ms: list[float] = field(default_factory=list)  # for zerocore's systems, see Floor


class Subject:
    """A system with its model."""

    def __init__(self, system: System, batch: tuple[Tensor, Tensor]) -> None:
        self.system, self.batch = system, batch
        self.times = Times()
        torch.manual_seed(0)
        model = GPT(SIZE)
        self.whole: Callable[[Any], float] | None = None
        if system.peer == "deepspeed":
            self.whole = build_step(system, model, model.blocks, LEARNING_RATE, FP32)
            return
        self.model: nn.Module = wrap_model(system, model, model.blocks)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step(self) -> tuple[float, float]:
        """Takes a step; returns its milliseconds and the update's. All ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        if self.whole is not None:
            self.whole([self.batch])
            return (time.perf_counter() - start) * 1e3, 0.0
        self.model(*self.batch).backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        return (end - start) * 1e3, (end - middle) * 1e3

    def take_turn(self) -> None:
        """Takes one untimed step, the timed ones, and for zerocore one with its exposed waits."""
        self.step()
        for _ in range(STEPS_A_TURN):
            dist.barrier()
            before = int(SENT.read_text())
            step_ms, update_ms = self.step()
            dist.barrier()
            self.times.step_ms.append(step_ms)
            self.times.update_ms.append(update_ms)
            self.times.sent_nbytes.append(int(SENT.read_text()) - before)
        if self.system.peer in OURS:
            with import_zerocore().reporting.record_events(self.model) as events:
                self.step()
            self.times.wait_ms.append(sum(event.wait_ns for event in events) / 1e6)


class Floor:
    """A plain model's forward and backward while it sends as many bytes as a system.

    Only bytes of gradients wait, for the backward. No order of collectives that send as many
    bytes can be faster on this machine.
    """

    def __init__(self, plain: Subject, system: Subject) -> None:
        self.plain, self.system = plain, system
        self.group = dist.new_group()
        count = dist.get_world_size()
        sums = 2 if system.system.stage == 0 else 1  # the sums are sent, too
        numel = sum(p.numel() for p in plain.model.parameters())
        self.grad_nbytes = 4 * numel * sums * (count - 1) // count

    def take_turn(self) -> None:
        """Times as many steps as the system takes in a turn, without the update."""
        for _ in range(STEPS_A_TURN):
            self.system.times.floor_ms.append(self._step())

    def _step(self) -> float:
        nbytes = torch.tensor(median(self.system.times.sent_nbytes), dtype=torch.int64)
        dist.broadcast(nbytes, 0)  # counts differ between nodes by some packets
        backward = threading.Event()
        sender = threading.Thread(target=self._send, args=(int(nbytes), backward))
        dist.barrier()
        start = time.perf_counter()
        sender.start()
        loss = self.plain.model(*self.plain.batch)
        backward.set()
        loss.backward()
        sender.join()
        end = time.perf_counter()
        self.plain.optimizer.zero_grad()
        return (end - start) * 1e3

    def _send(self, nbytes: int, backward: threading.Event) -> None:
        """Sends to the next rank, and receives as much from the previous one."""
        size, rank = dist.get_world_size(), dist.get_rank()
        piece = torch.zeros(PIECE_NBYTES, dtype=torch.uint8)
        taken = [torch.empty_like(piece) for _ in range(PIECES_ON_THEIR_WAY)]
        pending: list[Any] = []
        for number in range(nbytes // PIECE_NBYTES):
            if number == (nbytes - self.grad_nbytes) // PIECE_NBYTES:
                backward.wait()
            if len(pending) == 2 * PIECES_ON_THEIR_WAY:
                pending.pop(0).wait()
                pending.pop(0).wait()
            into = taken[number % PIECES_ON_THEIR_WAY]
            pending.append(dist.isend(piece, (rank + 1) % size, group=self.group))
            pending.append(dist.irecv(into, (rank - 1) % size, group=self.group))
        for work in pending:
            work.wait()


def run_rank(rounds: int, near: int, only: str) -> None:
    """Measures all systems and a plain model; rank 0 prints the times of each as JSON.

    With one rank a node it also measures the floor of each of zerocore's systems.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(SIZE.vocab_size, (SIZE.batch, SIZE.sequence + 1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    subjects = [Subject(system, batch) for system in (PLAIN, *choose(near, only))]
    for subject in subjects * 2:
        subject.step()
    gc.collect()
    gc.freeze()
    ours = [subject for subject in subjects if subject.system.peer in OURS]
    floors = [Floor(subjects[0], subject) for subject in ours] if near == 1 else []
    for _ in range(rounds):
        for subject in [*subjects, *floors]:
            subject.take_turn()
    if dist.get_rank() == 0:
        print(json.dumps({s.system.label: asdict(s.times) for s in subjects}), flush=True)
    dist.destroy_process_group()
