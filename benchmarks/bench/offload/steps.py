"""Times training steps of zerocore and its peers, with and without states on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from bench.lib.ranks import run_on_ranks
from bench.lib.systems import Recipe, System, is_installed
from bench.lib.tables import Table
from bench.step.run import RankReport, RunLength, run_on_this_rank

SIZE, LENGTH, TIMEOUT_S = "29m", RunLength(num_warmup=3, num_steps=8), 180.0
RECIPE = Recipe(clip=1.0, optimizer="zerocore")
NUM_RANKS = 2
# Each offloaded system runs right after the same one without offload.
ZEROCORE = (
    System("zerocore", 3, "zerocore"),
    System("zerocore", 3, "zerocore, Offload(states='cpu')", offload=True),
)
FSDP2 = (
    System("fsdp2", 3, "FSDP2, async", overlap=True),
    System("fsdp2", 3, "FSDP2, async, CPUOffloadPolicy", overlap=True, offload=True),
)
DEEPSPEED = (
    System("deepspeed", 3, "DeepSpeed ZeRO-3"),
    System("deepspeed", 3, "DeepSpeed ZeRO-3, offload_optimizer", offload=True),
)
SYSTEMS = (*ZEROCORE, *FSDP2, *DEEPSPEED)
NOTES = (
    f"{NUM_RANKS} ranks over gloo, a core each: updates take time from the cores that "
    "compute, so nothing is hidden and a ratio is the cost of offload itself. DeepSpeed's states "
    "are updated by its DeepSpeedCPUAdam.",
    "Clipped to a norm of 1. Beside: the same system without offload, medians over rounds.",
)


@dataclass
class Measured:
    """The rounds of a system, each with a report of each rank, or its error."""

    rounds: list[list[RankReport]] = field(default_factory=list)
    error: str = ""

    def medians(self) -> list[float]:
        """Returns the milliseconds of a step by round, the mean over the ranks."""
        steps = [
            [sum(ms) / len(ms) for ms in zip(*(r.step_ms for r in ranks), strict=True)]
            for ranks in self.rounds
        ]
        return [median(each) for each in steps]


def run_offloaded(system: System) -> RankReport:
    """Runs a system on this rank."""
    return run_on_this_rank(system, SIZE, LENGTH, recipe=RECIPE)


def measure_steps(rounds: int) -> dict[System, Measured]:
    """Measures all systems in turn, each in processes of its own."""
    found = {system: Measured() for system in SYSTEMS}
    for _ in range(rounds):
        for system, measured in found.items():
            if not is_installed(system.peer):
                measured.error = "not installed"
            if measured.error:
                continue
            try:
                reports = run_on_ranks(run_offloaded, NUM_RANKS, (system,), TIMEOUT_S)
                measured.rounds.append(reports)
            except (RuntimeError, TimeoutError) as error:
                measured.error = str(error).strip()
    return found


def steps_table(found: dict[System, Measured]) -> Table:
    """Compares each system with the same one without offload."""
    columns = ["system", "step ms", "beside", "rounds", "loss"]
    title = f"a training step of {SIZE}, {NUM_RANKS} ranks, gloo"
    table = Table(title, columns, notes=list(NOTES))
    plain: list[float] = []
    for system, measured in found.items():
        steps = measured.medians()
        if not steps:
            lines = measured.error.splitlines()
            table.add(system.label, lines[-1] if lines else "no rounds")
            plain = []
            continue
        cells = [f"{median(steps):.1f}", "", " ".join(f"{ms:.0f}" for ms in steps)]
        if not system.offload:
            plain = steps
        elif plain:
            cells[1] = f"{median(a / b for a, b in zip(steps, plain, strict=False)):.3f}"
        losses = [report.loss for report in measured.rounds[-1]]
        table.add(system.label, *cells, f"{sum(losses) / len(losses):.6f}")
    return table
