"""Sees the collectives that Python code issues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Elements of each collective issued inside of the context, in order: ``numels``."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            self.numels.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def count_collectives(function: Callable[[], Any]) -> list[int]:
    """Calls `function` and returns the numbers of elements of its collectives."""
    with Collectives() as seen:
        function()
    return seen.numels
