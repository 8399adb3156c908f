"""Parameters from before ``fully_shard``: DTensors have taken their places in modules.

Memory of a DTensor has other parts than that of a parameter, so it cannot be the same object, as a
parameter of ``shard`` is. Functions of the earlier object are those of the DTensor, and optimizers
get that in its place.
"""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zerocore.tensor.functions import Args, Function, Kwargs

_ROWS = "_zerocore_fsdp_replaced_by"  # of an earlier parameter: its name, and the DTensor


class EarlierParameter(nn.Parameter):
    """Stands for the DTensor, in lists and dicts of parameters."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        args, kwargs = tree_map_only(EarlierParameter, _rows_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(_rows_of(self), name)  # of a DTensor: placements, full_tensor()


def _rows_of(param: Tensor) -> Any:
    return vars(param)[_ROWS][1]


def stands_for(param: nn.Parameter, fqn: str, rows: nn.Parameter) -> None:
    """``rows``, a DTensor, has taken the place of ``param``."""
    vars(param)[_ROWS] = fqn, rows
    if type(param) is nn.Parameter:
        param.__class__ = EarlierParameter


def give_rows(optimizer: Optimizer) -> None:
    """Puts DTensors into the groups of an optimizer in place of earlier parameters; ValueError if
    it has states of one."""
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            fqn, rows = vars(param).get(_ROWS, ("", None))
            if rows is None:
                continue
            if optimizer.state.get(param):
                raise ValueError(
                    f"the optimizer has stepped before fully_shard: it has states of parameter "
                    f"'{fqn}' in full. Build it after fully_shard, from model.parameters(), and "
                    "load its states with torch.distributed.checkpoint"
                )
            group["params"][number] = rows


def give_rows_to_all() -> None:
    """The same of all optimizers; one that has states says so in its next step."""
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and hasattr(each, "state"):
            try:
                give_rows(each)
            except ValueError:
                continue
