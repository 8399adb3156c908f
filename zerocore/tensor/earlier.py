"""Parameters from before ``fully_shard``, which DTensors have replaced in modules.

A parameter cannot become a DTensor in place, as it becomes a shard in ``shard``: the classes have
different memory layouts. So the earlier object forwards to the DTensor, and optimizers get the
DTensor instead of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zerocore.tensor.functions import Args, Function, Kwargs

_ROWS = "_zerocore_fsdp_replaced_by"  # on an earlier parameter: its name, and the DTensor


class EarlierParameter(nn.Parameter):
    """A parameter from before ``fully_shard``: it forwards all uses to the DTensor."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        args, kwargs = tree_map_only(EarlierParameter, current, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(current(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(current(self), name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(current(self), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return current(self).__reduce_ex__(proto)


def current(param: Any) -> Any:
    """Returns the DTensor that has replaced ``param``; any other parameter itself."""
    return getattr(param, "__dict__", {}).get(_ROWS, ("", param))[1]


def stands_for(param: nn.Parameter, fqn: str, rows: nn.Parameter) -> None:
    """Makes ``param`` forward to ``rows``, the DTensor that has replaced it."""
    vars(param)[_ROWS] = fqn, rows
    if type(param) is nn.Parameter:
        param.__class__ = EarlierParameter


def give_rows(optimizer: Optimizer) -> None:
    """Replaces earlier parameters in an optimizer's groups by DTensors; raises ValueError if it has
    states of one."""
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            fqn, rows = vars(param).get(_ROWS, ("", None))
            if rows is None:
                continue
            if optimizer.state.get(param):
                raise ValueError(
                    "the optimizer has stepped before fully_shard: its states of parameter "
                    f"'{fqn}' are full tensors. Build it from model.parameters() after "
                    "fully_shard, and load its states with torch.distributed.checkpoint"
                )
            group["params"][number] = rows


def live_optimizers() -> Iterator[Optimizer]:
    """Yields all optimizers of this process."""
    for obj in gc.get_objects():
        if issubclass(type(obj), Optimizer) and {"param_groups", "state"} <= vars(obj).keys():
            yield obj


def give_rows_to_all() -> None:
    """Applies :func:`give_rows` to all optimizers; one with states raises in its next step."""
    for optimizer in live_optimizers():
        try:
            give_rows(optimizer)
        except ValueError:
            continue
