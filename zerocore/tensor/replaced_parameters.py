"""Parameters that ``shard`` has replaced: whoever kept one would compute with dead values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerocore.tensor.functions import ON_THE_SHARD, SHAPES, Args, Function, Kwargs, name_of
from zerocore.tensor.place import leaves

_FQN = "_zerocore_replaced"
# Copies of the values that the model began with are no mistake.
_ALLOWED = ON_THE_SHARD | SHAPES | {"clone", "cpu", "__repr__", "__deepcopy__", "__reduce_ex__"}


class ReplacedParameter(nn.Parameter):
    """A parameter from before ``shard``: it can be looked at and copied; functions of it raise."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ALLOWED:
                return func(*args, **(kwargs or {}))
            found = [v for v in leaves((args, kwargs)) if isinstance(v, ReplacedParameter)]
            raise RuntimeError(
                f"{name}() of parameter '{getattr(found[0], _FQN)}' as it was before "
                "zerocore.shard: the model trains another one now. Read it from its module each "
                "time (self.linear.weight), and keep lists of parameters only after shard"
            )


def replace(param: nn.Parameter, fqn: str) -> None:
    if type(param) is nn.Parameter:
        param.__class__ = ReplacedParameter
        setattr(param, _FQN, fqn)
