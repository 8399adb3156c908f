"""Compares a step of Muon with FSDP2's on real ranks, measures its hidden exchange on an emulated
link, and draws losses of a GPT trained by it.

Usage: python benchmarks/muon.py --ranks 2
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from matplotlib.figure import Figure

from bench.lib.ranks import EMULATED, run_on_ranks
from bench.lib.results import Results
from bench.lib.tables import Table
from bench.lib.timing import fastest, ratio
from bench.optimizer.exchange import HiddenExchange, measure_hidden
from bench.optimizer.muon import FSDP2, GATHER, OWN, MuonRun, measure_muon, train
from parity import python_text

RUN_TIMEOUT_S = 550.0
WANTED = 0.6  # ratio to the faster peer
WORLDS = (1, 4)
SHARES = (0.25, 0.5, 1.0, 4.0)  # time of the exchange / an undelayed step
Losses = dict[str, list[float]]


def step_table(runs: list[MuonRun]) -> Table:
    """Shows the times of rank 0; a step ends on all ranks together."""
    own = runs[0]
    columns = ["system", "ms", "zerocore / it", "differs from one process by"]
    table = Table(f"a step of Muon, 10 M parameters, {len(runs)} ranks", columns)
    for name, seconds in own.seconds.items():
        against = f"{ratio(own.seconds, OWN, name):.2f}"
        error = max(run.errors[name] for run in runs)
        table.add(name, f"{median(seconds) * 1e3:.0f}", against, f"{error:.1e}")
    best = fastest(own.seconds, [FSDP2, GATHER])
    table.notes = [
        f"Wanted: at most {WANTED} of the faster peer, {best}.",
        "Medians over rounds in which all systems take turns; gloo, one thread a rank. Matrices of "
        "the blocks by Muon, other parameters by AdamW; all systems have the same gradients.",
        f"A rank sends {[run.sent_nbytes for run in runs]} bytes, planned "
        f"{[run.planned_nbytes for run in runs]}. In a step it waited "
        f"{own.waited_s * 1e3:.1f} ms for the exchange; shares of the Newton-Schulz work: "
        f"{', '.join(f'{share:.3f}' for share in own.work)}.",
    ]
    return table


def hidden_table(found: list[HiddenExchange], world_size: int) -> Table:
    """Shows the time that a step waits for its exchange, on links of several speeds."""
    columns = ["exchange / step without delay", "MB/s", "exchange, ms", "waited, ms"]
    columns += ["hidden", "step, ms"]
    title = f"emulated: a step of Muon, 10 M parameters, rank 0 of {world_size}"
    table = Table(title, columns)
    for each in found:
        times = [f"{each.transfer_s * 1e3:.1f}", f"{each.waited_s * 1e3:.1f}"]
        share = f"{each.hidden:.0%}"
        table.add(
            f"{each.share:g}",
            f"{each.bandwidth / 1e6:.0f}",
            *times,
            share,
            f"{each.step_s * 1e3:.1f}",
        )
    table.notes = [
        "Hidden: 1 - waited / time that the exchange used the link. AdamW runs under the first "
        f"exchange, each of the {found[0].num_rounds} rounds of Newton-Schulz under the next "
        "exchange; nothing runs under the last results. If the exchange takes longer than the "
        "step, there is too little work to hide it.",
        "Medians of steps; one thread.",
    ]
    return table


def loss_table(losses: Losses, steps: int) -> Table:
    """Shows first and last losses, and the differences between numbers of ranks."""
    table = Table(f"losses of {steps} steps", ["run", "first", "last", "largest difference"])
    for name, values in losses.items():
        other = losses[name.split(",")[0] + f", {_ranks(WORLDS[0])}"]
        apart = max(abs(a - b) / b for a, b in zip(values, other, strict=True))
        table.add(name, f"{values[0]:.4f}", f"{values[-1]:.4f}", f"{apart:.1e}")
    table.notes = [
        "Nats per byte of Python's own text; the ranks divide one batch. Differences are relative "
        "to the loss of the same step on one rank. Newton-Schulz computes in bfloat16, so "
        "an order of sums that changes a gradient's last bit may change 3 digits of an update.",
    ]
    return table


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''}"


def draw(losses: Losses, path: Path) -> None:
    """Draws curves; dots on lines show that the numbers of ranks agree."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        is_muon, is_one = name.startswith("Muon"), name.endswith("1 rank")
        color = "tab:purple" if is_muon else "tab:blue"
        axes.plot(values, "-" if is_one else "o", color=color, markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("GPT of 10 M parameters, stage 3, measured", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(
    ranks: Annotated[int, typer.Option(help="Timed processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds in which each system takes its turn.")] = 9,
    steps: Annotated[int, typer.Option(help="Training steps of the curves; 0 for none.")] = 60,
    save: Annotated[bool, typer.Option(help="Write dated files into results/.")] = True,
) -> None:
    """Prints the times of a step of Muon, and losses of a GPT that it trains."""
    losses: dict[str, list[float]] = {}
    with Results("muon", save) as results:
        runs = run_on_ranks(measure_muon, ranks, (rounds,), RUN_TIMEOUT_S)
        tables, raw = [step_table(runs)], {"runs": [asdict(run) for run in runs]}
        results.write(tables, raw)
        args = (list(SHARES), rounds)
        [hidden] = run_on_ranks(measure_hidden, ranks, args, RUN_TIMEOUT_S, EMULATED)
        tables.append(hidden_table(hidden, ranks))
        raw["hidden"] = [asdict(each) for each in hidden]
        results.write(tables, raw)
        for world_size in WORLDS if steps else ():
            for name in ("Muon", "AdamW"):
                own = (name, steps, 8, python_text())
                found = run_on_ranks(train, world_size, own, RUN_TIMEOUT_S)
                losses[f"{name}, {_ranks(world_size)}"] = found[0]
            results.write([*tables, loss_table(losses, steps)], {**raw, "losses": losses})
        if losses and save:
            draw(losses, results.file("_losses.png"))


if __name__ == "__main__":
    typer.run(main)
