"""Times training steps of zerocore and its peers on real ranks, in one interleaved run.

Usage: python benchmarks/step.py --ranks 2 --peers plain,ddp,fsdp2,deepspeed
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Annotated

import typer
from _models import GPT, GPT_SIZES
from _ranks import run_on_ranks
from _results import write_results
from _systems import PEERS, SYSTEMS, System, is_installed
from _tables import Table, make_console
from _training_run import RankReport, RunLength, run_on_this_rank
from rich.progress import Progress

# Small steps need more of them for a median as steady.
RUN_LENGTHS = {"29m": RunLength(num_warmup=3, num_steps=8), "small": RunLength(10, 40)}
RUN_TIMEOUT_S = 180.0

# (size, zerocore's stage, labels of its peers, the ratio that is wanted)
GOALS = (
    ("29m", 3, ("FSDP2", "DeepSpeed ZeRO-3"), 0.85),
    ("29m", 2, ("FSDP2, no reshard", "DeepSpeed ZeRO-2"), 0.85),
    ("29m", 0, ("DDP",), 1.03),
    ("small", 3, ("FSDP2",), 0.60),
    ("small", 2, ("FSDP2, no reshard", "DeepSpeed ZeRO-2"), 0.85),
    ("small", 0, ("DDP",), 1.03),
)
NOTES = (
    "Step: forward, backward, optimizer, zero_grad; median over all timed steps of all rounds, "
    "each the mean over the ranks. In brackets the medians of the single rounds.",
    "Peak RSS: of a rank during the timed steps, median over ranks and rounds; the second figure "
    "leaves out what was resident before the model was built.",
    "Loss: mean over the ranks at the last step; same seed and batches everywhere, but plain "
    "trains on each rank's own batches and never averages.",
    "FSDP2: each block, then the root, with its defaults otherwise. DeepSpeed: its defaults but "
    "for gradient clipping, which it turns on; so ZeRO-3 keeps parameters of up to 100,000 "
    "elements gathered, and the whole model once it is gathered. DDP: gradient_as_bucket_view.",
)


@dataclass
class Measured:
    """What the rounds of one system at one size gave."""

    system: System
    rounds: list[list[RankReport]] = field(default_factory=list)
    error: str = ""

    def round_steps(self, index: int) -> list[float]:
        """Step times of a round in ms, averaged over the ranks."""
        by_rank = [report.step_ms for report in self.rounds[index]]
        return [sum(step) / len(step) for step in zip(*by_rank, strict=True)]

    def round_medians(self) -> list[float]:
        """Median step of each round in ms."""
        return [median(self.round_steps(index)) for index in range(len(self.rounds))]

    def steps(self) -> list[float]:
        """All step times in ms."""
        return [ms for index in range(len(self.rounds)) for ms in self.round_steps(index)]


Results = dict[str, dict[str, Measured]]


def measure(sizes: list[str], systems: list[System], num_ranks: int, num_rounds: int) -> Results:
    """Rounds over all systems, each in rank processes of its own, so that drift hits all alike."""
    results: Results = {size: {s.label: Measured(s) for s in systems} for size in sizes}
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=num_rounds * len(sizes) * len(systems))
        for round_index in range(num_rounds):
            first = round_index * 3 % len(systems)
            for size in sizes:
                for system in systems[first:] + systems[:first]:
                    progress.update(task, description=f"{size}: {system.label}")
                    _run(results[size][system.label], size, num_ranks)
                    progress.advance(task)
    return results


def _run(measured: Measured, size: str, num_ranks: int) -> None:
    """Adds one round, or says why there is none."""
    if measured.error:
        return
    if not is_installed(measured.system.peer):
        measured.error = "not installed"
        return
    args = (measured.system, size, RUN_LENGTHS[size])
    try:
        measured.rounds.append(run_on_ranks(run_on_this_rank, num_ranks, args, RUN_TIMEOUT_S))
    except (RuntimeError, TimeoutError) as error:
        measured.error = str(error)


def step_table(size: str, measured: dict[str, Measured], num_ranks: int) -> Table:
    """Time, memory and loss of each system."""
    millions = sum(p.numel() for p in GPT(GPT_SIZES[size]).parameters()) / 1e6
    table = Table(
        f"{millions:.1f} M parameters, {num_ranks} ranks",
        ["system", "step ms", "p10-p90", "rounds", "peak RSS MiB", "above imports", "loss"],
    )
    for label, result in measured.items():
        if not result.rounds:
            lines = result.error.strip().splitlines()
            table.add(label, lines[0] if len(lines) < 2 else "failed")
            continue
        steps = result.steps()
        tenths = quantiles(steps, n=10)
        reports = [report for ranks in result.rounds for report in ranks]
        table.add(
            label,
            f"{median(steps):.1f}",
            f"{tenths[0]:.0f}-{tenths[-1]:.0f}",
            f"[{' '.join(f'{ms:.0f}' for ms in result.round_medians())}]",
            f"{median(report.peak_mib for report in reports):.0f}",
            f"{median(report.peak_mib - report.imported_mib for report in reports):.0f}",
            f"{sum(r.loss for r in result.rounds[-1]) / num_ranks:.6f}",
        )
    return table


def ratio_table(results: Results) -> Table:
    """zerocore over its best peer at each stage, with both raw figures."""
    columns = ["comparison", "zerocore ms", "peer ms", "ratio", "single rounds", "wanted"]
    table = Table("zerocore / best peer", columns)
    for size, stage, labels, wanted in GOALS:
        measured = results.get(size, {})
        ran = [measured[label] for label in labels if label in measured and measured[label].rounds]
        if not ran:
            continue
        peer = min(ran, key=lambda candidate: median(candidate.steps()))
        peer_ms = f"{median(peer.steps()):.1f}"
        name = f"{size}: stage {stage} / {peer.system.label}"
        ours = measured.get(f"zerocore stage {stage}")
        if ours is None or not ours.rounds:
            table.add(name, "-", peer_ms, "-", "-", f"<= {wanted}")
            continue
        pairs = zip(ours.round_medians(), peer.round_medians(), strict=False)
        rounds = sorted(mine / theirs for mine, theirs in pairs)
        table.add(
            name,
            f"{median(ours.steps()):.1f}",
            peer_ms,
            f"{median(ours.steps()) / median(peer.steps()):.3f}",
            f"{rounds[0]:.2f}-{rounds[-1]:.2f}",
            f"<= {wanted}",
        )
    return table


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    peers: Annotated[str, typer.Option(help="Peers beside zerocore.")] = ",".join(PEERS[:-1]),
    size: Annotated[str, typer.Option(help="29m, small or both.")] = "both",
    rounds: Annotated[int, typer.Option(help="Times that each system is run.")] = 3,
    stages: Annotated[str, typer.Option(help="Stages of zerocore; may be empty.")] = "0,1,2,3",
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Measures step time, memory and loss; prints zerocore's ratio to the best peer."""
    wanted = peers.split(",")
    unknown = set(wanted) - set(PEERS)
    sizes = list(GPT_SIZES) if size == "both" else [size]
    if unknown or not set(sizes) <= set(GPT_SIZES):
        raise typer.BadParameter(f"peers are {', '.join(PEERS[:-1])}; sizes {', '.join(GPT_SIZES)}")
    systems = [s for s in SYSTEMS if s.peer in wanted and s.peer != "zerocore"]
    systems += [s for s in SYSTEMS if s.peer == "zerocore" and str(s.stage) in stages.split(",")]
    load = os.getloadavg()[0]
    results = measure(sizes, systems, ranks, rounds)
    tables = [step_table(name, results[name], ranks) for name in sizes] + [ratio_table(results)]
    tables[-1].notes = [*NOTES, f"Load of the machine when the run began: {load:.1f}."]
    console = make_console()
    for table in tables:
        table.show(console)
    for name, measured in ((n, m) for by in results.values() for n, m in by.items()):
        if measured.error and measured.error != "not installed":
            console.print(f"{name} failed:\n{measured.error}", markup=False)
    if save:
        raw = {name: [asdict(m) for m in results[name].values()] for name in sizes}
        settings = {"ranks": ranks, "load_at_start": load, "results": raw}
        paths = write_results("step", settings, "\n".join(table.markdown() for table in tables))
        console.print(f"written: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    typer.run(main)
