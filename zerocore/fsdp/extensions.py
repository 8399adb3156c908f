"""The extension of a parameter that gathers itself, of a model of ``fully_shard``."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from zerocore.fsdp.group import RowParam
from zerocore.sharding.extensions import Extension
from zerocore.tensor.wrapped import PRE


def extension_of(param: RowParam) -> Extension:
    """Makes the extension, and asks for its inputs. Raises AssertionError if a function's signature
    is not FSDP2's, NotImplementedError if the parameter is not cut in its first dimension, or is on
    the host."""
    group, shard = param.group, param.shard
    if param.rows.dim != 0 or group.offloads:
        where = f"is cut in dimension {param.rows.dim}"
        where = "is on the host" if group.offloads else where
        raise NotImplementedError(
            f"parameter '{param.fqn}' has {PRE} and {where}; shard it by rows on the device"
        )
    mesh, shape = _shard_mesh(group.mesh), param.rows.shape
    extension = Extension(param, shard._local_tensor, mesh, group.policy, shape)
    extension.ask()
    return extension


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is None:
        raise AssertionError("mesh_dim_names are required for HSDP with all-gather extensions")
    return mesh[names[-1]]
