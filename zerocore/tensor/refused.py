"""Rejects functions that have no meaning on a shard."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NoReturn

from torch.optim import Optimizer

from zerocore.tensor.placed import Placed

_REASONS = {
    "data_ptr": ", and a shard without elements has no address. If a trainer finds an optimizer's "
    "parameters by address, use zerocore.integrations",
    "storage": ", and safetensors.torch finds tied tensors by storage. zerocore.load_safetensors "
    "and zerocore.save_safetensors read and write the same files",
}


def stepping() -> str | None:
    """Returns the class of the optimizer whose ``step`` or constructor is running, if one is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("step", "__init__"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, Optimizer):
                return type(owner).__name__
        frame = frame.f_back
    return None


def refuse(name: str, shard: Placed) -> NoReturn:
    """Raises TypeError for a function that has no meaning on a shard."""
    kind = stepping()
    owned = (
        f" If {kind} calls it and updates each parameter by itself, build it as zerocore.matrices."
        f"owned({kind}, params, ...)."
    )
    raise TypeError(
        f"{name}() of {shard.what} '{shard.fqn}' would only see this rank's elements "
        f"({shard.place.text}){_REASONS.get(name, '')}.{owned if kind else ''} Call .full_tensor() "
        "on all ranks for the full value, or .local() for this rank's elements. To change the full "
        "value, use `with zerocore.unsharded(model, write_back=True)`. To save it, use "
        "zerocore.full_state_dict(model)"
    )
