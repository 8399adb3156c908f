"""Makes the calls of modules enter and exit units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NoReturn
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.autograd import profiler

from zerocore._C import Engine
from zerocore.common import late
from zerocore.common.eager import leave_out_of_graphs, mark_eager
from zerocore.common.patching import around
from zerocore.model.casting import cast_floats
from zerocore.model.traced import call_traced, cast_around_call, is_traced
from zerocore.model.units import has_hooks
from zerocore.tensor.placed import Placed
from zerocore.tensor.shown import ShownParameter

_UNIT_CALL = "_zerocore_unit_call"
_COMPILED, _CALL = "_compiled_call_impl", "_call_impl"  # attributes that nn.Module.__call__ reads


# peek_interpreter_stack would create torch.func's state in this thread, and autograd would copy
# that state for each node of each backward.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


@dataclass(eq=False, slots=True)
class UnitCall:
    """The wrapper of a module's call: enters its units, and begins the pass if it is the root."""

    state: Any  # the ShardState of the module's model
    engine: Engine
    units: tuple[int, ...]
    is_root: bool
    cast_inputs: torch.dtype | None = None
    cast_outputs: torch.dtype | None = None
    before_call: Callable[[], None] | None = None
    looked_at: tuple[int, ...] = ()  # units that it reads in evaluation mode: `looked_at_by`
    lookup: ref[nn.Module] | None = None  # an embedding, whose backward reads weights only by hooks
    views: tuple[Any, ...] = ()  # views that its modules see; each call's graph needs new ones
    before_units: Callable[[], None] = lambda: None  # runs before the first enter, on all ranks

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function`` with the units unsharded."""
        engine = self._engine_of_call()
        if engine is None:
            return self._call_without_engine(function, args, kwargs)
        entered, begun, units = 0, False, self.units
        if self.looked_at and not args[0].training:
            units = (*units, *self.looked_at)
        self.before_units()
        try:
            if self.is_root:
                self.state.begin_pass()
                engine.begin_pass()
                begun = True
                if self.before_call is not None:
                    self.before_call()
            for unit in units:
                engine.enter(unit)
                entered += 1
            for view in self.views:
                view.renew()
            if self.cast_inputs is not None:
                args, kwargs = cast_floats((args, kwargs), self.cast_inputs)
            run = self._in_range(function) if profiler._is_profiler_enabled else function
            output = run(*args, **kwargs)
            if self.cast_outputs is not None:
                output = cast_floats(output, self.cast_outputs)
            while entered > 0:
                entered -= 1
                engine.exit(units[entered], output, False, self._reads())
        except BaseException as error:
            explained = late.call("explain_forward", error, self.state, units)  # while unsharded
            give_up(engine, units[:entered])
            if begun:
                with suppress(Exception):
                    engine.fail_pass()
            if explained is not None:
                raise explained from error
            raise
        if self.is_root:
            engine.end_pass(output)
        return output

    def _holds_full(self) -> bool:
        """Whether modules hold full parameters without the engine: at stage 0, within
        ``unsharded``, or those of a ``functional_call``."""
        params = (param for unit in self.units for param in self.state.units[unit].params)
        held = ((m._parameters.get(key), param) for param in params for m, key in param.owners)
        return not any(_is_shard(value, param) for value, param in held)

    def _engine_of_call(self) -> Engine | None:
        """Returns the engine; None if the call needs none, under a trace or a transform."""
        if is_traced():
            return None
        if not is_transformed():
            return self.engine
        from zerocore.model.transforms import adopt, is_forward_mode, outside  # late: few calls are

        if is_forward_mode():
            return outside(self.engine)
        if not self._holds_full():
            if self.is_root or not self.engine.in_call:
                return self.engine  # which raises
            adopt(self.engine, self.units)
            for view in self.views:
                view.renew()
        return None

    def _reads(self) -> bool:
        """Whether the call's backward may read parameters."""
        module = None if self.lookup is None else self.lookup()
        return module is None or has_hooks(module)

    def _call_without_engine(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        dtypes = self.cast_inputs, self.cast_outputs
        if is_traced():
            return call_traced(self.state.params(), dtypes, function, args, kwargs)
        return cast_around_call(dtypes, function, args, kwargs)

    def _in_range(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function in a range of torch's profiler with the names of the units."""
        names = ", ".join(self.state.units[unit].name for unit in self.units)
        return profiler.record_function(f"zerocore::forward ({names})")(function)


def _is_shard(value: Any, param: Any) -> bool:
    """Whether a module's parameter is a shard now. A DTensor is no :class:`Placed`."""
    is_hidden = value is param.shard and not isinstance(value, ShownParameter)
    return isinstance(value, Placed) or is_hidden


def give_up(engine: Engine, units: Sequence[int]) -> None:
    """Exits units, last first, and suppresses errors: the user must see the call's own error."""
    for unit in reversed(units):
        with suppress(Exception):
            engine.exit(unit, None)


def looked_at_by(module: nn.Module) -> nn.Module | None:
    """Returns the module whose parameters ``module`` passes to torch's fast path of attention.

    The fast path takes only plain parameters, and takes them before the owning modules are called.
    """
    if isinstance(module, nn.TransformerEncoder):
        return next(iter(module.layers), None)
    takes_it = isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention)
    return module if takes_it else None


def unit_call_of(module: nn.Module) -> UnitCall | None:
    """Returns the unit call that wraps the module's call; None if it enters no units."""
    return module.__dict__.get(_UNIT_CALL)


def note_unit_call(module: nn.Module, unit_call: UnitCall | None) -> None:
    """Sets the result of :func:`unit_call_of`."""
    module.__dict__[_UNIT_CALL] = unit_call


def set_unit_call(module: nn.Module, unit_call: UnitCall) -> None:
    """Makes ``module`` enter units when called; its class stays the same, as programs test it."""
    note_unit_call(module, unit_call)
    attributes = vars(module)
    for name in ("__reduce_ex__", "__getstate__"):
        attributes[name] = partial(refuse_copy, type(module).__name__, "pickled")
    cls: Any = type(module)
    if cls.__call__ is not nn.Module.__call__:
        _enter_in_class(cls)
        return
    # nn.Module.__call__ calls the first. The second keeps torch.compile off its shortcut.
    compiled = attributes.get(_COMPILED)
    inner = cls._call_impl if compiled is None else partial(_without_self, compiled)
    attributes[_COMPILED] = attributes[_CALL] = partial(_enter, ref(module), inner)
    mark_eager()
    leave_calls_out_of_graphs(_enter)


def leave_calls_out_of_graphs(*callers: Callable[..., Any]) -> None:
    """Keeps torch.compile out of unit calls and of the functions that make them."""
    for function in (*callers, UnitCall.call, is_traced, call_traced):
        leave_out_of_graphs(function)


def _enter(
    module_ref: ref[nn.Module], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    module: Any = module_ref()
    return module.__dict__[_UNIT_CALL].call(function, module, *args, **kwargs)


def _without_self(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_classes: WeakSet[type] = WeakSet()  # classes with a __call__ of their own, which is wrapped


def _enter_in_class(cls: Any) -> None:
    if cls in _classes:
        return
    original = cls.__call__

    @wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit_call = self.__dict__.get(_UNIT_CALL) if type(self) is cls else None
        if unit_call is None:
            return original(self, *args, **kwargs)
        return unit_call.call(original, self, *args, **kwargs)

    cls.__call__ = __call__
    leave_calls_out_of_graphs()
    _classes.add(cls)


@around
def compiles_inside(compile_module: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wraps ``nn.Module.compile``: compiles the call inside the unit call."""
    unit_call = unit_call_of(self)
    if unit_call is None or vars(self).pop(_CALL, None) is None:
        compile_module(self, *args, **kwargs)
        return
    compile_module(self, *args, **kwargs)
    set_unit_call(self, unit_call)


def refuse_copy(name: str, what: str, *args: Any) -> NoReturn:
    """Raises TypeError: a module named ``name`` cannot be ``what``, copied or pickled."""
    raise TypeError(
        f"this {name} is sharded and cannot be {what}; do it before zerocore.shard, or save "
        "zerocore.full_state_dict(model) and load that"
    )


FORWARD_METHOD = "_zerocore_forward_method"  # marks a method that :func:`wrap_method` has wrapped


def wrap_method(module: nn.Module, name: str) -> None:
    """Makes ``module.name(...)`` enter the module's units as its call does."""
    unit_call = unit_call_of(module)
    method = getattr(module, name)
    if unit_call is None:
        return
    inner = replace(
        unit_call, is_root=False, cast_outputs=None, before_call=None, looked_at=(), lookup=None
    )

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner.call(method, *args, **kwargs)

    setattr(call, FORWARD_METHOD, True)
    module.__dict__[name] = call
