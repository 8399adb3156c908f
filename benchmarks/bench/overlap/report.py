"""Reports the exposed and hidden communication of an overlap run, in tables and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch.distributed as dist

from bench.lib.links import EMULATED_REPLICAS, EMULATED_WORLD_SIZE
from bench.lib.tables import Table
from bench.overlap.run import GOAL_RATIO, PLAIN, OverlapRun, Subject, traffic_of, unavoidable_of

HIDDEN_GOAL = 95.0


@dataclass(frozen=True)
class Figures:
    """Figures of one system on one link, in milliseconds a step, medians over the rounds."""

    free_ms: float  # on an infinitely fast link; with a real link, the plain model's
    step_ms: float
    communication_ms: float
    unavoidable_ms: float
    exposed_ms: float
    wait_ms: float | None  # exposed time from the timeline

    def hidden(self, exposed_ms: float | None) -> float | None:
        """Returns the percentage of communication that did not lengthen the step."""
        if exposed_ms is None or self.communication_ms == 0:
            return None
        return 100 * (1 - exposed_ms / self.communication_ms)

    def hidden_of_possible(self, exposed_ms: float | None) -> float | None:
        """Returns the same, without the first gather and the last reduction."""
        possible = self.communication_ms - self.unavoidable_ms
        if exposed_ms is None or possible <= 0:
            return None
        return 100 * (1 - (exposed_ms - self.unavoidable_ms) / possible)


def figures(run: OverlapRun, subject: Subject, ratio: float) -> Figures:
    """Returns the figures of a system at a ratio of communication to compute."""
    if run.link.is_emulated:
        free = subject.rounds[0.0].step_ms
        rounds = subject.rounds[ratio]
    else:
        free = run.subjects[0].rounds[0.0].step_ms
        rounds = subject.rounds[0.0]
    run.set_ratio(ratio)
    blocks = run.workload.num_blocks
    pairs = zip(rounds.step_ms, free, strict=True)
    return Figures(
        free_ms=median(free),
        step_ms=median(rounds.step_ms),
        communication_ms=run.link.step_ms(run.block_nbytes, traffic_of(subject.system, blocks)),
        unavoidable_ms=run.link.step_ms(run.block_nbytes, unavoidable_of(subject.system)),
        exposed_ms=median(step - base for step, base in pairs),
        wait_ms=median(rounds.wait_ms) if rounds.wait_ms else None,
    )


def find(run: OverlapRun, label: str) -> Subject:
    """Returns the system with that label."""
    return next(subject for subject in run.subjects if subject.system.label == label)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def comparison(run: OverlapRun, hybrid: bool = False) -> Table:
    """Compares the systems at the goal's ratio: those that shard over all ranks, or hybrid ones."""
    by_difference = ("exposed", "hidden %", "of possible %")
    by_timeline = ("waits", "hidden %", "of possible %")
    table = Table(
        f"{run.link.label}: overlap of a training step" + ", hybrid sharding" * hybrid,
        ["system", "free", "step", "/ plain", "comm", *by_difference, *by_timeline],
    )
    plain = median(run.subjects[0].rounds[0.0].step_ms)
    for subject in run.subjects:
        if subject.system.hybrid != hybrid:
            continue
        found = figures(run, subject, GOAL_RATIO)
        waits = "-" if found.wait_ms is None else f"{found.wait_ms:.1f}"
        table.add(
            subject.system.label,
            f"{found.free_ms:.1f}",
            f"{found.step_ms:.1f}",
            f"{found.step_ms / plain:.3f}",
            f"{found.communication_ms:.1f}",
            f"{found.exposed_ms:.1f}",
            _percent(found.hidden(found.exposed_ms)),
            _percent(found.hidden_of_possible(found.exposed_ms)),
            waits,
            _percent(found.hidden(found.wait_ms)),
            _percent(found.hidden_of_possible(found.wait_ms)),
        )
    table.notes = hybrid_notes() if hybrid else notes(run)
    return table


def notes(run: OverlapRun) -> list[str]:
    """Returns notes that explain the comparison's columns."""
    work, compute = run.workload, run.compute
    lines = [
        f"Forward and backward of {work.num_blocks} GPT blocks, width {work.width}, "
        f"{work.batch} x {work.sequence} tokens, {work.dtype}, {run.block_nbytes / 2**20:.1f} MiB "
        f"each; ms. Compute alone: {compute.forward_ms:.1f} + {compute.backward_ms:.1f}.",
        "Hidden: communication that did not lengthen the step; possible: all but the first gather "
        "and the last reduction. Blocks read their weights in backward; the last table shows the "
        "effect of embeddings on this bound. Waits: exposed time, independent of step times: "
        "from the timeline of the runtime, for FSDP2 its waits in the link's collectives "
        "(CPU; DDP waits for futures, which record no times); the next columns follow from it.",
        "FSDP2, async: _set_unshard_async_op(True), prefetch lists one block ahead. On CPU it has "
        "no streams and waits for each reduction all the same. DDP: buckets of a block's size.",
    ]
    if run.link.is_emulated:
        forward, backward = run.directions()
        lines.insert(
            0,
            f"EMULATED link: rank 0 of {EMULATED_WORLD_SIZE}, communication of stage 3 over "
            f"compute {forward:.2f} in forward, {backward:.2f} in backward. Free: on an "
            "infinitely fast link. Exposed: step - free, in the same round; it may be below "
            "the minimum, as the free step also waits for the first copy in memory. Comm: by "
            "the model.",
        )
    else:
        lines.insert(
            0,
            f"{dist.get_backend()}, {dist.get_world_size()} ranks. Free: plain. Comm: the step's "
            "collectives, called through c10d on an idle link. On CPU the transport takes time of "
            "the cores that compute, which counts as exposed by step difference.",
        )
    return lines


def hybrid_notes() -> list[str]:
    """Returns further notes for the comparison with hybrid sharding."""
    shards = EMULATED_WORLD_SIZE // EMULATED_REPLICAS
    return [
        f"EMULATED links: rank 0 of a mesh of {EMULATED_REPLICAS} replicas x {shards} shards, "
        "a link for each dimension. Gathers and reduce-scatters within the replica last as long as "
        "above. The link between replicas is slower, as between nodes: the all-reduce of a rank's "
        "shard of a block lasts as long as a gather of the block.",
        "Comm: of both links. Possible: all but the first gather, the last reduce-scatter and the "
        "all-reduce of its result. The rest as above.",
    ]


def _hidden_twice(found: Figures) -> tuple[str, str]:
    """Returns the percentage hidden of the possible, by step difference and by timeline."""
    return (
        _percent(found.hidden_of_possible(found.exposed_ms)),
        _percent(found.hidden_of_possible(found.wait_ms)),
    )


def _of_link(peer: Figures) -> str:
    """Returns a peer's second measurement; it has no timeline, see `OverlapRun._waited_ms`."""
    share = peer.hidden_of_possible(peer.wait_ms)
    return "-" if share is None else f"{share:.1f} (waits in the link)"


def requirements(run: OverlapRun) -> Table:
    """Compares the figures with the requirements, by both measurements."""
    table = Table(
        f"{run.link.label}: required of stage 3",
        ["what", "step difference", "timeline", "required"],
    )
    own = figures(run, find(run, "zerocore stage 3"), GOAL_RATIO)
    peers = [figures(run, find(run, name), GOAL_RATIO) for name in ("FSDP2", "FSDP2, async")]
    best = min(peers, key=lambda peer: peer.step_ms)
    unprefetched = figures(run, find(run, "zerocore stage 3, prefetch 0"), GOAL_RATIO)
    table.add(
        "hidden of the possible, %",
        *_hidden_twice(own),
        f">= {HIDDEN_GOAL:.0f}",
    )
    table.add(
        "the better FSDP2, %",
        _percent(best.hidden_of_possible(best.exposed_ms)),
        _of_link(best),
        "less than stage 3",
    )
    table.add(
        "stage 3 without prefetch, %",
        *_hidden_twice(unprefetched),
        "visibly less",
    )
    table.add("step, stage 3 / the better FSDP2", f"{own.step_ms / best.step_ms:.3f}", "-", "< 1")
    hybrid = figures(run, find(run, "zerocore stage 3, hybrid"), GOAL_RATIO)
    table.add(
        "hybrid sharding: hidden of the possible, %",
        *_hidden_twice(hybrid),
        f">= {HIDDEN_GOAL:.0f}",
    )
    return table


def sweep(run: OverlapRun) -> Table:
    """Shows the hidden percentage of each stage-3 system at each ratio."""
    ratios = run.workload.ratios
    table = Table(
        f"{run.link.label}: hidden % by communication / compute",
        ["system", *(f"{ratio:g}" for ratio in ratios)],
    )
    for label, values in hidden_by_ratio(run).items():
        table.add(label, *(f"{value:.1f}" for value in values))
    table.add("limit: min(1, compute / communication)", *(f"{limit(r):.1f}" for r in ratios))
    table.notes = ["By step difference; the first gather and the last reduction count as exposed."]
    return table


def limit(ratio: float) -> float:
    """Returns the highest percentage, if the first gather and last reduction could be hidden."""
    return 100 * min(1.0, 1.0 / ratio)


def hidden_by_ratio(run: OverlapRun) -> dict[str, list[float]]:
    """Returns the hidden percentages of each system of the sweep, by ratio."""
    found = {}
    for subject in run.subjects:
        if subject.in_sweep() and subject.system != PLAIN:
            cells = [figures(run, subject, ratio) for ratio in run.workload.ratios]
            found[subject.system.label] = [cell.hidden(cell.exposed_ms) or 0.0 for cell in cells]
    return found


def draw_sweep(run: OverlapRun, path: Path) -> None:
    """Draws the hidden percentage over the ratio, with the limit."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    grid = [0.25 + 0.01 * step for step in range(176)]
    axes.plot(grid, [limit(r) for r in grid], color="black", linestyle=":", label="limit")
    for label, values in hidden_by_ratio(run).items():
        own = label.startswith("zerocore")
        axes.plot(
            run.workload.ratios,
            values,
            marker="o",
            linestyle="-" if own else "--",
            label=label + (", prefetch 1" if label == "zerocore stage 3" else ""),
        )
    axes.set_ylim(-25, 105)
    axes.set_xlabel("communication / compute")
    axes.set_ylabel("hidden communication, %")
    axes.set_title(f"{run.link.label}, {run.link.device.type}: {run.workload.num_blocks} blocks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
