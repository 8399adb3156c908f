"""Gives meta parameters and buffers memory and initial values, module by module."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zerocore.model.units import ParamChoice
from zerocore.tensor.rows import local_part
from zerocore.tensor.wrapped import plain_part

_log = logging.getLogger("zerocore")

InitFn = Callable[[nn.Module], None]


def full_values(
    params: list[ParamChoice], device: torch.device, init: InitFn | None
) -> list[Tensor]:
    """Returns the full values of a unit's parameters; initialises meta parameters first."""
    modules: dict[nn.Module, None] = {}  # each once, in order
    for choice in params:
        if choice.param.is_meta:
            modules.update((owner, None) for owner, _ in choice.owners)
    for module in modules:
        _initialise(module, device, init, params)
    values = []
    for choice in params:
        owner, name = choice.owners[0]
        current = owner._parameters[name] if choice.param.is_meta else choice.param
        assert current is not None
        values.append(plain_part(local_part(current)).detach())
        for owner, key in choice.owners:  # to_empty() has put another object there
            owner._parameters[key] = choice.param
    return values


def materialize_buffers(model: nn.Module, device: torch.device, init: InitFn | None) -> None:
    """Initialises modules that have meta buffers but no meta parameters."""
    for name, module in model.named_modules():
        metas = [
            key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
        ]
        if metas:
            _initialise(module, device, init, [], f"{name}.{metas[0]}" if name else metas[0])


def _initialise(
    module: nn.Module,
    device: torch.device,
    init: InitFn | None,
    params: list[ParamChoice],
    what: str = "",
) -> None:
    function = init or getattr(type(module), "reset_parameters", None)
    if function is None:
        fqn = what or next(
            fqn
            for c in params
            for fqn, (owner, _) in zip(c.fqns, c.owners, strict=False)
            if owner is module
        )
        raise ValueError(
            f"'{fqn}' is on the meta device and {type(module).__name__} has no reset_parameters(); "
            "pass init_fn=, a function that initialises a module in place. For a model that "
            "initialises itself as a whole: init_fn=lambda module: None, and afterwards "
            "model.init_weights() inside `with zerocore.unsharded(model, write_back=True):`"
        )
    has_values = {k: b for k, b in module._buffers.items() if b is not None and not b.is_meta}
    module.to_empty(device=device, recurse=False)
    for key, buffer in has_values.items():  # to_empty() has dropped their values
        module._buffers[key] = buffer.to(device)
    empty = {k: (b, b._version) for k, b in module._buffers.items() if b is not None}
    with torch.no_grad():
        function(module)
    for key in empty.keys() - has_values.keys():
        buffer, version = empty[key]
        if module._buffers.get(key) is buffer and buffer._version == version:
            _log.warning(
                "buffer '%s' of a %s was on the meta device, and its initialisation has not "
                "written it: it has no values until the program writes it. Pass an init_fn= that "
                "also writes buffers",
                key,
                type(module).__name__,
            )
