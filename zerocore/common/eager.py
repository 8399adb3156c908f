"""Makes functions run eagerly: torch.compile neither records nor compiles them.

Torch's own decorator also handles exports and stances, and takes some 20 us a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import set_eval_frame

P = ParamSpec("P")
T = TypeVar("T")

_unmarked: list[Callable[..., Any]] = []  # functions that torch.compile does not know yet


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Makes ``function`` and all its calls run outside graphs."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        compiler = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    _unmarked.append(run)
    if "torch._dynamo" in sys.modules:
        mark_eager()
    return run


def mark_eager() -> None:
    """Tells torch.compile about the functions, before a sharded model can be compiled."""
    while _unmarked:
        leave_out_of_graphs(_unmarked.pop())


def leave_out_of_graphs(function: Any) -> None:
    """Tells torch.compile to compile the functions that ``function`` calls, but not ``function``.

    Dynamo cannot trace into the engine, and would retry for every module and kind of input.
    """
    from torch._dynamo.decorators import skip  # late: takes a second

    skip(function)
    function._torchdynamo_disable_msg = (
        "zerocore gathers a unit here. For fullgraph=True compile the units, block.compile(), "
        "not the modules around them"
    )
