"""Gives ``save_pretrained`` of transformers and peft the full values of sharded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.common.alarm import operation
from zerocore.common.patching import around
from zerocore.tensor.gathered_calls import line_of_program
from zerocore.tensor.held import held_full, param_of
from zerocore.tensor.placed import Placed


@around
def saves_full_values(
    save: Any,
    model: nn.Module,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``PreTrainedModel.save_pretrained`` with the full ``state_dict``; collective unless
    this rank has all values."""
    if state_dict is None:
        values = model.state_dict()
        if any(isinstance(value, Placed) for value in values.values()):
            state_dict = _in_full(values, is_main_process)
    return save(model, save_directory, is_main_process, state_dict, *args, **kwargs)


@around
def returns_full_values(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``get_peft_model_state_dict``: the result has full values; collective alike."""
    return _in_full(function(*args, **kwargs), True)


def _in_full(values: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Returns full values on the CPU in place of shards, without them if not ``keep``; names of one
    parameter share one tensor."""
    known: dict[int, Tensor] = {}
    result: dict[str, Any] = {}
    with operation("save_pretrained", line_of_program()):
        for key, value in values.items():
            if not isinstance(value, Placed):
                result[key] = value
                continue
            param = param_of(value)
            owner = id(value if param is None else param)
            if owner not in known:
                full = _full_of(value)
                known[owner] = full.to("cpu", copy=True) if keep else full.new_empty(0)
            if keep:
                result[key] = known[owner]
    return result


def _full_of(shard: Placed) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        held = held_full(shard)
    return shard.whole_tensor() if held is None else held
