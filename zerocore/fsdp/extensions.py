"""Parameters of a group that gather themselves: their shards stay tensors of a class of their own.

The engine reduces their gradients like others.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zerocore.fsdp.group import Group, RowParam
from zerocore.model.extensions import Extension
from zerocore.tensor.wrapped import PRE, gathers_itself


def note_extensions(group: Group) -> None:
    """Notes which of the group's parameters are some, and asks them what is gathered.

    Raises:
        AssertionError: one lacks a function, or does not do as FSDP2's interface says.
        NotImplementedError: one that is cut in another dimension than the first, or on the host.
    """
    for param in group.params:
        shard: Any = param.shard
        param.extension = None
        if gathers_itself(param.fqn, shard._local_tensor):
            _check_place(param, group)
            param.extension = _extension(param, group)
            param.extension.ask()


def extensions_of(group: Group) -> list[Extension]:
    """Of the group's parameters, in their order."""
    return [param.extension for param in group.params if param.extension is not None]


def _extension(param: RowParam, group: Group) -> Extension:
    shard: Any = param.shard
    mesh, module = _shard_mesh(group.mesh), param.owners[0][0]
    return Extension(param.fqn, shard._local_tensor, module, mesh, group.policy, param.rows.shape)


def _check_place(param: RowParam, group: Group) -> None:
    if param.rows.dim != 0 or group.offloads:
        where = "lies on the host" if group.offloads else f"is cut in dimension {param.rows.dim}"
        raise NotImplementedError(
            f"parameter '{param.fqn}' has {PRE} and {where}; shard it by rows on the device"
        )


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is None:
        raise AssertionError("mesh_dim_names are required for HSDP with all-gather extensions")
    return mesh[names[-1]]
