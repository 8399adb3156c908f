"""Plans each stage's memory and time before a run, without GPU, group or weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from zerocore.common.checks import check_int
from zerocore.common.events import COLLECTIVES
from zerocore.common.links import Link, default_link, find_link, traffic_nbytes
from zerocore.common.quantities import parse_bandwidth, parse_flops, parse_nbytes
from zerocore.model.config import ShardConfig
from zerocore.model.precision import MixedPrecision
from zerocore.model.stages import STAGES
from zerocore.model.state import is_sharded
from zerocore.model.units import UnitChoice, UnitPlanned, choose_units
from zerocore.planning.activations import Activations, Loss, default_loss, measure
from zerocore.planning.advice import advise
from zerocore.planning.checkpoint_bytes import checkpoint_bytes
from zerocore.planning.division import Division
from zerocore.planning.exchange import exchanged_nbytes
from zerocore.planning.huggingface import build_model, config_dtype, load_config, sample_inputs
from zerocore.planning.offloading import Host, OffloadPlan, plan_offloads
from zerocore.planning.planner import (
    PlannedEvent,
    Planner,
    Precision,
    make_planner,
    optimizer_states,
)
from zerocore.planning.result import Peak, Plan, Setting, StagePlan, moment_name
from zerocore.planning.step_time import predict_timing

DEFAULT_FLOPS = 400e12
"""Operations per second: about 40 % of an H100's 989e12 dense bf16 ones (NVIDIA's data sheet)."""

DEFAULT_HOST_BANDWIDTH = 400e9
"""Bytes per second: assumed of a server with two sockets, of about 600e9 that 16 channels of DDR5
reach on paper."""

# How fake tensors refuse what depends on values.
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)

ModelLike = nn.Module | str | Path | dict[str, Any]


def plan(
    model: ModelLike | Any,
    world_size: int,
    *,
    num_replicas: int = 1,
    regather: int = 1,
    mixed_precision: MixedPrecision | None = None,
    optimizer: str | int = "adamw",
    dtype: torch.dtype | None = None,
    units: Sequence[UnitChoice] | None = None,
    prefetch: int = 1,
    accumulate: str = "sharded",
    gather_at_step: bool = False,
    micro_batches: int = 1,
    micro_batch: int = 1,
    seq_len: int = 2048,
    inputs: Any = None,
    loss: Loss = default_loss,
    checkpointing: bool = False,
    memory: str | int = "24GiB",
    links: Sequence[Link | str | float] | Link | str | float | None = None,
    replica_link: Link | str | float | None = None,
    near_link: Link | str | float | None = None,
    flops: str | float = DEFAULT_FLOPS,
    rank: int = 0,
    host_memory: str | int | None = None,
    host_bandwidth: str | float = DEFAULT_HOST_BANDWIDTH,
) -> Plan:
    """Bytes, traffic and time of a training step at each stage, on one rank.

    The bytes are those of the layouts and the schedule that the runtime executes; activations are
    measured on fake tensors. All figures are predictions.

    Args:
        model: a module (on any device, also meta) that is not sharded, a Hugging Face
            configuration, a configuration file, its content, or a preset's name.
        world_size: number of data-parallel ranks, of all replicas together.
        num_replicas: groups of ranks that hold the same (hybrid sharding): the state is sharded
            over ``world_size / num_replicas`` ranks, as with ``group=`` a DeviceMesh of
            ``(num_replicas, world_size // num_replicas)``.
        regather: ranks that gather again from each other at stage 3, as with ``regather=``; 1 where
            all gathers come from all ranks.
        mixed_precision: main weights in the model's own dtype, layers in a narrower one.
        optimizer: a name such as ``"adamw"``, or how many tensors of a parameter's size it keeps.
            ``"muon"`` is that on all matrices by shape: what it sends is counted, its time is not.
        dtype: floating-point dtype of the model, instead of its own.
        units: as for :func:`zerocore.shard`.
        prefetch: units gathered ahead.
        accumulate: as for :func:`zerocore.shard`.
        gather_at_step: as for :func:`zerocore.shard`. The pause between steps is taken to last
            as long as the first gather.
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``. Bytes
            are those of the whole step, times those of one micro-batch that communicates.
        micro_batch: samples in a forward, for Hugging Face models.
        seq_len: tokens in a sample, at most what the configuration allows.
        inputs: one micro-batch for ``loss``, read for shapes only; made from ``micro_batch`` and
            ``seq_len`` for Hugging Face models.
        loss: called as ``loss(model, inputs)``; by default the model's ``loss`` or the sum of its
            outputs.
        checkpointing: recompute each block in the backward.
        memory: bytes of a device, as a number or text such as ``"24GiB"``.
        links: presets, bandwidths such as ``"450GB/s"`` or ``"450GB/s,12us"``, or links, between
            the ranks that share the state; by default ``nvlink4`` up to 8 of them and ``ib400``
            beyond.
        replica_link: the link between replicas. By default they share the one of ``links``; without
            ``links`` it is ``nvlink4`` up to 8 ranks in all and ``ib400`` beyond.
        near_link: the link between ranks of ``regather``. By default that of ``links``; without
            ``links`` it is ``nvlink4`` up to 8 of them and ``ib400`` beyond.
        flops: operations per second that layers reach.
        rank: whose bytes, counted replica by replica; rank 0 owns the most.
        host_memory: bytes of a machine beside its devices, such as ``"512GiB"``, which up to 8
            ranks share: says which stage and ``offload=`` fit.
        host_bandwidth: what the host reads and writes in a second, such as ``"400GB/s"``.

    Raises:
        ValueError, TypeError: an argument is out of range, the model is sharded already, or it
            fails with the ``inputs`` or the ``loss`` given. A model whose forward depends on the
            values of its inputs is no error: it is planned without activations.
        ImportError: a configuration without transformers.
    """
    _check(
        loss,
        world_size=world_size,
        num_replicas=num_replicas,
        regather=regather,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        seq_len=seq_len,
    )
    config = ShardConfig(prefetch=prefetch, accumulate=accumulate, mixed_precision=mixed_precision)
    inside, across = _find_links(links, replica_link, world_size, num_replicas)
    setting = Setting(
        world_size=world_size,
        rank=rank,
        prefetch=config.prefetch,
        checkpointing=checkpointing,
        memory_nbytes=parse_nbytes(memory),
        links=inside,
        flops_per_s=parse_flops(flops),
        num_replicas=num_replicas,
        replica_link=across,
        host=_find_host(host_memory, host_bandwidth),
        gather_at_step=gather_at_step,
        num_near=regather,
        near_link=_find_near_link(links, near_link, regather),
    )
    num_states = optimizer_states(optimizer)
    module, name, precision = _resolve(model, Precision(dtype, mixed_precision))
    planned = choose_units(module, units)
    planner = replace(
        make_planner(module, planned, precision, num_states),
        micro_batches=micro_batches,
        hold_full=config.holds_full,
        moves_matrices=isinstance(optimizer, str) and optimizer.lower() == "muon",
    )
    given = inputs is not None or loss is not default_loss
    if inputs is None:
        inputs = sample_inputs(module, micro_batch, _allowed_length(module, seq_len))
    measured = _measure(module, planned, inputs, loss, precision.run_dtype, given)
    return _make_plan(name, planner, setting, *measured)


def _make_plan(
    name: str,
    planner: Planner,
    setting: Setting,
    plain: Activations | None,
    checkpointed: Activations | None,
    note: str,
) -> Plan:
    """All stages and the advice; ``note`` says why activations were not measured."""
    run = checkpointed if setting.checkpointing else plain
    if run is not None:
        planner = replace(planner, order=run.order, backward=run.backward, unused=run.unused)
    result = Plan(
        model=name,
        num_params=planner.num_params,
        num_units=len(planner.names),
        setting=setting,
        stages=tuple(plan_stage(planner, stage, setting, run) for stage in STAGES),
        activations=plain,
        checkpointed=checkpointed,
        note=note,
    )
    result = replace(result, offloads=_offloads(planner, setting, run))
    return replace(result, advice=tuple(advise(result, planner)))


def _find_host(memory: str | int | None, bandwidth: str | float) -> Host | None:
    if memory is None:
        return None
    rate = parse_bandwidth(bandwidth, "host_bandwidth")
    if not rate > 0:
        raise ValueError(f"host_bandwidth must be positive, got {bandwidth!r}")
    return Host(parse_nbytes(memory, "host_memory"), rate)


def _offloads(
    planner: Planner, setting: Setting, run: Activations | None
) -> tuple[OffloadPlan, ...]:
    if setting.host is None:
        return ()
    division = Division(0, setting.world_size, setting.num_replicas, setting.prefetch, setting.rank)
    activations = 0 if run is None else run.peak_nbytes
    return plan_offloads(planner, division, setting.host, setting.memory_nbytes, activations)


def _check(loss: object, **counts: int) -> None:
    for name, value in counts.items():
        check_int(name, value, 1)
    if not callable(loss):
        raise TypeError(f"loss must be a function of the model and its inputs, got {loss!r}")


def _find_links(
    links: Sequence[Link | str | float] | Link | str | float | None,
    replica_link: Link | str | float | None,
    world_size: int,
    num_replicas: int,
) -> tuple[tuple[Link, ...], Link | None]:
    """The links to compare, and that between replicas; None where nothing has a link of its own."""
    if links is None:
        links = default_link(world_size // num_replicas)
        replica_link = replica_link or default_link(world_size)
    listed = links if isinstance(links, Sequence) and not isinstance(links, str) else [links]
    inside = tuple(find_link(link) for link in listed)
    across = None if replica_link is None else find_link(replica_link)
    return inside, across if num_replicas > 1 else None


def _find_near_link(links: object, near_link: Link | str | float | None, num: int) -> Link | None:
    """The link between near ranks; None where it is that of the others."""
    if near_link is None and links is None:
        near_link = default_link(num)
    return None if near_link is None or num == 1 else find_link(near_link)


def plan_stage(
    planner: Planner, stage: int, setting: Setting, activations: Activations | None
) -> StagePlan:
    """One stage of a plan."""
    division = Division(
        stage,
        setting.world_size,
        setting.num_replicas,
        setting.prefetch,
        setting.rank,
        gather_at_step=setting.gather_at_step,
        num_near=setting.num_near,
    )
    memory, events = planner.memory(division), planner.events(division)
    collectives = [event for event in events if event.op in COLLECTIVES]
    exchanged = exchanged_nbytes(planner, division) if planner.moves_matrices else 0
    peak = Peak(memory.reserved, "any time after the first step")
    timings = []
    if activations is not None:
        where = moment_name(activations.order, activations.peak_moment, planner.names)
        peak = Peak(memory.reserved + activations.peak_nbytes, where)
        one = events
        if planner.micro_batches > 1:
            one = replace(planner, micro_batches=1).events(division)
        played = (one, activations.order, activations.flops, setting.flops_per_s)
        timings = [
            predict_timing(*played, link, setting.replica_link, setting.near_link)
            for link in setting.links
        ]
    return StagePlan(
        stage=stage,
        **asdict(memory),
        activations=None if activations is None else activations.peak_nbytes,
        peak=peak,
        spare=setting.memory_nbytes - peak.nbytes,
        sent_nbytes=_sent_nbytes(collectives) + exchanged,
        exchanged_nbytes=exchanged,
        across_nbytes=_sent_nbytes([event for event in collectives if event.axis == "replicas"]),
        num_collectives=len(collectives),
        timings=tuple(timings),
        checkpoint=checkpoint_bytes(planner, division),
    )


def _sent_nbytes(collectives: list[PlannedEvent]) -> int:
    return round(sum(traffic_nbytes(e.op, e.nbytes, e.num_ranks) for e in collectives))


def _resolve(model: Any, precision: Precision) -> tuple[nn.Module, str, Precision]:
    """The module to plan, what to call it, and the dtypes that are still to be applied."""
    if isinstance(model, nn.Module):
        if is_sharded(model):
            raise ValueError(
                f"this {type(model).__name__} is sharded already; plan it before "
                "zerocore.shard or fully_shard, or use zerocore.predict_memory"
            )
        return model, type(model).__name__, precision
    config = load_config(model) if isinstance(model, str | Path | dict) else model
    if not hasattr(config, "model_type"):
        raise TypeError(
            "plan expects a module, a Hugging Face configuration, a configuration file or a "
            f"preset's name, got {type(model)}"
        )
    # Under mixed precision a checkpoint's narrow dtype is not that of the main weights.
    own = torch.float32 if precision.mixed is not None else config_dtype(config)
    built = build_model(config, precision.dtype or own, model)
    name = model if isinstance(model, str) else type(built).__name__
    return built, name, replace(precision, dtype=None)


def _allowed_length(model: nn.Module, seq_len: int) -> int:
    config = getattr(model, "config", None)
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)


def _measure(
    model: nn.Module,
    planned: list[UnitPlanned],
    inputs: Any,
    loss: Loss,
    dtype: torch.dtype | None,
    given: bool,
) -> tuple[Activations | None, Activations | None, str]:
    """The run as it is, the checkpointed one, and why either is missing.

    Inputs or a loss that were ``given`` are a mistake if they fail for want of no data.
    """
    if inputs is None:
        note = f"activations not measured: pass inputs= to run a {type(model).__name__}"
        return None, None, note
    found: list[Activations | None] = [None, None]
    for checkpointing in (False, True):
        try:
            with _quiet():
                found[checkpointing] = measure(
                    model, planned, inputs, loss, checkpointing=checkpointing, dtype=dtype
                )
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if given and not checkpointing and not isinstance(error, _NEEDS_DATA):
                raise ValueError(
                    "the forward or backward failed with the inputs= or loss= given: "
                    f"{type(error).__name__}: {reason}. inputs must be one micro-batch of this "
                    f"{type(model).__name__}, and loss(model, inputs) return a scalar tensor; "
                    "leave both out for a plan without activations"
                ) from error
            what = "checkpointed activations" if checkpointing else "activations"
            note = f"{what} not measured: the forward or backward failed: {reason}"
            return found[0], None, note
    return found[0], found[1], ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging operators that do not run without data; they are in the note."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
