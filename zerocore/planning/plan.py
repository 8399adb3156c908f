"""Plans each stage's memory and time before a run, without GPU, group or weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from zerocore._C import BackwardEvent, PlannedEvent
from zerocore.common.checks import check_int
from zerocore.common.events import COLLECTIVES
from zerocore.common.links import traffic_nbytes
from zerocore.common.parsing import parse_nbytes
from zerocore.model.state import is_sharded
from zerocore.model.units import Unit, UnitChoice, choose_units
from zerocore.options.config import Communication
from zerocore.options.precision import MixedPrecision, check_mixed
from zerocore.options.stages import STAGES
from zerocore.planning.activations import Activations, Loss, default_loss, record
from zerocore.planning.advice import advise
from zerocore.planning.candidates import Candidate, candidates
from zerocore.planning.division import Division
from zerocore.planning.huggingface import build_model, config_dtype, load_config, sample_inputs
from zerocore.planning.other_bytes import checkpoint_bytes, exchanged_nbytes
from zerocore.planning.planner import Planner, make_planner, optimizer_states
from zerocore.planning.result import OffloadPlan, Peak, Plan, StagePlan, moment_name
from zerocore.planning.setting import Machine, Setting, Workload, checked_groups
from zerocore.planning.step_time import predict_timing
from zerocore.sharding.meshes import assign_parts
from zerocore.weights.export_steps import DEFAULT_BUCKET, Load, Sizes, peak_nbytes

# Fake tensors raise these for operators whose results depend on values.
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)

ModelLike = nn.Module | str | Path | dict[str, Any]


def plan(
    model: ModelLike | Any,
    world_size: int,
    *,
    num_replicas: int = 1,
    groups: Mapping[str, Any] | None = None,
    communication: Communication | None = None,
    workload: Workload | None = None,
    machine: Machine | None = None,
    mixed_precision: MixedPrecision | None = None,
    dtype: torch.dtype | None = None,
    units: Sequence[UnitChoice] | None = None,
) -> Plan:
    """Predicts the bytes, traffic and time of a training step on one rank, at each stage.

    The bytes follow from the layouts and the schedule that the runtime executes. Activations are
    measured on fake tensors.

    Args:
        model: a module (on any device, also meta) that is not sharded, a Hugging Face
            configuration, a configuration file, its content, or a preset's name.
        world_size: number of data-parallel ranks, of all replicas together.
        num_replicas: replicas of hybrid sharding: the state is sharded over
            ``world_size / num_replicas`` ranks, as with ``group=`` a DeviceMesh of
            ``(num_replicas, world_size // num_replicas)``. Replicas may share the optimizer's
            states (``Communication(replicas_share="optimizer")``).
        groups: parameters that fewer ranks share, such as experts, by a pattern of their names:
            ``{"*.experts.*": zerocore.ParameterMesh(2, of=4)}`` for 4 parts along dimension 0, each
            on 2 ranks. ``model`` has all parts, and rank 0 owns the largest.
        communication: as for :func:`zerocore.shard`.
        workload: the step of a rank, such as ``Workload(inputs=batch, micro_batches=4)``; see
            :class:`Workload`.
        machine: the devices and their links, such as ``Machine("8xH100-ib400")`` or
            ``Machine(memory="80GB")``; see :class:`Machine`.
        mixed_precision: main weights in the model's own dtype, layers in a narrower one.
        dtype: floating-point dtype of the model, instead of its own.
        units: as for :func:`zerocore.shard`.

    Raises:
        ValueError, TypeError: an argument is out of range, the model is sharded already, or its
            forward or backward fails with the ``inputs`` or ``loss`` given. If it only needs the
            values of its inputs, the plan has no activations instead.
        ImportError: a configuration needs transformers, which is not installed.
    """
    communication = Communication() if communication is None else communication
    workload = Workload() if workload is None else workload
    machine = Machine() if machine is None else machine
    _check_types(communication, workload, machine, dtype)
    check_mixed(mixed_precision)
    num_near = communication.num_near
    for what, count in (("world_size", world_size), ("num_replicas", num_replicas)):
        check_int(what, count, 1)
    check_int("regather", num_near, 1)
    inputs, loss = workload.inputs, workload.loss
    setting = Setting(
        world_size=world_size,
        num_replicas=num_replicas,
        communication=replace(communication, regather=num_near),
        workload=replace(workload, inputs=None, loss=None),
        machine=machine,
        groups=checked_groups(groups, world_size),
    )
    module, name, dtype = _resolve(model, dtype, mixed_precision)
    planned = assign_parts(choose_units(module, units), [*setting.groups])
    planner = make_planner(
        module,
        planned,
        dtype=dtype,
        mixed=mixed_precision,
        num_states=optimizer_states(workload.optimizer),
        num_parts=(1, *(group.of for group in setting.groups.values())),
    )
    is_given = inputs is not None or loss is not None
    loss = default_loss if loss is None else loss
    if inputs is None:
        inputs = sample_inputs(module, workload.micro_batch, workload.seq_len)
    run_dtype = (mixed_precision and mixed_precision.param_dtype) or dtype
    measured = _measure(module, planned, inputs, loss, run_dtype, is_given)
    result = _make_plan(name, planned, _of_step(planner, workload), setting, *measured)
    return replace(result, num_tokens=_num_tokens(inputs))


def _check_types(communication: object, workload: object, machine: object, dtype: object) -> None:
    for what, value, kind in (
        ("communication", communication, Communication),
        ("workload", workload, Workload),
        ("machine", machine, Machine),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{what} must be a zerocore.{kind.__name__}, got {value!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dtype must be a floating-point torch.dtype such as torch.bfloat16, got {dtype!r}"
        )


def _of_step(planner: Planner, workload: Workload) -> Planner:
    optimizer = workload.optimizer
    moves_matrices = isinstance(optimizer, str) and optimizer.lower() == "muon"
    if workload.zero_bubble:
        units = tuple(replace(unit, stays=True) for unit in planner.units)
        return replace(planner, units=units, moves_matrices=moves_matrices)
    return replace(planner, micro_batches=workload.micro_batches, moves_matrices=moves_matrices)


def _make_plan(
    name: str,
    planned: list[Unit],
    planner: Planner,
    setting: Setting,
    plain: Activations | None,
    checkpointed: Activations | None,
    note: str,
) -> Plan:
    """Plans all stages and adds the advice; ``note`` says why activations were not measured."""
    run = checkpointed if setting.workload.checkpointing else plain
    if run is not None:
        backward = tuple(BackwardEvent(*event) for event in run.backward)
        rows = zip(planner.units, run.unused, strict=True)
        units = tuple(replace(unit, unused=unused) for unit, unused in rows)
        planner = replace(planner, units=units, order=run.order, backward=backward)
    result = Plan(
        model=name,
        num_params=sum(param.object.numel() for unit in planned for param in unit.params),
        num_units=len(planner.units),
        setting=setting,
        stages=tuple(plan_stage(planner, stage, setting, run) for stage in STAGES),
        activations=plain,
        checkpointed=checkpointed,
        offloads=tuple(_offloads(planner, setting, 0 if run is None else run.peak_nbytes)),
        note=note,
    )
    return replace(result, advice=tuple(advise(result, planner)))


def _offloads(planner: Planner, setting: Setting, activations: int) -> Iterator[OffloadPlan]:
    """Yields the plan of each offload at each stage: to the host, then to a disk. Yields none if
    the host's memory is unknown. ``activations``: their peak in bytes."""
    share = setting.host_share
    for candidate in candidates(Candidate(planner, setting.division(STAGES[0]))):
        offload = candidate.division.offload
        if offload is not None and share is not None:
            on_device = candidate.nbytes + activations
            fits = on_device <= setting.memory_nbytes and candidate.memory.host <= share
            yield OffloadPlan(candidate.division.stage, offload, candidate.memory, on_device, fits)


def plan_stage(
    planner: Planner, stage: int, setting: Setting, activations: Activations | None
) -> StagePlan:
    """Plans one stage."""
    division = setting.division(stage)
    memory, events = planner.memory(division), planner.events(division)
    collectives = [event for event in events if event.op in COLLECTIVES]
    deferred = 0
    if setting.workload.zero_bubble:  # at its end all buckets are in flight
        sent = sum(event.nbytes for event in collectives if event.op == "reduce_scatter")
        deferred = planner.full_gradient_nbytes + sent
    exchanged = exchanged_nbytes(planner, division) if planner.moves_matrices else 0
    held = memory.reserved + deferred
    peak = Peak(held, "any time after the first step")
    timings = []
    if activations is not None:
        names = [unit.name for unit in planner.units]
        where = moment_name(activations.order, activations.peak_moment, names)
        peak = Peak(held + activations.peak_nbytes, where)
        is_one = planner.micro_batches == 1
        one = events if is_one else replace(planner, micro_batches=1).events(division)
        played = (one, activations.order, _compute_s(setting, activations))
        timings = [
            predict_timing(*played, link, setting.replica_link, setting.near_link)
            for link in setting.links
        ]
    across = [event for event in collectives if event.axis == "replicas"]
    return StagePlan(
        stage=stage,
        **asdict(memory),
        deferred_gradients=deferred,
        activations=None if activations is None else activations.peak_nbytes,
        peak=peak,
        spare=setting.memory_nbytes - peak.nbytes,
        sent_nbytes=_sent_nbytes(collectives) + exchanged,
        exchanged_nbytes=exchanged,
        across_nbytes=_sent_nbytes(across),
        near_nbytes=_near_nbytes(collectives, division.communication.num_near),
        group_nbytes=_group_nbytes(collectives, planner, setting),
        num_collectives=len(collectives),
        timings=tuple(timings),
        checkpoint=checkpoint_bytes(planner, division),
        export=_export_nbytes(planner, division),
    )


def _export_nbytes(planner: Planner, division: Division) -> int:
    loads = []
    for layout, unit in zip(planner.layouts(division), planner.units, strict=True):
        held = layout.nbytes if division.stage == 3 and layout.num_shards > 1 else 0
        pairs = zip(unit.specs, unit.types, strict=True)
        sizes = [spec.numel * kind.model.itemsize for spec, kind in pairs]
        received = layout.received_nbytes if held else 0
        loads.append(Load(held, received, tuple(Sizes(nbytes, False) for nbytes in sizes)))
    return peak_nbytes(loads, parse_nbytes(DEFAULT_BUCKET))


def _compute_s(setting: Setting, activations: Activations) -> tuple[float, ...]:
    """Returns the seconds of compute by moment."""
    gpu, rate = setting.gpu, setting.flops_per_s
    if gpu is None:
        return tuple(flops / rate for flops in activations.flops)
    return tuple(gpu.seconds(work, setting.workload.compiled) for work in activations.work)


def _num_tokens(inputs: Any) -> int | None:
    """Returns the tokens of a micro-batch; None if the inputs are not tokens."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    return tokens.numel() if isinstance(tokens, torch.Tensor) else None


def _group_nbytes(
    collectives: list[PlannedEvent], planner: Planner, setting: Setting
) -> dict[str, int]:
    return {
        pattern: _sent_nbytes([e for e in collectives if planner.units[e.unit].mesh == mesh])
        for mesh, pattern in enumerate(setting.groups, 1)
    }


def _near_nbytes(collectives: list[PlannedEvent], num_near: int) -> int:
    """Returns the bytes sent among near ranks: their own gathers, and their part of the others."""
    total = 0.0
    for event in collectives:
        sent = traffic_nbytes(event.op, event.nbytes, event.num_ranks)
        if event.axis == "near":
            total += sent
        elif event.axis == "state" and event.num_ranks > num_near:
            total += sent * (num_near - 1) / (event.num_ranks - 1)
    return round(total)


def _sent_nbytes(collectives: list[PlannedEvent]) -> int:
    return round(sum(traffic_nbytes(e.op, e.nbytes, e.num_ranks) for e in collectives))


def _resolve(
    model: Any, dtype: torch.dtype | None, mixed: MixedPrecision | None
) -> tuple[nn.Module, str, torch.dtype | None]:
    """Returns the module to plan, its name, and a dtype if it is not its parameters' own."""
    if isinstance(model, nn.Module):
        if is_sharded(model):
            raise ValueError(
                f"this {type(model).__name__} is sharded already; plan it before "
                "zerocore.shard or fully_shard, or use zerocore.planning.predict_memory"
            )
        return model, type(model).__name__, dtype
    config = load_config(model) if isinstance(model, str | Path | dict) else model
    if not hasattr(config, "model_type"):
        raise TypeError(
            "plan expects a module, a Hugging Face configuration, a configuration file or a "
            f"preset's name, got {type(model)}"
        )
    # Under mixed precision the main weights are in float32, not in a checkpoint's narrow dtype.
    default = torch.float32 if mixed is not None else config_dtype(config)
    built = build_model(config, dtype or default, model)
    name = model if isinstance(model, str) else type(built).__name__
    return built, name, None


def _measure(
    model: nn.Module,
    planned: list[Unit],
    inputs: Any,
    loss: Loss,
    dtype: torch.dtype | None,
    is_given: bool,
) -> tuple[Activations | None, Activations | None, str]:
    """Returns the activations without and with checkpointing, and a note if one is missing. If the
    user gave inputs or a loss, raises ValueError unless the run only lacked data."""
    if inputs is None:
        note = (
            "activations not measured: pass workload=zerocore.Workload(inputs=...) to run a "
            f"{type(model).__name__}"
        )
        return None, None, note
    measured: list[Activations | None] = [None, None]
    for checkpointing in (False, True):
        try:
            with _quiet():
                measured[checkpointing] = record(
                    model, planned, inputs, loss, checkpointing=checkpointing, dtype=dtype
                )
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if is_given and not checkpointing and not isinstance(error, _NEEDS_DATA):
                raise ValueError(
                    "the forward or backward failed with the inputs= or loss= of the workload: "
                    f"{type(error).__name__}: {reason}. inputs must be one micro-batch of this "
                    f"{type(model).__name__}, and loss(model, inputs) return a scalar tensor; "
                    "leave both out for a plan without activations"
                ) from error
            what = "checkpointed activations" if checkpointing else "activations"
            note = f"{what} not measured: the forward or backward failed: {reason}"
            return measured[0], None, note
    return measured[0], measured[1], ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging operators that need data: the plan's note names them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
