"""Linear layers whose backward writes the weight's gradient where it is reduced from."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zerocore._C import Engine

_FUSED = "_zerocore_linear"


def fuse_linear(module: nn.Module, engine: Engine, unit: int, param: int, full: Tensor) -> None:
    """Makes a plain ``nn.Linear`` compute with the engine while its weight is ``full``."""
    if type(module) is nn.Linear:
        module.__dict__[_FUSED] = (engine, unit, param, full)
        module.__class__ = _fused_class()


@cache
def _fused_class() -> Any:
    class Linear(nn.Linear):
        __module__, __qualname__ = nn.Linear.__module__, nn.Linear.__qualname__
        __doc__ = nn.Linear.__doc__

        def forward(self, input: Tensor) -> Tensor:
            weight = self.weight
            if not torch.compiler.is_compiling():
                engine, unit, param, full = self.__dict__[_FUSED]
                if weight is full:
                    return engine.linear(unit, param, input, self.bias)
            return nn.functional.linear(input, weight, self.bias)

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return nn.Linear(*args, **kwargs)  # type(module)(...)

        def __reduce_ex__(self, protocol: Any) -> Any:
            state = {name: value for name, value in self.__dict__.items() if name != _FUSED}
            return nn.Linear.__new__, (nn.Linear,), state  # a plain one

    return Linear
