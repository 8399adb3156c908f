"""Training steps with states on the host beside the same without, of zerocore and its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from bench.lib.ranks import EMULATED, EMULATED_PRESET, run_on_ranks
from bench.lib.systems import Recipe, System, is_installed
from bench.lib.tables import Table
from bench.step.run import RankReport, RunLength, run_on_this_rank

SIZE, LENGTH, TIMEOUT_S = "29m", RunLength(num_warmup=3, num_steps=8), 180.0
HOST_LINK = "pcie5"
RECIPE = Recipe(clip=1.0, optimizer="zerocore")
STEP_GOAL = 1.05
NUM_RANKS = {EMULATED: 8, "gloo": 2}
# Each offloaded system right behind the same one without.
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
SYSTEMS = {EMULATED: (*ZEROCORE, *FSDP2), "gloo": (*ZEROCORE, *FSDP2, *DEEPSPEED)}
NOTES = {
    EMULATED: (
        f"EMULATED links: rank 0 of {NUM_RANKS[EMULATED]} on {EMULATED_PRESET}, and {HOST_LINK} to "
        "the host, which only zerocore's transfers go over. Device and host are one memory of one "
        "CPU, so FSDP2's policy copies nothing there: its row says what it costs in Python.",
        "Clipped to a norm of 1; zerocore by its AdamW, with one thread beside the one that "
        "computes, FSDP2 by torch's fused one. Beside: the same system without offload, medians "
        "over rounds.",
    ),
    "gloo": (
        f"{NUM_RANKS['gloo']} ranks over gloo, a core each: what updates a unit takes its time "
        "from what computes, so nothing is hidden and a ratio says what offload itself costs. "
        "DeepSpeed's states are updated by its DeepSpeedCPUAdam.",
    ),
}


@dataclass
class Measured:
    """Rounds of a system, each a report of each rank; or why there are none."""

    rounds: list[list[RankReport]] = field(default_factory=list)
    error: str = ""

    def medians(self) -> list[float]:
        """Milliseconds of a step, by round; the mean over ranks of each."""
        steps = [
            [sum(ms) / len(ms) for ms in zip(*(r.step_ms for r in ranks), strict=True)]
            for ranks in self.rounds
        ]
        return [median(each) for each in steps]


def run_beside_link(system: System) -> RankReport:
    """On this rank; transfers to the host take the time of a link where ranks are emulated."""
    import torch.distributed as dist

    from zerocore import emulated
    from zerocore.common.links import set_emulated_host_link

    if dist.get_backend() == EMULATED:
        set_emulated_host_link(emulated.link(HOST_LINK))
    return run_on_this_rank(system, SIZE, LENGTH, recipe=RECIPE)


def measure_steps(backend: str, rounds: int) -> dict[System, Measured]:
    """All systems of a backend in turn, in processes of their own."""
    found = {system: Measured() for system in SYSTEMS[backend]}
    for _ in range(rounds):
        for system, measured in found.items():
            if not is_installed(system.peer):
                measured.error = "not installed"
            if measured.error:
                continue
            try:
                reports = run_on_ranks(
                    run_beside_link, NUM_RANKS[backend], (system,), TIMEOUT_S, backend
                )
                measured.rounds.append(reports)
            except (RuntimeError, TimeoutError) as error:
                measured.error = str(error).strip()
    return found


def steps_table(backend: str, found: dict[System, Measured]) -> Table:
    """Each system beside the same without offload."""
    columns = ["system", "step ms", "beside", "rounds", "loss", "wanted"]
    title = f"a training step of {SIZE}, {NUM_RANKS[backend]} ranks, {backend}"
    table = Table(title, columns, notes=list(NOTES[backend]))
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
        wanted = f"<= {STEP_GOAL}" if system in ZEROCORE[1:] and backend == EMULATED else ""
        table.add(system.label, *cells, f"{sum(losses) / len(losses):.6f}", wanted)
    return table
