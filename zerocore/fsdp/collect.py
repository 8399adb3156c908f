"""Collects and checks the units of a tree of fully sharded modules, for the builder."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerocore.fsdp.group import Group, Root
from zerocore.fsdp.policy import wire_dtype_of
from zerocore.model.memory import check_apart
from zerocore.model.ranks import Ranks, ranks_of
from zerocore.model.refusals import check_trained
from zerocore.model.units import Unit
from zerocore.options.config import Communication, ShardConfig
from zerocore.options.offload import Offload
from zerocore.sharding.builder import Kind, Sharding
from zerocore.tensor.wrapped import gathers_itself


def collect_rows(root: Root, kind: Kind, all_ranks: Ranks, device: torch.device) -> Sharding:
    """Returns all groups with parameters as units. Raises ValueError, RuntimeError or
    NotImplementedError if the model cannot be trained so. ``all_ranks``: the root mesh's."""
    meshes = list(dict.fromkeys([root.group.mesh, *(group.mesh for group in root.groups)]))
    ranks = [all_ranks, *(ranks_of(mesh, "mesh") for mesh in meshes[1:])]
    _check(root, set(ranks[0].members))
    ranks = [_with_near(root, mesh, sharing) for mesh, sharing in zip(meshes, ranks, strict=True)]
    units = [
        Unit(
            _name_of(root, group),
            group.modules,
            list(group.params),
            mesh=meshes.index(group.mesh),
            stays=group.stays,
            near=group.num_near > 1,
            extensions=[param.extension for param in group.params if param.extension],
        )
        for group in root.units
    ]
    return Sharding(
        model=root.module,
        called=root.group.modules,
        kind=kind,
        config=_config_of(root),
        units=units,
        ranks=ranks[0],
        meshes=tuple(ranks),
        device=device,
    )


def _name_of(root: Root, group: Group) -> str:
    name = group.path or type(root.module).__name__
    return f"{name} over {group.mesh.mesh_dim_names}" if group.is_sibling else name


def _config_of(root: Root) -> ShardConfig:
    groups = root.units
    leaves = any(group.offloads for group in groups)
    return ShardConfig(
        communication=Communication(
            accumulate="full",
            retain_last=not root.group.reshard_after_forward,
            overlap_reductions=all(group.overlaps_reductions for group in root.groups),
        ),
        offload=Offload(gradients="cpu", parameters="cpu") if leaves else None,
        has_wire_dtype=any(wire_dtype_of(group.policy) is not None for group in groups),
    )


def _with_near(root: Root, mesh: DeviceMesh, ranks: Ranks) -> Ranks:
    numbers = sorted({group.num_near for group in root.groups if group.mesh == mesh} - {1})
    if len(numbers) > 1:
        raise NotImplementedError(
            f"reshard_after_forward={numbers[0]} and {numbers[1]}: zerocore.fsdp takes one "
            "number of ranks per mesh"
        )
    if not numbers:
        return ranks
    from zerocore.sharding.rank_options import with_near  # late: few gather from some ranks

    return with_near(ranks, numbers[0])


def _check(root: Root, members: set[int]) -> None:
    _check_ties(root)
    if len({group.offloads for group in root.units}) > 1:
        raise NotImplementedError(
            "offload_policy: some modules of this model have a CPUOffloadPolicy and others do "
            "not; zerocore.fsdp takes one policy per model"
        )
    if len({wire_dtype_of(group.policy) is None for group in root.units}) > 1:
        raise NotImplementedError(
            "mp_policy: some modules of this model have a wire_dtype and others do not; "
            "zerocore.fsdp sums all gradients of a model in one way"
        )
    for group in root.groups:
        if not set(group.mesh.mesh.flatten().tolist()) <= members:
            raise ValueError(
                f"module '{group.path}' is sharded over {group.mesh}, the root over "
                f"{root.group.mesh}; use a mesh of the root's ranks for the module"
            )
        for param in group.params:
            param.take_registered()
            check_trained(param.fqn, param.shard)
            if param.shard.requires_grad and param.shard.is_complex():
                raise ValueError(
                    f"parameter '{param.fqn}' is complex and requires grad: torch's optimizers "
                    "compute wrong values for complex DTensors. Use zerocore.shard"
                )
        _check_device(group)
        _prepare(group)


def _check_ties(root: Root) -> None:
    names: dict[object, str] = {}
    for param in root.params():
        ties: list[object] = [param.origin]
        if param.extent is not None:
            ties.append((param.extent.key, param.shard.requires_grad))
        for tie in ties:
            if tie in names:
                raise ValueError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed by "
                    f"another FSDP group ('{names[tie]}'). For shared/tied parameters, use "
                    "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                )
        names.update(dict.fromkeys(ties, param.fqn))
    check_apart([(param.fqn, param.extent) for param in root.params()], [root.module])


def _check_device(group: Group) -> None:
    on_meta = [param.fqn for param in group.params if param.shard.is_meta]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {on_meta}\nFor example, call "
            "module.to_empty(device) to materialize to device and call "
            "module.reset_parameters() on each module to initialize values."
        )
    elsewhere = [
        (param.fqn, param.shard.device)
        for param in group.params
        if group.offloads and param.shard.device.type != "cpu"
    ]
    if elsewhere:
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
            'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
            f"Found following parameters on non-CPU device: {elsewhere}"
        )


def _prepare(group: Group) -> None:
    """Sets parameters' dtypes, and the extensions of those that gather themselves; may raise
    AssertionError, ValueError or NotImplementedError."""
    for param in group.params:
        param.extension = None
        if gathers_itself(param.fqn, param.shard._local_tensor):
            from zerocore.fsdp.extensions import extension_of  # late: most models have none

            param.extension = extension_of(param)
        param.types = param.find_types()
