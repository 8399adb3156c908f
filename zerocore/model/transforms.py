"""Runs the engine outside transforms of ``torch.func``.

``jvp`` changes neither parameters nor the graph of a backward. Other transforms compute with
tensors that autograd does not see. Inside of a module's forward, that module's call adopts the
units; elsewhere the engine rejects these transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map_only

from zerocore._C import Engine

_functorch: Any = torch._C._functorch


def is_forward_mode() -> bool:
    """Whether all transforms are ``jvp``."""
    stack = _functorch.get_interpreter_stack()
    return all(level.key() == _functorch.TransformType.Jvp for level in stack)


def adopt(engine: Engine, units: Iterable[int]) -> None:
    """Unshards units until the innermost running call ends. Its graph has their backward."""
    with temporarily_clear_interpreter_stack():
        for unit in units:
            engine.adopt(unit)


def outside(engine: Engine) -> Engine:
    """Returns an engine whose methods run outside ``jvp`` and get the values of wrapped tensors."""
    return cast(Engine, _Outside(engine))


class _Outside:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._engine, name)

        def run(*args: Any) -> Any:
            with temporarily_clear_interpreter_stack():
                return method(*tree_map_only(Tensor, _value_of, args))

        return run


def _value_of(tensor: Tensor) -> Tensor:
    while _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
