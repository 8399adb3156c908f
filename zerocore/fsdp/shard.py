"""``fully_shard``: FSDP2's function, on this engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed._composable_state import _insert_module_state as insert_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import Shard

from zerocore.fsdp.group import Group, PlacementOf, group_of, set_group
from zerocore.fsdp.mesh import DataMesh, data_mesh, data_mesh_of
from zerocore.fsdp.module import fsdp_class, show_shards
from zerocore.fsdp.root import ready_state
from zerocore.fsdp.state import read_state, state_of
from zerocore.install import hook_into_torch
from zerocore.model.state import set_maker
from zerocore.tensor.rows import held_shard, note_late

_OF_TORCH: Any = fully_shard_of_torch.__wrapped__  # type: ignore[attr-defined]


_Modules = TypeVar("_Modules")  # a module, or a list of modules


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # as torch has it
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> _Modules:
    """Shards by rows the parameters of ``module``, except those that an earlier call has sharded.

    Call it bottom-up: for the blocks, then for the module around them. Parameters become DTensors
    with the rows that ``torch.chunk`` gives the rank; ``module`` gets the class ``FSDP<its name>``.
    Ranks communicate nothing before the first forward.

    Args:
        module: a module, or a list of modules whose parameters are gathered together.
        mesh: 1-D, or 2-D of replicas by shards; all ranks by default.
        reshard_after_forward: whether to reshard parameters after the forward; by default True,
            except for the root. With a number k, each of k consecutive ranks keeps a k-th of the
            parameters; all gathers come from these ranks until the parameters change. 1 means
            False.
        shard_placement_fn: returns ``Shard(dim)`` for a parameter, None for the first dimension,
            or a ``ShardPlacementResult`` with a mesh of its own. A dimension other than the first
            must divide evenly.
        mp_policy: dtypes of parameters in layers, of gradients on the wire, of inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters and gradients on the host, where
            any optimizer updates them; the same for all modules of a model. On the CPU it changes
            nothing.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: a ``DataParallelMeshDims`` that names the data-parallel dimensions of a
            ``mesh`` of all parallelisms. Parameters are DTensors on it, or plain tensors that
            spmd_types has annotated.

    Returns:
        ``module`` itself.

    Raises:
        ValueError, TypeError, AssertionError, NotImplementedError: an invalid argument or
            parameter, by name; the types are torch's.
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    data = data_mesh(mesh, dp_mesh_dims)
    _check_modules(modules)
    hook_into_torch()
    ignored = set() if ignored_params is None else ignored_params
    reshards = _reshards(reshard_after_forward, data.num_shards)
    group = Group(modules, data, mp_policy, *reshards)
    group.offloads = isinstance(offload_policy, CPUOffloadPolicy) and data.mesh.device_type != "cpu"
    group.shard_params(ignored, _placement_of(shard_placement_fn, data))
    group.move_buffers()
    for part in (group, *group.siblings):
        note_late(part, ready_state)
    for target in modules:
        set_group(target, group)
        insert_state(target, read_state(group))  # functions of torch's FSDP2 read it
        # torch's own fully_shard.state reads it.
        target.__dict__.setdefault(STATE_KEY, {})[_OF_TORCH] = read_state(group)
        set_maker(target, partial(ready_state, group))
        target._is_fsdp_managed_module = True  # torch.compile reads both
        target._fsdp_use_orig_params = True
        cls: Any = type(target)
        target.__class__ = fsdp_class(cls)
        target.register_state_dict_pre_hook(show_shards)
        target.register_load_state_dict_pre_hook(show_shards)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # as in torch


def _check_modules(modules: list[Any]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard expects an nn.Module, got {type(module)}")
        if (
            isinstance(module, nn.ModuleList | nn.ModuleDict)
            and type(module).forward is nn.Module.forward
        ):
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {module}"
            )
        if group_of(module) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard was called for this {type(module).__name__} before"
            )
        if any(held_shard(param) is not None for param in module.parameters()):
            raise TypeError(
                f"fully_shard on a {type(module).__name__} that zerocore.shard has sharded; "
                "use one of the two"
            )


def _placement_of(
    placement_fn: Callable[[nn.Parameter], Any] | None, data: DataMesh
) -> PlacementOf:
    meshes: dict[int, DataMesh] = {}  # by id of the mesh info

    def placement_of(param: nn.Parameter) -> tuple[Shard | None, DataMesh]:
        placement = None if placement_fn is None else placement_fn(param)
        if placement is None or isinstance(placement, Shard):
            return placement, data
        info = getattr(placement, "mesh_info", None)
        if info is None:
            raise ValueError(
                f"Invalid shard_placement_fn result: {placement!r} for a parameter of shape "
                f"{list(param.shape)}; expected Shard(dim), a ShardPlacementResult or None"
            )
        return placement.placement, meshes.setdefault(id(info), data_mesh_of(info))

    return placement_of


def _reshards(reshard: bool | int | None, num_shards: int) -> tuple[bool | None, int]:
    if reshard is None or isinstance(reshard, bool):
        return reshard, 1
    if not isinstance(reshard, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard}"
        )
    if reshard < 1 or reshard > num_shards or num_shards % reshard != 0:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{num_shards}, not {reshard}"
        )
    return reshard > 1, reshard
