"""Checks the arguments of ``shard``, so that a mistake on one rank is an error on all.

Also compares the ranks' parameters before the first rank's values overwrite those of the others.
Most programs want that: they set no seed, or load on the first rank only. Programs whose ranks hold
parts of their own do not: experts, or parts of matrices. See docs/behaviour.md for the rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zerocore.common.agreement import (
    agree,
    bits_of,
    checksum,
    differing,
    gather_objects,
    ranks_by_value,
)
from zerocore.common.alarm import stall_seconds
from zerocore.common.late import check_budget
from zerocore.common.quantities import parse_nbytes
from zerocore.model.materialize import InitFn
from zerocore.model.memory import check_apart
from zerocore.model.parameter_meshes import (
    ModelPart,
    assign_parts,
    choices_on,
    find_parts,
    find_tensor_ranks,
    larger_tensor,
    split_replicated,
    with_tensor_ranks,
)
from zerocore.model.ranks import Ranks, check_levels, local_gpu, with_near
from zerocore.model.refusals import check_kinds
from zerocore.model.state import find_state
from zerocore.model.units import ParamChoice, UnitChoice, UnitPlanned, choose_units
from zerocore.options.config import ShardConfig
from zerocore.options.precision import ParamTypes, param_types
from zerocore.sharding.extensions import check_options, split_several


@dataclass(frozen=True)
class ShardRequest:
    """The model to be sharded and how; the ranks agree on it."""

    model: nn.Module  # not sharded yet
    config: ShardConfig
    ranks: Ranks  # of data parallelism
    parts: tuple[ModelPart, ...]  # parameters that not all of them share
    planned: list[UnitPlanned]
    device: torch.device  # where parameters go
    init_fn: InitFn | None  # initialises one module that is on the meta device
    # How long ranks wait for each other: 0 for ever, None for as long as the process group does.
    stall_seconds: float | None
    tensor_ranks: ProcessGroup | None  # those of tensor parallelism; None without
    all_ranks: Ranks  # with those of tensor parallelism as more replicas, once they have agreed
    name: str = ""  # the same on all ranks and no other model's, once they have agreed

    @property
    def meshes(self) -> list[Ranks]:
        """The ranks of data parallelism, of parts, and of what all ranks hold alike."""
        more = [] if self.tensor_ranks is None else [self.all_ranks]
        return [self.ranks, *(part.ranks for part in self.parts), *more]


def validate(
    model: nn.Module,
    make_config: Callable[[], ShardConfig],
    ranks: Ranks,
    *,
    units: Sequence[UnitChoice] | None = None,
    device: torch.device | None = None,
    init_fn: InitFn | None = None,
    memory_budget: str | int | None = None,
    groups: Any = None,
) -> ShardRequest:
    """The request for sharding ``model``; arguments as of :func:`zerocore.shard`. A mistake is an
    error on every rank, also of ``make_config``, which may fail on one rank only."""
    request: ShardRequest | None = None
    error: Exception | None = None
    try:
        config = make_config()
        _check_model(model)
        ranks = _with_near(ranks, config)
        known = replace(config.communication, regather=ranks.num_near)  # ranks compare no groups
        config = replace(config, communication=known)
        check_kinds(model, ranks.world_size)
        parts = find_parts(groups, ranks)
        planned = split_several(choose_units(model, units), config)
        chosen = [(each.fqns[0], each.extent) for unit in planned for each in unit.params]
        check_apart(chosen, [model])
        planned = assign_parts(planned, [part.pattern for part in parts])
        tensor_ranks = find_tensor_ranks(planned, ranks, bool(parts))
        if known.replicas_share is not None:
            _check_shared(ranks, config, groups, tensor_ranks)
        if tensor_ranks is not None:
            planned = split_replicated(planned, len(parts) + 1)
        _check_types(planned, config)
        check_options(planned, config)
        device = _find_device(planned, device)
        if config.offload is not None:
            config.offload.check_path()
        request = ShardRequest(
            model, config, ranks, parts, planned, device, init_fn, stall_seconds(),
            tensor_ranks, ranks,
        )  # fmt: skip
        if memory_budget is not None and tensor_ranks is None:
            _check_budget(request, memory_budget)
    except Exception as caught:
        error = caught
    facts = [] if request is None or error is not None else _facts(request)
    name = agree(ranks.groups, error, facts, None if request is None else request.device)
    assert request is not None  # agree() has raised the error
    for mesh, part in enumerate(request.parts, 1):
        own = [_fact(choice) for choice in choices_on(request.planned, mesh)]
        agree(part.ranks.groups, None, [*own], request.device)
    request = replace(request, name=name)
    return request if tensor_ranks is None else _over_all(request, tensor_ranks, memory_budget)


def _over_all(
    request: ShardRequest, group: ProcessGroup, memory_budget: str | int | None
) -> ShardRequest:
    """The request, agreed on with the ranks of tensor parallelism; collective."""
    all_ranks = with_tensor_ranks(request.ranks, group, request.device)
    request = replace(request, all_ranks=all_ranks)
    error: Exception | None = None
    try:
        if memory_budget is not None:
            _check_budget(request, memory_budget)
    except Exception as caught:
        error = caught
    facts: list[Any] = [request.config, *(unit.name for unit in request.planned)]
    return replace(request, name=agree(all_ranks.groups, error, facts, request.device))


def _check_budget(request: ShardRequest, memory_budget: str | int) -> None:
    budget = parse_nbytes(memory_budget, "memory_budget")
    check_budget(request.model, request.planned, request.config, request.meshes, budget)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard expects an nn.Module, got {type(model)}")
    if find_state(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} (or a part of it) is sharded already; shard once, the "
            "outermost model"
        )


def _with_near(ranks: Ranks, config: ShardConfig) -> Ranks:
    regather = config.communication.regather
    if regather is not None and not config.placements.parameters:
        raise ValueError(
            f"regather: stage {config.stage} gathers parameters once a step; leave it out, or use "
            "stage=3"
        )
    return with_near(ranks, regather)


def _check_shared(
    ranks: Ranks, config: ShardConfig, groups: Any, tensor_ranks: ProcessGroup | None
) -> None:
    near = None if ranks.num_near == 1 else ranks.num_near
    others = {"groups=": groups, "offload=": config.offload, "regather": near}
    others["tensor parallelism"] = tensor_ranks
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"replicas_share='optimizer' with {name} is not built; leave one of them out"
            )
    check_levels(ranks, config.stage)


def _find_device(planned: list[UnitPlanned], device: torch.device | None) -> torch.device:
    found: dict[torch.device, str] = {}
    for unit in planned:
        for choice in (*unit.params, *unit.several):
            if not choice.tensor.is_meta:
                found.setdefault(choice.tensor.device, choice.fqns[0])
    if len(found) > 1:
        places = ", ".join(f"'{fqn}' on {where}" for where, fqn in found.items())
        raise ValueError(f"parameters are on different devices: {places}; move the model to one")
    if device is not None:
        chosen = torch.device(device)
        # Memory of "cuda" without an index would count as of another device than "cuda:0".
        if chosen.type not in ("cpu", "meta") and chosen.index is None:
            is_cuda = chosen.type == "cuda"
            index = torch.get_device_module(chosen).current_device()
            chosen = local_gpu() if is_cuda else torch.device(chosen.type, index)
        return chosen
    if found:
        return next(iter(found))
    return local_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _check_types(planned: list[UnitPlanned], config: ShardConfig) -> None:
    choices = [choice for unit in planned for choice in unit.params]
    if config.mixed_precision is not None:
        config.mixed_precision.check_names([choice.fqns[0] for choice in choices])
    for choice in choices:
        types_of(choice, config)


def types_of(choice: ParamChoice, config: ShardConfig) -> ParamTypes:
    """The dtypes of a parameter; raises ValueError if mixed precision cannot keep it in them."""
    param, mixed = choice.param, config.mixed_precision
    return choice.with_gather(
        param_types(mixed, choice.fqns[0], param.dtype, param.requires_grad), mixed
    )


def _facts(request: ShardRequest) -> list[object]:
    facts: list[object] = [request.config]
    facts += [
        f"groups['{part.pattern}'] of {part.ranks.world_size} ranks" for part in request.parts
    ]
    for unit in request.planned:
        facts.append(f"unit '{unit.name}'")
        for choice in (*unit.params, *unit.several):
            larger = larger_tensor(choice, unit.mesh, request.parts)
            facts.append(_fact(choice, larger[1] if larger and unit.mesh > 0 else None))
    return facts


def _fact(choice: ParamChoice, uneven: int | None = None) -> str:
    """``uneven``: a dimension whose size is another one on other ranks."""
    shape: list[object] = list(choice.tensor.shape)
    if uneven is not None and uneven < len(shape):
        shape[uneven] = "any"
    return (
        f"parameter '{' = '.join(choice.fqns)}' of shape {shape}, {choice.param.dtype}, "
        f"requires_grad={choice.param.requires_grad}"
    )


_log = logging.getLogger("zerocore")


def check_same_values(request: ShardRequest) -> None:
    """Says which parameters have other values on other ranks; collective. Raises ValueError if
    groups of ranks hold values of their own; names parameters and ranks."""
    own = {mesh: choices_on(request.planned, mesh) for mesh in range(len(request.meshes))}
    plain = [choice for choice in own[0] if choice.spec is None]
    own[0] = [choice for choice in own[0] if choice.spec is not None]
    for ranks, choices in (
        (request.all_ranks, plain),
        *zip(request.meshes, own.values(), strict=True),
    ):
        chosen = [choice for choice in choices if not choice.tensor.is_meta]
        if ranks.groups and chosen:
            _compare_values(ranks, chosen, request.device)


def _compare_values(ranks: Ranks, chosen: Sequence[ParamChoice], device: torch.device) -> None:
    with torch.no_grad():
        numbers = torch.stack([checksum(choice.tensor).to(device) for choice in chosen])
    if not (places := differing(ranks.groups, numbers)):
        return
    own = [int(numbers[place]) for place in places]
    tables = gather_objects(ranks.groups, [own], device)
    same = [choice for place, choice in enumerate(chosen) if place not in set(places)]
    if all(_is_constant(choice.tensor) for choice in same):
        return  # nothing was the same but by its rule: the ranks have drawn all numbers
    classes = {
        chosen[place].fqns[0]: ranks_by_value(enumerate(column))
        for place, column in zip(places, zip(*tables, strict=True), strict=True)
    }
    _refuse_parts(classes)
    # Where the others agree with each other, the first rank has loaded what they have not.
    ambiguous = [name for name, parts in classes.items() if parts[0] != [0] or len(parts) != 2]
    if len(tables) == 2:
        ambiguous = list(classes)
    if ambiguous and ranks.rank == 0:
        _log.warning(
            "the ranks have different values of %s, and the same of others, as '%s'. Rank 0's are "
            "taken. Parts of a model that each rank has by itself (experts, tensor parallelism) "
            "would be lost: name them in groups=. Otherwise set one seed on all ranks",
            _listed(ambiguous),
            next(choice.fqns[0] for choice in same if not _is_constant(choice.tensor)),
        )


def _refuse_parts(classes: dict[str, list[list[int]]]) -> None:
    parts = {
        name: ranks
        for name, ranks in classes.items()
        if len(ranks[0]) > 1 and len({len(each) for each in ranks}) == 1
    }
    if parts:
        first = next(iter(parts.values()))
        raise ValueError(
            f"group: ranks {', '.join(map(str, first[0]))} have other values of {_listed(parts)} "
            f"than ranks {', '.join(map(str, first[1]))}, and the same of other parameters: parts "
            "of a model that several ranks share (experts, tensor parallelism) cannot be sharded "
            "over all of them. Name them in groups=, with the ranks that hold the same values. If "
            "rank 0's are meant for all, set one seed on all ranks before the model is built"
        )


def _listed(names: Sequence[str] | dict[str, list[list[int]]]) -> str:
    shown = ", ".join(f"'{name}'" for name in list(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is_constant(param: torch.Tensor) -> bool:
    """Whether all elements are equal, as biases and norms are when they are made."""
    bits = bits_of(param)
    return bool((bits == bits[:1]).all())
