"""Calls of fully sharded modules: the first one of a root makes the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from zerocore.fsdp.group import Group, Tree
from zerocore.fsdp.root import Root
from zerocore.model.state import ShardState


def root_of(group: Group, is_provisional: bool = False) -> Tree:
    """The root that the group belongs to; itself, if no other was called before.

    ``is_provisional``: another one may be called later.

    Raises:
        RuntimeError: a module below has been called as a root before, or it is one of several that
            are gathered together.
    """
    if group.root is None:
        _make_root(group)
    root = group.root
    assert root is not None
    if not is_provisional:
        root.settle()
    return root


@_disable_dynamo  # torch.compile(root) would trace it
def _make_root(group: Group) -> None:
    Root(group)


def ready_state(group: Group) -> ShardState:
    """The state of the group's root, made if need be; another root may be called later."""
    return root_of(group, is_provisional=True).ready()


def call(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` with the group's parameters unsharded."""
    root = root_of(group)
    if root.group is group or root.state is None:
        root.ready()
        for extension in root.extensions:
            extension.encode()
    unit_call = group.unit_call
    assert unit_call is not None
    device = unit_call.state.device
    if unit_call.is_root and device.type != "cpu":
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
        )
    output = unit_call.call(function, *args, **kwargs)
    if unit_call.is_root and unit_call.state.config.offload is not None:
        unit_call.engine.synchronize()  # loads from the host end before anyone changes parameters
    return output
