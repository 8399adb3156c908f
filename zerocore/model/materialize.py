"""The full values of a unit's parameters; initialises meta parameters and buffers first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zerocore.model.units import Param
from zerocore.tensor.rows import local_part
from zerocore.tensor.wrapped import plain_part

InitFn = Callable[[nn.Module], None]


def full_values(params: list[Param], device: torch.device, init: InitFn | None) -> list[Tensor]:
    """Returns the full values of a unit's parameters; initialises meta parameters first."""
    modules: dict[nn.Module, None] = {}  # each once, in order
    for param in params:
        if param.object.is_meta:
            modules.update((owner, None) for owner, _ in param.owners)
    if modules:
        from zerocore.model.initialise import initialise  # late: few models are on meta

        for module in modules:
            initialise(module, device, init, params)
    values = []
    for param in params:
        owner, name = param.owners[0]
        current = owner._parameters[name] if param.object.is_meta else param.object
        assert current is not None
        values.append(plain_part(local_part(current)).detach())
        for owner, key in param.owners:  # to_empty() has put another object there
            owner._parameters[key] = param.object
    return values


def materialize_buffers(model: nn.Module, device: torch.device, init: InitFn | None) -> None:
    """Initialises modules that have meta buffers but no meta parameters."""
    for name, module in model.named_modules():
        metas = [
            key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
        ]
        if metas:
            from zerocore.model.initialise import initialise

            initialise(module, device, init, [], f"{name}.{metas[0]}" if name else metas[0])
