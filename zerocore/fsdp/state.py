"""A read-only state of a module for libraries that read FSDP2's state, by the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState

from zerocore.fsdp.group import Group, Root, group_of
from zerocore.fsdp.root import ready, root_of

_TorchState: Any = TorchFSDPState


class FSDPState(_TorchState):
    """The state of one ``fully_shard`` call's modules, with the names of torch's class."""

    def __init__(self, group: Group) -> None:  # without torch's: properties replace its attributes
        self._group = group
        self._modules_to_run_forward: set[nn.Module] = set()  # always empty: unit calls replace it

    def _lazy_init(self) -> None:
        root_of(self._group)

    def _root_post_backward_final_callback(self) -> None:
        """Ends the backwards of a pipeline stage, which have deferred their reductions."""
        root = root_of(self._group)
        engine = ready(root).engine
        engine.finalize_backward()
        for _, group in root.groups:
            if group.params and group.reshard_after_backward:
                engine.reshard(group.unit)

    @property
    def _root(self) -> Root | None:
        return self._group.root

    @property
    def _is_root(self) -> bool | None:
        return None if self._root is None else self._root.group is self._group

    def _groups_of_root(self) -> list[Group]:
        return [self._group] if self._root is None else [group for _, group in self._root.groups]

    @property
    def _state_ctx(self) -> Any:
        calls = [group for group in self._groups_of_root() if group_of(group.modules[0]) is group]
        return SimpleNamespace(all_states=[read_state(group) for group in calls])

    @property
    def _comm_ctx(self) -> Any:
        most = max(group.max_input_buffers for group in self._groups_of_root())
        return SimpleNamespace(reduce_scatter_max_input_buffers=most)

    @property
    def _fsdp_param_group(self) -> FSDPParams | None:
        return FSDPParams(self._group) if self._group.params else None

    @property
    def _fsdp_param_groups(self) -> list[FSDPParams]:
        groups = (self._group, *self._group.siblings)
        return [FSDPParams(group) for group in groups if group.params]


class FSDPParams:
    """The parameters of one group, with the names of torch's FSDPParamGroup."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def post_backward(self) -> None:
        """Does nothing: the root's callback reduces the gradients of all groups."""

    @property
    def _module_fqn(self) -> str | None:
        groups = [] if self._group.root is None else self._group.root.groups
        return next((name for name, group in groups if group is self._group), None)

    @property
    def fsdp_params(self) -> list[Any]:
        """The parameters, each with its name and its shard."""
        prefix = f"{self._module_fqn}." if self._module_fqn else ""
        return [
            SimpleNamespace(_param_fqn=f"{prefix}{param.fqn}", sharded_param=param.shard)
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


def read_state(group: Group) -> FSDPState:
    """Returns the group's state, always the same object."""
    if group.state is None:
        group.state = FSDPState(group)
    return group.state


def state_of(module: nn.Module) -> FSDPState | None:
    """Returns the state of a module that was passed to ``fully_shard``, else None."""
    group = group_of(module)
    return None if group is None else read_state(group)
