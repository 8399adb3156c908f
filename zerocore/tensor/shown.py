"""Parameters while programs see them in full: they have the gradients and post-accumulate hooks of
their shards. Copies and pickles are plain parameters.
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
    """A full parameter; :func:`shown_class` adds the original class of the user's object.

    Torch functions of it have no overhead: its ``__torch_function__`` is torch's disabled one.
    """

    @property
    def grad(self) -> Any:
        """The shard's gradient. Within a backward, it does not have this rank's part yet."""
        shard = seen_shard(self)
        if shard is None or TracingContext.try_get() is not None:  # a trace records no gradients
            return _grad.__get__(self)
        return shard.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        shard = seen_shard(self)
        if shard is None:
            _grad.__set__(self, value)
        elif value is not None and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f".grad of parameter '{getattr(shard, 'fqn', '')}' was set within a backward, "
                "which adds the averaged gradient to .grad at its end. Change this rank's gradient "
                "in p.register_hook(...), or set .grad after the backward"
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
    """Returns the shard of a full or replaced parameter; any other tensor itself."""
    tensor = current(tensor)
    shard = seen_shard(tensor) if isinstance(tensor, ShownParameter) else None
    return tensor if shard is None else shard


class _ShownRows(ShownParameter):
    """The full parameter of a DTensor."""

    def __getattr__(self, name: str) -> Any:
        """Returns the DTensor's attribute between calls: ``to_local()``, ``full_tensor()``."""
        shard = None if name.startswith("_") else seen_shard(self)
        if shard is not None and torch._C._current_graph_task_id() == -1:
            engine = shard_of(self).state_ref().engine  # type: ignore[union-attr]
            if not engine.in_call:
                engine.set_hiding(True)  # takes writes to the full value into the shard
                engine.set_hiding(False)
                return getattr(shard, name)
        raise AttributeError(f"'Parameter' object has no attribute '{name}'")


@dataclass(eq=False)
class ShownView:
    """The view that modules see of a full parameter that is a DTensor or a tensor around others. A
    view belongs to the graph of one call."""

    param: Tensor
    owners: Sequence[tuple[dict[str, Any], str]]  # dicts of modules, and its name in each
    make: Callable[[], Tensor]
    view: Tensor | None = None
    is_fresh: bool = False  # no call has used it yet

    def show(self, full: bool) -> None:
        """Replaces the parameter in its modules by a new view, or puts it back. Leaves any other
        tensor there, such as one of ``torch.func.functional_call``."""
        before = self.param if self.view is None else self.view
        self.view = self.make() if full else None
        self.is_fresh = full
        for params, name in self.owners:
            if params.get(name, before) is before:
                params[name] = self.param if self.view is None else self.view

    def renew(self) -> None:
        """Makes a new view for each call of the unit."""
        if self.view is not None and not self.is_fresh:
            with temporarily_clear_interpreter_stack():
                self.show(True)
        self.is_fresh = False


@cache
def shown_class(kind: Any, base: type[ShownParameter] = ShownParameter) -> Any:
    """Returns the class of a full parameter whose original class is ``kind``; plain if ``kind`` is
    a class around other tensors."""
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        kind = nn.Parameter
    bases = (base,) if kind is nn.Parameter else (base, kind)
    return type(kind)(kind.__name__, bases, {"__module__": kind.__module__})


def take_class_of_torch(full: Any) -> None:
    """Drops :class:`ShownParameter` from an object's class if the memory layouts agree, because
    torch's tracers compare the class itself."""
    kind = type(full)
    original = next(cls for cls in kind.__mro__ if not issubclass(cls, ShownParameter))
    if original.__basicsize__ == kind.__basicsize__:
        full.__class__ = original


def full_rows(memory: Tensor, shard: Any, kind: type[nn.Parameter]) -> Any:
    """Makes a parameter over ``memory``, plain, that can exchange its tensor with the DTensor
    ``shard``; ``kind`` is the class of the original parameter."""
    cls = with_slots(shown_class(kind, _ShownRows), slots_of(type(shard)))
    full: Any = torch.Tensor._make_subclass(cls, memory.new_empty(0))
    for param, other in ((full, type(shard)), (shard, cls)):
        original, param.__class__ = type(param), other  # attributes become a dict of their own
        param.__class__ = original
    exchange_impls(full, memory.requires_grad_(shard.requires_grad))
    return full
