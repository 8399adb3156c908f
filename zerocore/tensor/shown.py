"""Parameters while programs see them in full: gradients, and what waits for them, are those of the
shard, the sum over the ranks. Copies and pickles are plain parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext

from zerocore._C import exchange_impls
from zerocore.tensor.earlier import current
from zerocore.tensor.parameter import attributes_of, slots_of, with_slots
from zerocore.tensor.rows import seen_shard, shard_of

_grad: Any = torch._C.TensorBase.grad


class ShownParameter(nn.Parameter):
    """A full parameter; :func:`shown_class` adds the class that the user's object had.

    Torch functions of it cost nothing more: it has torch's disabled ``__torch_function__``.
    """

    @property
    def grad(self) -> Any:
        """As of the shard. Within a backward this rank's own is not there yet."""
        shard = seen_shard(self)
        if shard is None or TracingContext.try_get() is not None:  # which records no gradients
            return _grad.__get__(self)
        return shard.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        shard = seen_shard(self)
        if shard is None:
            _grad.__set__(self, value)
        elif value is not None and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f".grad of parameter '{getattr(shard, 'fqn', '')}' is set within a backward, at "
                "whose end the gradients of all ranks are added to it. Change this rank's own "
                "gradient in p.register_hook(...), or set .grad after the backward"
            )
        else:
            shard.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return nn.Parameter.register_post_accumulate_grad_hook(shard_or_self(self), hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.data.clone(), self.requires_grad)

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        vars(plain).update(attributes_of(self))
        return plain.__reduce_ex__(proto)


def shard_or_self(tensor: Tensor) -> Any:
    """The shard of a parameter that programs see in full, or for which ``tensor`` stands."""
    tensor = current(tensor)
    shard = seen_shard(tensor) if isinstance(tensor, ShownParameter) else None
    return tensor if shard is None else shard


class _ShownRows(ShownParameter):
    """Of a DTensor."""

    def __getattr__(self, name: str) -> Any:
        """Between calls it has what the DTensor has: ``to_local()``, ``full_tensor()``."""
        shard = None if name.startswith("_") else seen_shard(self)
        if shard is not None and torch._C._current_graph_task_id() == -1:
            engine = shard_of(self).state_ref().engine  # type: ignore[union-attr]
            if not engine.in_call:
                engine.set_hiding(True)  # keeps what was written to the full value
                engine.set_hiding(False)
                return getattr(shard, name)
        raise AttributeError(f"'Parameter' object has no attribute '{name}'")


@dataclass(eq=False)
class ShownView:
    """A parameter that is a DTensor or a tensor around others, in full: modules see a view, which
    belongs to the graph of one call."""

    param: Tensor
    owners: Sequence[tuple[dict[str, Any], str]]  # dicts of modules, and its name in each
    make: Callable[[], Tensor]
    view: Tensor | None = None
    is_fresh: bool = False  # no call has seen it

    def show(self, full: bool) -> None:
        """Puts a new view in the place of the parameter in its modules, or that back. Another one
        that is there for a while (``torch.func.functional_call``) is the one to use."""
        before = self.param if self.view is None else self.view
        self.view = self.make() if full else None
        self.is_fresh = full
        for params, name in self.owners:
            if params.get(name, before) is before:
                params[name] = self.param if self.view is None else self.view

    def renew(self) -> None:
        """At a call of the unit."""
        if self.view is not None and not self.is_fresh:
            with temporarily_clear_interpreter_stack():
                self.show(True)
        self.is_fresh = False


@cache
def shown_class(kind: Any, base: type[ShownParameter] = ShownParameter) -> Any:
    """The class of a full parameter whose shard was a parameter of class ``kind``; a wrapper is
    made around a plain one."""
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        kind = nn.Parameter
    bases = (base,) if kind is nn.Parameter else (base, kind)
    return type(kind)(kind.__name__, bases, {"__module__": kind.__module__})


def take_class_of_torch(full: Any) -> None:
    """Drops :class:`ShownParameter` from a class, where memory is alike: torch's tracers compare
    the class itself."""
    kind = type(full)
    own = next(cls for cls in kind.__mro__ if not issubclass(cls, ShownParameter))
    if own.__basicsize__ == kind.__basicsize__:
        full.__class__ = own


def full_rows(made: Tensor, shard: Any, kind: type[nn.Parameter]) -> Any:
    """A parameter over the memory of ``made``, whose tensor may be exchanged with that of the
    DTensor ``shard``, in whose place there was one of class ``kind``."""
    cls = with_slots(shown_class(kind, _ShownRows), slots_of(type(shard)))
    full: Any = torch.Tensor._make_subclass(cls, made.new_empty(0))
    for each, other in ((full, type(shard)), (shard, cls)):
        own, each.__class__ = type(each), other  # attributes become a dict of their own
        each.__class__ = own
    exchange_impls(full, made.requires_grad_(shard.requires_grad))
    return full
