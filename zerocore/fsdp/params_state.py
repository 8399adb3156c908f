"""A read-only state of a group's parameters, with the names of torch's ``FSDPParamGroup``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from zerocore.fsdp.group import Group


class FSDPParams:
    """The parameters of one group, with the names of torch's FSDPParamGroup."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def post_backward(self) -> None:
        """Does nothing: the root's callback reduces the gradients of all groups."""

    @property
    def _module_fqn(self) -> str | None:
        return None if self._group.root is None else self._group.path

    @property
    def fsdp_params(self) -> list[Any]:
        """The parameters, each with its name and its shard."""
        return [
            SimpleNamespace(_param_fqn=param.fqn, sharded_param=param.shard)
            for param in self._group.params
        ]

    @property
    def _reshard_after_forward(self) -> bool:
        """False if a parameter gathers itself: it is encoded once for forward and backward, so
        TransformerEngine's must return both row-wise and column-wise data."""
        has_extensions = any(param.extension is not None for param in self._group.params)
        return not has_extensions and not self._group.stays

    @property
    def _training_state(self) -> TrainingState:
        """The state at the time when parameters are encoded: before a forward."""
        return TrainingState.FORWARD

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """The number that ``set_reduce_scatter_max_input_buffers`` has set."""
        return self._group.max_input_buffers

    @property
    def is_unsharded(self) -> bool:
        """Whether modules have full parameters."""
        return self._group.is_unsharded

    @property
    def mesh_info(self) -> Any:
        """The mesh, and the group of ranks that parameters are sharded over."""
        mesh = self._group.mesh
        return SimpleNamespace(
            mesh=mesh,
            shard_process_group=mesh.get_group(mesh.ndim - 1),
            shard_mesh_size=self._group.data.num_shards,
        )
