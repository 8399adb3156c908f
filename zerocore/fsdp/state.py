"""A read-only state of a module for libraries that read FSDP2's state, by the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
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
        for group in root.units:
            if group.reshard_after_backward:
                engine.reshard(group.unit)

    @property
    def _root(self) -> Root | None:
        return self._group.root

    @property
    def _is_root(self) -> bool | None:
        return None if self._root is None else self._root.group is self._group

    def _groups_of_root(self) -> list[Group]:
        return [self._group] if self._root is None else self._root.groups

    @property
    def _state_ctx(self) -> Any:
        calls = [group for group in self._groups_of_root() if not group.is_sibling]
        return SimpleNamespace(all_states=[read_state(group) for group in calls])

    @property
    def _comm_ctx(self) -> Any:
        most = max(group.max_input_buffers for group in self._groups_of_root())
        return SimpleNamespace(reduce_scatter_max_input_buffers=most)

    @property
    def _fsdp_param_group(self) -> Any:
        return next(iter(_states_of([self._group])), None)

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        return _states_of([self._group, *self._group.siblings])


def _states_of(groups: list[Group]) -> list[Any]:
    from zerocore.fsdp.params_state import FSDPParams  # late: few libraries read it

    return [FSDPParams(group) for group in groups if group.params]


def read_state(group: Group) -> FSDPState:
    """Returns the group's state, always the same object."""
    if group.state is None:
        group.state = FSDPState(group)
    return group.state


def state_of(module: nn.Module) -> FSDPState | None:
    """Returns the state of a module that was passed to ``fully_shard``, else None."""
    group = group_of(module)
    return None if group is None else read_state(group)
