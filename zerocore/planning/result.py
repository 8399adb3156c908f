"""The result of a plan: values, a table as text, a dictionary for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerocore._C import CallEvent
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.common.quantities import format_flops, format_nbytes, format_seconds
from zerocore.common.tables import render_table
from zerocore.options.offload import Offload
from zerocore.planning.activations import Activations, mirrored
from zerocore.planning.other_bytes import CheckpointBytes
from zerocore.planning.setting import Setting
from zerocore.planning.step_time import Timing

LITTLE_HEADROOM = 0.2
"""A stage has little headroom if it spares less than this part of the device's memory."""


@dataclass(frozen=True)
class Peak:
    """The highest bytes of a step, and when it reaches them."""

    nbytes: int
    when: str


@dataclass(frozen=True, kw_only=True)
class StagePlan(MemoryBytes):
    """One stage on one rank: the bytes of the model, and the other bytes and times of a step.

    Attributes:
        stage: 0 to 3.
        deferred_gradients: bytes of full gradients that a zero-bubble schedule keeps until its end,
            and of the buckets that reduce them.
        activations: highest bytes of activations; None if not measured.
        peak: highest sum.
        spare: the device's memory less the peak; negative if the stage does not fit.
        sent_nbytes: bytes that the rank sends in a step.
        exchanged_nbytes: the part of them that Muon sends to owners of matrices and back.
        across_nbytes: the part of ``sent_nbytes`` that goes to other replicas.
        near_nbytes: the part that goes to near ranks, such as a node's, as if a rank sent each
            other rank a message of its own.
        group_nbytes: the part that the ranks of each of ``groups`` send to each other.
        num_collectives: collectives in a step.
        timings: predicted steps by link; none if activations were not measured.
        checkpoint: bytes of a checkpoint, and of this rank's part of it.
        export: most bytes that :func:`zerocore.export` takes at a time with buckets of 1 GiB; less
            under ``fully_shard`` if ranks of one machine read each other's memory.
    """

    stage: int
    deferred_gradients: int
    activations: int | None
    peak: Peak
    spare: int
    sent_nbytes: int
    exchanged_nbytes: int
    across_nbytes: int
    near_nbytes: int
    group_nbytes: dict[str, int]
    num_collectives: int
    timings: tuple[Timing, ...]
    checkpoint: CheckpointBytes
    export: int

    @property
    def fits(self) -> bool:
        """Whether the peak fits the device's memory; the peak lacks activations that are None."""
        return self.spare >= 0


@dataclass(frozen=True)
class OffloadPlan:
    """One stage with one offload, on one rank.

    Attributes:
        stage: 0 to 3.
        offload: state that is offloaded from the device.
        memory: bytes without activations.
        device_nbytes: most bytes on the device, with activations if measured.
        fits: whether the device's and the host's memory suffice.
    """

    stage: int
    offload: Offload
    memory: MemoryBytes
    device_nbytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The plan that :func:`zerocore.plan` returns; ``str()`` is a table.

    Attributes:
        model: name of the model.
        num_params: number of its parameters' elements; tied parameters count once.
        num_units: units by which it is sharded.
        setting: the step, the machine and the ranks of the plan.
        stages: stages 0 to 3.
        activations: measured without checkpointing; None if that failed.
        checkpointed: measured with each block recomputed in the backward.
        offloads: stages with offloads; empty if the host's memory is unknown.
        note: why activations were not measured; empty if they were.
        advice: sentences, the most important first.
        num_tokens: tokens of a micro-batch on a rank; None if the inputs are not tokens.
    """

    model: str
    num_params: int
    num_units: int
    setting: Setting
    stages: tuple[StagePlan, ...]
    activations: Activations | None
    checkpointed: Activations | None
    note: str = ""
    advice: tuple[str, ...] = ()
    offloads: tuple[OffloadPlan, ...] = ()
    num_tokens: int | None = None

    @property
    def smallest_fit(self) -> StagePlan | None:
        """The lowest stage that fits."""
        return next((stage for stage in self.stages if stage.fits), None)

    def tokens_per_s(self, timing: Timing) -> float | None:
        """Returns the tokens a second on each GPU; None if the inputs are not tokens."""
        return None if self.num_tokens is None else self.num_tokens / timing.step_s

    def mfu(self, timing: Timing) -> float | None:
        """Returns the model FLOPs utilization of the GPU's peak. Operations that checkpointing
        repeats do not count. None without the ``node`` of a :class:`Machine`."""
        gpu = self.setting.gpu
        if gpu is None or self.activations is None:
            return None
        return self.activations.model_flops / (timing.step_s * gpu.peak_flops)

    def rows(self) -> list[list[str]]:
        """Returns the table as text, a row for each figure and a column for each stage."""
        stages = self.stages
        figures: dict[str, Sequence[int | None]] = {
            "parameters": [stage.parameters for stage in stages],
            "main weights": [stage.main_weights for stage in stages],
            "gradients": [stage.gradients for stage in stages],
            "optimizer state": [stage.optimizer for stage in stages],
            "= model state": [stage.model_state for stage in stages],
            "bucket pool": [stage.pool_reserved for stage in stages],
            "deferred gradients": [stage.deferred_gradients for stage in stages],
            "activations": [stage.activations for stage in stages],
            "= peak": [stage.peak.nbytes for stage in stages],
            "to spare": [stage.spare for stage in stages],
            "sent a step": [stage.sent_nbytes for stage in stages],
            "of it, by the optimizer": [stage.exchanged_nbytes for stage in stages],
            "of it, between replicas": [stage.across_nbytes for stage in stages],
            "of it, among near ranks": [stage.near_nbytes for stage in stages],
        }
        for pattern, group in self.setting.groups.items():
            sent = [stage.group_nbytes[pattern] for stage in stages]
            figures[f"of it, {pattern} of {group.mesh} ranks"] = sent
        figures["its part of a checkpoint"] = [stage.checkpoint.own for stage in stages]
        figures["an export of weights"] = [stage.export for stage in stages]
        sometimes = ("main weights", "deferred gradients", "of it, by the optimizer")
        for name in (*sometimes, "of it, between replicas", "of it, among near ranks"):
            if not any(figures[name]):
                del figures[name]
        rows = [["", *(f"stage {stage.stage}" for stage in stages)]]
        for name, nbytes in figures.items():
            rows.append([name, *("?" if n is None else format_nbytes(n) for n in nbytes)])
        unknown = ", without activations" if stages[0].activations is None else ""
        rows.append([f"fits{unknown}", *(self.verdict(stage) for stage in stages)])
        for timings in zip(*(stage.timings for stage in stages), strict=True):
            rows += [*_timing_rows(timings), *self._rate_rows(timings)]
        return rows

    def _rate_rows(self, timings: Sequence[Timing]) -> list[list[str]]:
        tokens, shares = map(self.tokens_per_s, timings), map(self.mfu, timings)
        rows = [
            ["  tokens/s and GPU", *(f"{rate:,.0f}" for rate in tokens if rate is not None)],
            ["  MFU", *(f"{share:.1%}" for share in shares if share is not None)],
        ]
        return [row for row in rows if len(row) > 1]

    def verdict(self, stage: StagePlan) -> str:
        """Returns whether a stage fits: ``no``, ``little headroom`` or ``yes``."""
        if not stage.fits:
            return "no"
        tight = stage.spare < LITTLE_HEADROOM * self.setting.memory_nbytes
        return "little headroom" if tight else "yes"

    def notes(self) -> list[str]:
        """Returns the lines under the table: activations, the peak, assumptions and advice."""
        lines = []
        for run, name in ((self.activations, "as it is"), (self.checkpointed, "checkpointed")):
            if run is not None:
                lines.append(
                    f"activations {name}: {format_nbytes(run.peak_nbytes)} at their peak, "
                    f"{format_nbytes(run.saved_nbytes)} saved by the forward, "
                    f"{format_flops(run.total_flops)} a step"
                )
        if self.stages[0].activations is not None:
            # The other bytes never change, so the peak comes at the same moment at every stage.
            lines.append(f"peak of every stage: {self.stages[0].peak.when}")
        if self.stages[0].timings:
            lines += self._assumptions()
        if self.note:
            lines.append(self.note)
        lines.append(_checkpoint_note(self.stages))
        lines.append(
            "predicted; without the CUDA context, NCCL's buffers and the allocator's rounding"
        )
        return [*lines, *self.advice]

    def _assumptions(self) -> list[str]:
        """Returns the rates and sizes from which the times are predicted."""
        setting, workload = self.setting, self.setting.workload
        seconds = format_seconds(self.stages[0].timings[0].compute_s)
        lines = [f"{seconds} of compute at {setting.flops_per_s / 1e12:,.4g} TFLOP/s"]
        if setting.gpu is not None:
            compiled = " (compiled)" if workload.compiled else ""
            lines = [f"{seconds} of compute{compiled}, on {setting.node.assumptions()}"]
        links = (*setting.links, setting.replica_link, setting.near_link)
        lines += [
            f"{link.name}: {link.bandwidth_bytes_per_s / 1e9:,.4g} GB/s of bus bandwidth a rank, "
            f"{link.latency_s * 1e6:,.3g} us a collective"
            for link in dict.fromkeys(link for link in links if link is not None)
        ]
        if self.num_tokens is not None:
            tokens = self.num_tokens * workload.micro_batches * setting.world_size
            lines.append(
                f"{tokens:,} tokens a step: {self.num_tokens:,} in a micro-batch, "
                f"{workload.micro_batches} of them, {setting.world_size} ranks; the times are of "
                "one micro-batch that communicates"
            )
        return lines

    def title(self) -> str:
        """Returns one line with the model, the ranks and the memory."""
        setting, communication = self.setting, self.setting.communication
        reductions = communication.reductions_in_flight
        return (
            f"{self.model}: {self.num_params:,} parameters in {self.num_units} units, rank "
            f"{setting.workload.rank} of {setting.world_size}"
            + (f" in {setting.num_replicas} replicas" if setting.num_replicas > 1 else "")
            + (", which share the optimizer's states" if communication.replicas_share else "")
            + (f", {communication.num_near} of them near" if communication.num_near > 1 else "")
            + "".join(f", {group.of} parts of {name}" for name, group in setting.groups.items())
            + f", {format_nbytes(setting.memory_nbytes)} of memory, "
            f"prefetch {communication.prefetch}"
            + (f", {reductions} reductions in flight" if reductions > 1 else "")
            + (", checkpointed" if setting.workload.checkpointing else "")
            + (", zero bubble" if setting.workload.zero_bubble else "")
        )

    def __str__(self) -> str:
        return render_table(self.title(), self.rows(), self.notes())

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the figures by moment as values for JSON, in bytes and seconds."""
        stages = []
        for stage in self.stages:
            entry = asdict(stage)
            entry["checkpoint"]["host"] = stage.checkpoint.host
            entry["checkpoint"]["near"] = stage.checkpoint.near
            entry["model_state"] = stage.model_state
            entry["fits"] = stage.fits
            entry["verdict"] = self.verdict(stage)
            entry["timings"] = [
                {
                    **asdict(t),
                    **{"bound_s": t.bound_s, "exposed_s": t.exposed_s, "hidden": t.hidden},
                    **{"tokens_per_s": self.tokens_per_s(t), "mfu": self.mfu(t)},
                }
                for t in stage.timings
            ]
            stages.append(entry)
        return {
            "model": self.model,
            "num_params": self.num_params,
            "num_units": self.num_units,
            "num_tokens": self.num_tokens,
            "setting": self.setting.to_dict(),
            "stages": stages,
            "smallest_fit": None if self.smallest_fit is None else self.smallest_fit.stage,
            "activations": _summary(self.activations),
            "checkpointed": _summary(self.checkpointed),
            "note": self.note,
            "offloads": [asdict(offload) for offload in self.offloads],
            "advice": list(self.advice),
        }


def _checkpoint_note(stages: Sequence[StagePlan]) -> str:
    first, last = stages[0].checkpoint, stages[-1].checkpoint
    return (
        f"a checkpoint is {format_nbytes(last.total)}; a save in the background takes up to "
        f"{format_nbytes(first.host)} of the host's memory at stage {stages[0].stage}, "
        f"{format_nbytes(last.host)} at stage {stages[-1].stage}; PeerCheckpoints take "
        f"{format_nbytes(last.near)} of a node's memory for each rank, and send "
        f"{format_nbytes(last.own)} a save"
    )


def _timing_rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Returns a link's rows: each stage's predicted step, its communication and its bound."""
    seconds = {
        f"step, {timings[0].link}": [t.step_s for t in timings],
        "  communication": [t.communication_s for t in timings],
        "  of it, between replicas": [t.across_s for t in timings],
        "  no schedule beats": [t.bound_s for t in timings],
    }
    if not any(t.across_s for t in timings):
        del seconds["  of it, between replicas"]
    rows = [[name, *map(format_seconds, values)] for name, values in seconds.items()]
    return [*rows, ["  communication hidden", *(f"{t.hidden:.0%}" for t in timings)]]


def _summary(activations: Activations | None) -> dict[str, int] | None:
    if activations is None:
        return None
    return {
        "saved_nbytes": activations.saved_nbytes,
        "peak_nbytes": activations.peak_nbytes,
        "flops": activations.total_flops,
    }


def moment_name(order: tuple[CallEvent, ...], moment: int, names: Sequence[str]) -> str:
    """Returns a moment in words."""
    calls = mirrored(order)
    if moment == len(calls):
        return "end of the backward"
    phase = "forward" if moment < len(order) else "backward"
    return f"{phase} {'of' if calls[moment].enter else 'after'} {names[calls[moment].unit]}"
