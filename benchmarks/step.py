"""Times training steps of zerocore and its peers on real ranks, in turns.

Usage: python benchmarks/step.py --ranks 2 --peers plain,ddp,fsdp2,deepspeed
       python benchmarks/step.py --dtype bf16 --accumulate 4 --clip 1.0 --optimizer zerocore
       python benchmarks/step.py --device cuda --ranks 1 --peers plain,ddp,fsdp2
       python benchmarks/step.py --device cuda --link emulated --ranks 8 --peers plain,ddp,fsdp2
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from bench.lib.models import GPT, GPT_SIZES
from bench.lib.ranks import EMULATED, EMULATED_PRESET, run_here, run_on_ranks
from bench.lib.results import Results
from bench.lib.systems import FP32, OURS, PEERS, SYSTEMS, Recipe, System, is_installed
from bench.lib.tables import Table
from bench.step.run import RankReport, RunLength, run_on_this_rank

# Short steps need more rounds for a steady median.
RUN_LENGTHS = {
    "29m": RunLength(num_warmup=3, num_steps=8),
    "small": RunLength(10, 40),
    "943m": RunLength(5, 20),
}
SIZES = {"cpu": ["29m", "small"], "cuda": ["943m"]}
RUN_TIMEOUT_S = 180.0
# If medians of a system's rounds are further apart than this, other programs used the machine.
QUIET_SPREAD = 1.25

# (size, stage, peers, whose fastest counts, the wanted ratio)
GOALS = (
    ("29m", 3, ("fsdp2", "deepspeed"), 0.85),
    ("29m", 2, ("fsdp2", "deepspeed"), 0.85),
    ("29m", 0, ("ddp",), 1.03),
    ("small", 3, ("fsdp2",), 0.60),
    ("small", 2, ("fsdp2", "deepspeed"), 0.85),
    ("small", 0, ("ddp",), 1.03),
    ("943m", 3, ("fsdp2",), 1.0),
    ("943m", 2, ("fsdp2",), 1.0),
    ("943m", 0, ("ddp",), 1.03),
)
NOTES = (
    "Step: forward, backward, optimizer, zero_grad; median over all timed steps of all rounds, "
    "each the mean over the ranks. In brackets the medians of the single rounds.",
    "Peak memory: of a rank during the timed steps, median over ranks and rounds, resident on the "
    "CPU, allocated by torch on a GPU; the second figure leaves out memory from before the "
    "model was built.",
    "Loss: mean over the ranks at the last step; same seed and batches everywhere, but plain "
    "trains on each rank's own batches and never averages.",
    "FSDP2: each block, then the root; async: also _set_unshard_async_op(True) and prefetch lists "
    "one block ahead. DDP: gradient_as_bucket_view. DeepSpeed: its defaults but for gradient "
    "clipping, which it turns on; so ZeRO-3 keeps parameters of up to 100,000 elements gathered, "
    "and the others from the forward to the backward.",
)


BF16_NOTE = (
    "bf16 over fp32 weights, gradients reduced in fp32: FSDP2 by MixedPrecisionPolicy, zerocore by "
    "MixedPrecision, DeepSpeed by its bf16 and communication_data_type options; DDP and plain by "
    "autocast, which casts weights in every forward, and computes norms and the loss in fp32: "
    "their losses differ from the others' in rounding."
)
ACCUMULATE_NOTE = (
    "A step takes {} micro-batches. Gradients are reduced in the last one: no_sync, "
    "set_requires_gradient_sync(False), zerocore with accumulate='full'; DeepSpeed's ZeRO-2 and "
    "ZeRO-3 reduce them in every one."
)


@dataclass
class Measured:
    """The results of one system's rounds at one size."""

    system: System
    rounds: list[list[RankReport]] = field(default_factory=list)
    error: str = ""

    def round_steps(self, index: int) -> list[float]:
        """Returns the step times of a round in ms, averaged over the ranks."""
        by_rank = [report.step_ms for report in self.rounds[index]]
        return [sum(step) / len(step) for step in zip(*by_rank, strict=True)]

    def round_medians(self) -> list[float]:
        """Returns the median step of each round in ms."""
        return [median(self.round_steps(index)) for index in range(len(self.rounds))]

    def steps(self) -> list[float]:
        """Returns all step times in ms."""
        return [ms for index in range(len(self.rounds)) for ms in self.round_steps(index)]


BySize = dict[str, dict[str, Measured]]


@dataclass(frozen=True)
class Place:
    """The ranks, their device ("cpu", "cuda") and their link ("real", "emulated")."""

    num_ranks: int
    device: str
    link: str
    recipe: Recipe = FP32

    @property
    def backend(self) -> str:
        if self.link == EMULATED:
            return EMULATED
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def theme(self) -> str:
        parts = ["step", *([EMULATED] if self.link == EMULATED else [])]
        recipe = self.recipe
        parts += ["cuda"] if self.device == "cuda" else []
        parts += (
            [f"{self.num_ranks}_ranks"] if self.backend == "nccl" and self.num_ranks > 1 else []
        )
        parts += [recipe.dtype] if recipe.dtype != "fp32" else []
        parts += [f"accumulate{recipe.accumulate}"] if recipe.accumulate > 1 else []
        parts += ["clip"] if recipe.clip is not None else []
        return "_".join(parts)

    @property
    def notes(self) -> list[str]:
        recipe = self.recipe
        notes = [BF16_NOTE] if recipe.compute_dtype is not None else []
        notes += [ACCUMULATE_NOTE.format(recipe.accumulate)] if recipe.accumulate > 1 else []
        if recipe.optimizer == "zerocore":
            notes.append("zerocore steps with zerocore.optim.AdamW, all others with torch's fused.")
        if self.link != EMULATED:
            return notes
        return [
            *notes,
            f"EMULATED link ({EMULATED_PRESET}): one process plays rank 0 of {self.num_ranks}, the "
            "others mirror it. Stages that gather parameters repeat this rank's shard, so "
            "their losses mean nothing; times and memory are rank 0's.",
        ]


def measure(
    sizes: list[str], systems: list[System], place: Place, num_rounds: int, results: Results
) -> None:
    """Measures rounds over all systems, in processes of their own; drift affects all alike."""
    found: BySize = {size: {s.label: Measured(s) for s in systems} for size in sizes}
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=num_rounds * len(sizes) * len(systems))
        for round_index in range(num_rounds):
            first = round_index * 4 % len(systems)
            for size in sizes:
                for system in systems[first:] + systems[:first]:
                    progress.update(task, description=f"{size}: {system.label}")
                    _run(found[size][system.label], size, place)
                    results.write(tables_of(found, place), raw_of(found, place))
                    progress.advance(task)


def _run(measured: Measured, size: str, place: Place) -> None:
    """Adds one round, or the error if it failed."""
    if measured.error:
        return
    if not is_installed(measured.system.peer):
        measured.error = "not installed"
        return
    length = RUN_LENGTHS[size].with_accumulation(place.recipe.accumulate)
    args = (measured.system, size, length, place.device, place.recipe)
    is_one = place.device == "cuda" and (place.link == EMULATED or place.num_ranks == 1)
    run = run_here if is_one else run_on_ranks
    try:
        reports = run(run_on_this_rank, place.num_ranks, args, RUN_TIMEOUT_S, place.backend)
        measured.rounds.append(reports)
    except (RuntimeError, TimeoutError) as error:
        measured.error = str(error)


def step_table(size: str, measured: dict[str, Measured], place: Place) -> Table:
    """Shows the time, memory and loss of each system."""
    with torch.device("meta"):
        millions = sum(p.numel() for p in GPT(GPT_SIZES[size]).parameters()) / 1e6
    memory = "peak RSS MiB" if place.device == "cpu" else "peak MiB"
    table = Table(
        f"{millions:.1f} M parameters, {place.num_ranks} ranks, {place.backend}",
        ["system", "step ms", "p10-p90", "rounds", memory, "above imports", "loss"],
    )
    for label, result in measured.items():
        if not result.rounds:
            lines = result.error.strip().splitlines() or ["not measured"]
            table.add(label, lines[0] if len(lines) < 2 else "failed")
            continue
        steps = result.steps()
        failed = " failed" if result.error else ""
        tenths = quantiles(steps, n=10)
        reports = [report for ranks in result.rounds for report in ranks]
        table.add(
            label,
            f"{median(steps):.1f}",
            f"{tenths[0]:.0f}-{tenths[-1]:.0f}",
            f"[{' '.join(f'{ms:.0f}' for ms in result.round_medians())}{failed}]",
            f"{median(report.peak_mib for report in reports):.0f}",
            f"{median(report.peak_mib - report.imported_mib for report in reports):.0f}",
            f"{mean(report.loss for report in result.rounds[-1]):.6f}",
        )
    return table


def ratio_table(found: BySize) -> Table:
    """Shows the ratio of zerocore to its fastest peer at each stage, with both figures."""
    columns = ["comparison", "zerocore ms", "peer ms", "ratio", "single rounds", "wanted"]
    table = Table("zerocore / fastest peer", columns)
    for size, stage, peers, wanted in GOALS:
        same_stage = [
            measured
            for measured in found.get(size, {}).values()
            if measured.system.stage == stage and measured.rounds
        ]
        theirs = [m for m in same_stage if m.system.peer in peers]
        ours = [m for m in same_stage if m.system.peer in OURS]
        if not theirs:
            continue
        fastest = min(theirs, key=lambda measured: median(measured.steps()))
        for own in ours:
            name = f"{size}: {own.system.label} / {fastest.system.label}"
            table.add(name, *_ratio(own, fastest), f"<= {wanted}")
    return table


def disturbed(by_size: BySize) -> list[str]:
    """Returns a note that names the systems whose rounds differ too much, if any."""
    found = []
    for size, by_label in by_size.items():
        for label, measured in by_label.items():
            medians = measured.round_medians()
            if medians and max(medians) > QUIET_SPREAD * min(medians):
                found.append(f"{label} ({size})")
    if not found:
        return []
    limit = f"{QUIET_SPREAD:.2f}x"
    return [f"NOT QUIET: rounds differ by more than {limit} for {', '.join(found)}."]


def _ratio(ours: Measured, theirs: Measured) -> list[str]:
    own_ms, peer_ms = median(ours.steps()), median(theirs.steps())
    pairs = zip(ours.round_medians(), theirs.round_medians(), strict=False)
    rounds = sorted(own / peer for own, peer in pairs)
    spread = f"{rounds[0]:.2f}-{rounds[-1]:.2f}"
    return [f"{own_ms:.1f}", f"{peer_ms:.1f}", f"{own_ms / peer_ms:.3f}", spread]


def tables_of(found: BySize, place: Place) -> list[Table]:
    """Returns the tables of steps of each size, then of the ratios."""
    tables = [step_table(name, by_label, place) for name, by_label in found.items()]
    tables.append(ratio_table(found))
    tables[-1].notes = [*place.notes, *NOTES, *disturbed(found)]
    for size, by_label in found.items():
        tables[-1].notes += [
            f"{label} ({size}) failed:\n{measured.error}"
            for label, measured in by_label.items()
            if measured.error not in ("", "not installed")
        ]
    return tables


def raw_of(found: BySize, place: Place) -> dict[str, Any]:
    """Returns all figures for the JSON file."""
    by_size = {size: [asdict(m) for m in by_label.values()] for size, by_label in found.items()}
    return {**asdict(place), "results": by_size}


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    peers: Annotated[str, typer.Option(help="Systems besides zerocore.")] = ",".join(PEERS),
    size: Annotated[str, typer.Option(help="29m, small, 943m; both: the device's two.")] = "both",
    rounds: Annotated[int, typer.Option(help="Times that each system is run.")] = 3,
    stages: Annotated[str, typer.Option(help="Stages of zerocore; may be empty.")] = "0,1,2,3",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    link: Annotated[str, typer.Option(help="real (gloo, NCCL) or emulated.")] = "real",
    dtype: Annotated[str, typer.Option(help="fp32, or bf16 over fp32 weights.")] = "fp32",
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Maximum norm of the gradients.")] = None,
    optimizer: Annotated[str, typer.Option(help="zerocore's: torch or zerocore.")] = "torch",
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Measures step time, memory and loss; prints zerocore's ratio to the best peer."""
    wanted = peers.split(",")
    if device not in SIZES or link not in ("real", EMULATED):
        raise typer.BadParameter("devices are cpu, cuda; links are real, emulated")
    if dtype not in ("fp32", "bf16") or optimizer not in ("torch", "zerocore"):
        raise typer.BadParameter("dtypes are fp32, bf16; optimizers are torch, zerocore")
    sizes = SIZES[device] if size == "both" else [size]
    if not set(wanted) <= set(PEERS) or not set(sizes) <= set(RUN_LENGTHS):
        raise typer.BadParameter(f"peers are {', '.join(PEERS)}; sizes {', '.join(RUN_LENGTHS)}")
    own = [s for s in SYSTEMS if s.peer in OURS and str(s.stage) in stages.split(",")]
    systems = [s for s in SYSTEMS if s.peer in wanted or s in own]
    place = Place(ranks, device, link, Recipe(dtype, accumulate, clip, optimizer))
    with Results(place.theme, save) as results:
        measure(sizes, systems, place, rounds, results)


if __name__ == "__main__":
    typer.run(main)
