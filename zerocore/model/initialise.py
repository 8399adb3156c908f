"""Gives the meta parameters and buffers of one module memory and initial values."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from zerocore.model.units import Param

_log = logging.getLogger("zerocore")


def initialise(
    module: nn.Module,
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
    params: list[Param],
    what: str = "",
) -> None:
    """Initialises a module by ``init`` or its ``reset_parameters``; an error names the first of its
    ``params``, or ``what``."""
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
