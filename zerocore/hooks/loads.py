"""Lets ``load_state_dict`` of a sharded model take its own shards, or full values."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerocore.common.agreement import together
from zerocore.common.alarm import operation
from zerocore.model.state import ShardState
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.place import Placed


def watch_loads(model: nn.Module, state: ShardState) -> None:
    """From now on what is loaded into sharded parameters is checked.

    All ranks must load, and refuse what does not fit on one of them together.
    """

    @operation("load_state_dict")
    def check(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        with together(state.ranks.groups, state.device):
            for param in state.params():
                for fqn in param.fqns:
                    _check_place(prefix + fqn, state_dict.get(prefix + fqn), param.shard)
        state.begin_load()

    model.register_load_state_dict_pre_hook(check)
    for module in {owner for param in state.params() for owner, _ in param.owners}:
        module.register_load_state_dict_pre_hook(_check)


def _check(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Refuses shards of another place, even of the same size; full values are copied in part."""
    for name, param in module._parameters.items():
        if isinstance(param, ShardedParameter):
            _check_place(prefix + name, state_dict.get(prefix + name), param)


def _check_place(key: str, value: Any, param: ShardedParameter) -> None:
    if not isinstance(value, Placed):
        return
    saved, own = value.place, param.place
    if saved.elements != own.elements:
        raise ValueError(
            f"parameter '{key}': the state dict holds elements {saved.text}, this rank {own.text}. "
            "Shards load on the rank, stage and number of ranks that saved them; for others use "
            "torch.distributed.checkpoint or zerocore.Checkpoints, or zerocore.full_state_dict"
        )
