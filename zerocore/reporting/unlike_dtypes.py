"""Names the parameter to keep in float32 if mixed precision gave a module two dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerocore.model.units import Unit


def explain_types(error: BaseException, units: Iterable[Unit]) -> RuntimeError | None:
    """Returns the error to raise for one about unlike dtypes in the forward of ``units``; None if
    mixed precision has not made them."""
    text = str(error)
    is_of_types = type(error) is RuntimeError and re.search("scalar type|dtype", text) is not None
    if not is_of_types or "keep_fp32" in text:
        return None
    for unit in units:
        for param in unit.params:
            for owner, _ in param.owners:
                dtype = param.full.dtype
                buffers = {b.dtype for b in owner.buffers(recurse=False) if b.is_floating_point()}
                if dtype != param.types.main and buffers - {dtype}:
                    name = param.fqn.rpartition(".")[0] or param.fqn
                    return RuntimeError(
                        f"{text}. Mixed precision made parameter '{param.fqn}' {dtype}, and a "
                        f"buffer of its {type(owner).__name__} is {(buffers - {dtype}).pop()}: "
                        f"pass MixedPrecision(keep_fp32=('{name}',))"
                    )
    return None
