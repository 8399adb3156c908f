"""The wrapper of a call of a fully sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from zerocore._C import Engine
from zerocore.fsdp.group import Group, Tree
from zerocore.fsdp.mesh import device_of
from zerocore.fsdp.root import Root
from zerocore.model.casting import cast_floats


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


def call(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` with the group's parameters unsharded."""
    root = root_of(group)
    is_root = root.group is group
    engine = root.ready() if is_root or root.engine is None else root.engine
    if is_root and device_of(group.mesh).type != "cpu":
        args, kwargs = _moved((args, kwargs), device_of(group.mesh))
    begun = entered = False
    try:
        if is_root:
            engine.begin_pass()
            begun = True
        if group.unit >= 0:
            engine.enter(group.unit)
            entered = True
            if group.viewed:
                group.show_views(engine)
        output = _run(group, function, args, kwargs)
    except BaseException:
        _fail(engine, group.unit if entered else -1, begun)
        raise
    if entered:
        engine.exit(group.unit, output)
    if begun:
        engine.end_pass(output)
    return output


def _run(group: Group, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    policy = group.policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args = cast_floats(args, policy.param_dtype)
        kwargs = cast_floats(kwargs, policy.param_dtype)
    output = function(*args, **kwargs)
    return output if policy.output_dtype is None else cast_floats(output, policy.output_dtype)


def _fail(engine: Engine, unit: int, begun: bool) -> None:
    if unit >= 0:
        engine.exit(unit, None)
    if begun:
        engine.fail_pass()


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
