"""Compares losses of several real ranks with one rank's, and measures hidden collectives.

torchrun --local-addr 127.0.0.1 --nproc-per-node 2 benchmarks/multi_rank.py

Without --local-addr torchrun resolves the host's name, which fails without a network.

Ranks may share one GPU. Every stage trains on the ranks' batches, one process on all of them; the
losses must agree. Then torch.profiler records steps of each system; its timeline of kernels has
the share of NCCL's kernel time in which another kernel ran.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.kernels.timeline import DeviceWork, hidden_share, length, read_timeline
from bench.lib.models import GPT, BlockStack, GPTSize
from bench.lib.results import Results
from bench.lib.systems import System, wrap_model
from bench.lib.tables import Table

SYSTEMS = (
    System("fsdp2", 3, "FSDP2"),
    *(System("zerocore", stage, f"zerocore stage {stage}") for stage in range(4)),
    System("zerocore", 3, "zerocore stage 3, registered", registered=True),
)
PARITY_SIZE = GPTSize(num_blocks=3, width=64, num_heads=4, vocab_size=97, sequence=32)
PARITY_STEPS = 6
# Float32 sums differ in order; the losses are about 1.
LOSS_TOLERANCE = 1e-5
WARMUP_STEPS, PROFILED_STEPS = 4, 3
OLDEST_NCCL = (2, 30)
# Timeout of a collective, and of a system until its rank prints all stacks, which is shorter.
TIMEOUT, HANGS_S = timedelta(seconds=30), 25


@dataclass(frozen=True)
class Workload:
    """The model whose overlap is measured."""

    num_blocks: int
    width: int
    num_heads: int
    batch: int
    sequence: int
    dtype: str


WORKLOADS = {
    "cuda": Workload(12, 2048, 16, 4, 1024, "bfloat16"),
    "cpu": Workload(2, 32, 2, 2, 16, "float32"),
}


@dataclass
class Overlap:
    """Times of the profiled steps, in microseconds a step, means over the ranks."""

    nccl_us: float
    compute_us: float
    hidden: float | None


def open_group(binds: bool) -> torch.device:
    """Makes a group of all ranks on the GPUs, which they share if there are too few; else gloo.

    ``binds``: binds the group to its device, so that NCCL splits its communicator for subgroups.
    """
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # Otherwise gloo resolves the host's name, which fails without a network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count() and nccl() < OLDEST_NCCL:
        raise SystemExit(
            f"NCCL {'.'.join(map(str, nccl()))} cannot run several ranks on one GPU; preload one "
            f"of at least {'.'.join(map(str, OLDEST_NCCL))} that has code for this GPU"
        )
    dist.init_process_group("nccl", device_id=device if binds else None, timeout=TIMEOUT)
    return device


def nccl() -> tuple[int, ...]:
    """Returns the version of the loaded NCCL, which may be a preloaded one."""
    try:
        get_version = ctypes.CDLL(None).ncclGetVersion
    except AttributeError:  # torch loaded it without global symbols
        return torch.cuda.nccl.version()
    version = ctypes.c_int()
    get_version(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100, version.value % 100


# -- parity ---------------------------------------------------------------------------------


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Makes the batches of one rank, (inputs, targets)."""
    generator = torch.Generator().manual_seed(rank)
    shape = (PARITY_STEPS, PARITY_SIZE.batch, PARITY_SIZE.sequence + 1)
    tokens = torch.randint(PARITY_SIZE.vocab_size, shape, generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def losses_of(model: nn.Module, data: list[tuple[Tensor, Tensor]], device: Any) -> list[float]:
    """Trains the model; returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for inputs, targets in data:
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def make_gpt(device: torch.device) -> GPT:
    """Makes the model of the parity runs, from a fixed seed."""
    torch.manual_seed(0)
    return GPT(PARITY_SIZE).to(device)


def measure_parity(device: torch.device) -> Iterator[tuple[str, list[float]]]:
    """Yields each system's losses, averaged over the ranks; "one rank" trains on all batches."""
    everyone = [batches(rank) for rank in range(dist.get_world_size())]
    joined = [
        tuple(torch.cat(parts) for parts in zip(*step, strict=True))
        for step in zip(*everyone, strict=True)
    ]
    yield "one rank", losses_of(make_gpt(device), joined, device)  # type: ignore[arg-type]
    for system in SYSTEMS:
        model = make_gpt(device)
        own = everyone[dist.get_rank()]
        losses = losses_of(wrap_model(system, model, model.blocks), own, device)
        yield system.label, average(losses, device)


def average(values: list[float], device: torch.device) -> list[float]:
    """Returns the mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def deviations(losses: dict[str, list[float]]) -> dict[str, float]:
    """Returns the largest difference of each system's losses from one rank's."""
    expected = losses["one rank"]
    return {
        label: max(abs(a - b) for a, b in zip(found, expected, strict=True))
        for label, found in losses.items()
        if label != "one rank"
    }


# -- overlap --------------------------------------------------------------------------------


def measure_overlap(system: System, device: torch.device) -> Overlap:
    """Profiles some steps of a system on this rank and averages over the ranks."""
    work = WORKLOADS[device.type]
    dtype = getattr(torch, work.dtype)
    torch.manual_seed(0)
    stack = BlockStack(work.num_blocks, work.width, work.num_heads).to(device, dtype)
    model = wrap_model(system, stack, stack.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(work.batch, work.sequence, work.width, device=device, dtype=dtype)

    def steps(count: int) -> None:
        for _ in range(count):
            model(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    steps(WARMUP_STEPS)
    dist.barrier()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        steps(PROFILED_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return _overlap(read_timeline(path).work, device)


def _overlap(work: list[DeviceWork], device: torch.device) -> Overlap:
    kernels = [item for item in work if item.kind == "kernel"]
    nccl_us = length(item.span for item in kernels if item.is_communication)
    compute_us = length(item.span for item in kernels if not item.is_communication)
    hidden = hidden_share(kernels)
    times = [nccl_us / PROFILED_STEPS, compute_us / PROFILED_STEPS]
    mean_nccl, mean_compute, mean_hidden = average([*times, hidden or 0.0], device)
    return Overlap(mean_nccl, mean_compute, None if hidden is None else mean_hidden)


# -- report ---------------------------------------------------------------------------------


def report(losses: dict[str, list[float]], overlaps: dict[str, Overlap], where: str) -> Table:
    """Makes a row for each system."""
    columns = ["system", "last loss", "off by", "NCCL ms", "compute ms", "hidden %"]
    table = Table(f"{dist.get_world_size()} real ranks, {where}", columns)
    table.add("one rank", f"{losses['one rank'][-1]:.6f}")
    for label, deviation in deviations(losses).items():
        cells = [label, f"{losses[label][-1]:.6f}", f"{deviation:.1e}"]
        if found := overlaps.get(label):
            cells += [f"{found.nccl_us / 1e3:.2f}", f"{found.compute_us / 1e3:.2f}"]
            cells += ["-" if found.hidden is None else f"{100 * found.hidden:.1f}"]
        table.add(*cells)
    table.notes = [
        "Losses: mean over the ranks, each with its own batches; one rank trains on all of them. "
        f"Off by: the most in {PARITY_STEPS} steps; allowed: {LOSS_TOLERANCE:.0e}.",
        "Times: a step in the profiler's timeline of a rank's kernels, mean over the ranks. "
        "Hidden: share of the time of NCCL's kernels during which another kernel of the rank runs. "
        "Ranks that share a GPU slow each other down, and a NCCL kernel lasts until its peers "
        "have come: the shares compare systems in one run, and say nothing about NVLink.",
    ]
    return table


def measure(device: torch.device, where: str, binds: bool, results: Results) -> dict[str, float]:
    """Measures losses of all systems, then overlap; returns the differences of losses."""
    losses: dict[str, list[float]] = {}
    overlaps: dict[str, Overlap] = {}
    raw: dict[str, Any] = {"world_size": dist.get_world_size(), "link": where, "binds": binds}
    raw["workload"] = asdict(WORKLOADS[device.type])

    def write() -> None:
        by_label = {label: asdict(found) for label, found in overlaps.items()}
        table = report(losses, overlaps, where)
        results.write([table], {**raw, "losses": losses, "overlap": by_label})
        faulthandler.dump_traceback_later(HANGS_S)

    faulthandler.dump_traceback_later(HANGS_S)
    for label, found in measure_parity(device):
        losses[label] = found
        write()
    for system in SYSTEMS:
        overlaps[system.label] = measure_overlap(system, device)
        write()
    return deviations(losses)


def main(
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
    binds: Annotated[bool, typer.Option(help="Pass device_id to init_process_group.")] = True,
) -> None:
    """Measures, prints one table, and fails if losses differ from one rank's losses."""
    device = open_group(binds)
    backend, is_main = dist.get_backend(), dist.get_rank() == 0
    where = backend if backend == "gloo" else f"NCCL {'.'.join(map(str, nccl()))}"
    if device.type == "cuda":
        where += f" on {torch.cuda.device_count()} {torch.cuda.get_device_name(device)}"
    bound = "_bound" if binds and backend == "nccl" else ""
    with Results(f"multi_rank_{backend}{bound}", save, is_main=is_main) as results:
        off_by = measure(device, where, binds, results)
    wrong = {label: value for label, value in off_by.items() if not value <= LOSS_TOLERANCE}
    for label, deviation in wrong.items() if is_main else ():
        print(f"{label}: losses differ from one rank's by {deviation:.1e}")
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
