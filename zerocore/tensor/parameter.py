"""The sharded parameter and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from operator import attrgetter
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from zerocore._C import exchange_impls, take_node_hooks
from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates, rules
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.implicit_unshard import call_with_full, in_call, is_recorded
from zerocore.tensor.noted_writes import note_writes
from zerocore.tensor.placed import (
    IS_ROWS,
    OTHER,
    Placed,
    PlacedParameter,
    as_view,
    leaves,
    local_of,
)
from zerocore.tensor.shard import InPlace, LocalShard
from zerocore.tensor.wrapped import is_wrapped

_grad: Any = torch._C.TensorBase.grad
_data: Any = torch._C.TensorBase.data


class ShardedParameter(InPlace, PlacedParameter, nn.Parameter):  # type: ignore[misc]
    """This rank's elements of a parameter, possibly none; what the optimizer updates.

    Its shape, ``numel()`` and strides are those of the full parameter; :meth:`local` and
    ``shard_range`` tell of the shard. Functions of it that autograd records, or that need all
    elements, use the full value: all ranks must call them.

    ``grad`` is this rank's elements of the averaged gradient. It takes those elements, a full
    gradient that is averaged already, of which this rank's part is copied, or None; all ranks must
    set a full one, and a vector's elements. ValueError: set to a tensor of another shape, to a
    shard of something else, or to full gradients that differ between the ranks.
    """

    result_type = LocalShard
    what = PlacedParameter.what

    unit: int  # index of the unit it belongs to
    position: int  # in the unit
    elements: Tensor  # plain, on the same memory
    # The same elements as layers compute with; None where they compute with this parameter.
    model_weight: Tensor | None = None
    spec: Any = None  # of the DTensor that modules see, under tensor parallelism
    make_view: Callable[[Tensor], Tensor] | None = None  # what modules see of the full one
    on_host: bool = False  # its optimizer's states are on the host, and so is it
    on_disk: bool = False  # these bytes of the host's memory are a file's
    grad_device: torch.device  # where its gradient is

    def shown(self) -> Tensor:
        """The tensor of modules while the unit is gathered: the full parameter or a view of it, a
        DTensor or a tensor of its class."""
        if self.make_view is None:
            return self.full
        with torch.enable_grad():  # a backward that computes a call once more records, too
            view = self.make_view(self.full)
        view.__dict__.update(attributes_of(self))
        return as_view(view, self.full)

    def detach(self) -> Any:
        """A shard on the same memory, until ``data`` is set; in a call the full value."""
        if in_call(self):
            return call_with_full(Tensor.detach, (self,), {}, [self])
        return super().detach()

    def _own_data(self) -> Tensor:
        pending_host_updates.finish()
        with torch._C.DisableTorchFunctionSubclass():
            local: Tensor = _data.__get__(self)  # changes of it count, see data_writes.h
            return local

    def _keep_grad(self, grad: ShardedGrad) -> None:
        """Moves a gradient that the user holds to memory of its own; C++ calls it."""
        state = self.state_ref()
        if state is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own = state.engine.make_grad(self.unit, self.position)
            if isinstance(grad, UnreducedGrad):
                if grad.is_held:
                    return  # nothing can be read of it
                self.bind_sums()
            elif own.untyped_storage()._cdata == grad.untyped_storage()._cdata:
                own = ShardedGrad.make(own, self.place, self.state_ref)
                state.engine.bind_grad(self.unit, self.position, own)
            else:
                return
            values = local_of(grad).clone()
            grad._let_go(values)
            _data.__set__(grad, values)

    def bind_sums(self) -> None:
        """Makes what ``grad`` is after a backward without sync, where that is no shard's."""
        state = self.state_ref()
        sums = state.engine.make_sums(self.unit, self.position)
        state.engine.bind_sums(self.unit, self.position, UnreducedGrad.of(self, sums))

    def _assign_grad(self, value: Tensor) -> None:
        """Sets ``grad`` to a tensor; C++ calls it."""
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(self.grad, UnreducedGrad):
                _grad.__set__(self, self.grad.replaced_by(value, self))
                return
            state = self.state_ref()
            sums = state is not None and state.engine.has_sums(self.unit, self.position)
            if not sums or self.place.group is not None:
                self._check_averaged(value, ".grad")
            value = self._part_of(value, ".grad")
            if not isinstance(value, ShardedGrad):
                value = ShardedGrad.make(value.as_subclass(Tensor), self.place, self.state_ref)
            _grad.__set__(self, value)

    @property
    def data(self) -> Tensor:
        """As :meth:`detach`, but autograd does not see what is written to it. A value that it is
        set to is copied: a full one, or this rank's part.

        Raises:
            TypeError, ValueError: set to another dtype, device or shape.
        """
        if in_call(self):
            return call_with_full(attrgetter("data"), (self,), {}, [self])
        return self._alias(self._own_data())

    @data.setter
    def data(self, value: Tensor) -> None:
        if in_call(self):
            call_with_full(lambda shown: shown, (self,), {}, [self]).data = value
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._check_data(value)
            # By identity, which is the same on all ranks: on all of them versions change or none.
            is_own = value is self or any(alias() is value for alias in self._live_aliases())
            part = self._part_of(value, ".data")
            if not is_own:
                local = self._own_data()
                if self._live_aliases():
                    self._let_go(local.clone())
                local.copy_(part)
                note_writes("data=", [self], [value])

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As on a parameter under DistributedDataParallel: ``hook`` is given this rank's own full
        gradient, before it is averaged.

        Raises:
            TypeError: in the backward, if ``hook`` returns a shard.
        """
        if self.requires_grad and not self.full.requires_grad:
            self.full.requires_grad_(True)
        return self.full.register_hook(_checked_hook(hook, self.fqn))

    def full_tensor(self) -> Tensor:
        """The full value, a new plain tensor of ``global_shape``; all ranks must call.

        Under mixed precision that of the main weights; but where autograd records, what layers
        compute with, and gradients go back to the parameter.
        """
        if is_recorded((self,)):
            full = call_with_full(torch.clone, (self,), {}, [self])
            return full if self.spec is None else full.to_local()
        return super().full_tensor()

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise TypeError(
            f"parameter '{self.fqn}' is sharded and cannot be pickled; use "
            "zerocore.full_state_dict(model)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A shard of its own, without gradient, as ``p.detach().clone()``."""
        memo[id(self)] = copied = self.detach().clone()
        return copied


def as_parameter(tensor: Tensor, kind: type[nn.Parameter], requires_grad: bool) -> Any:
    """``tensor`` itself as a parameter; a new one would not count what is written to its data."""
    tensor.requires_grad_(requires_grad).__class__ = kind
    return tensor


def become_shard(param: Any, data: Tensor, full: Tensor, facts: dict[str, Any]) -> None:
    """``param`` is a :class:`ShardedParameter` over ``data`` from now on, and ``full`` its hidden
    object. Its attributes stay, and its hooks.

    Raises:
        TypeError: memory of the class of ``param`` has other parts than that of tensors.
    """
    kind, hooks, later = type(param), param._backward_hooks, param._post_accumulate_grad_hooks
    inner = param.__tensor_flatten__()[0] if is_wrapped(param) else ()
    slots = slots_of(kind)
    try:
        param.__class__ = with_slots(ShardedParameter, slots)
    except TypeError as error:
        name = facts["place"].fqn
        raise TypeError(f"parameter '{name}' of class {kind.__name__}: {error}") from error
    for name in (*slots, *inner):
        if hasattr(param, name):
            delattr(param, name)
    data.requires_grad_(full.requires_grad)
    node = take_node_hooks(param, full)
    exchange_impls(param, data)
    vars(param).update(facts, **{OTHER: full})  # both may be the shard
    vars(full).update(facts, **{OTHER: ref(param), "_zerocore_node": node})
    if hooks:
        full._backward_hooks = hooks
    if later:
        param._post_accumulate_grad_hooks = later


def slots_of(kind: type) -> tuple[str, ...]:
    """Attributes that objects of a class have in their own memory, beside those of tensors."""
    return tuple(name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ()))


@cache
def with_slots(cls: Any, slots: tuple[str, ...]) -> Any:
    """A class like ``cls`` whose objects have such memory."""
    if not slots:
        return cls
    base = type(cls)("Slots", (torch.Tensor,), {"__slots__": slots})
    made = type(cls)(cls.__name__, (cls, base), {"__module__": cls.__module__})
    if issubclass(made, ShardedParameter):
        note_kind(made)
    return made


KINDS: set[type] = set()  # of shards


def note_kind(kind: type) -> None:
    """Tells torch's optimizers, which update lists of unknown kinds of tensors in a for-loop."""
    KINDS.add(kind)
    for known in (optimizer, _foreach_utils):
        known._foreach_supported_types.append(kind)


def attributes_of(param: Tensor) -> dict[str, Any]:
    """The attributes that programs have set on a parameter."""
    return {key: value for key, value in vars(param).items() if key not in _FACTS}


def _checked_hook(
    hook: Callable[[Tensor], Tensor | None], fqn: str
) -> Callable[[Tensor], Tensor | None]:
    @wraps(hook)
    def run(grad: Tensor) -> Tensor | None:
        result = hook(grad)
        if isinstance(result, Placed):
            raise TypeError(
                f"a hook of parameter '{fqn}' was given the full gradient but returned a shard, "
                f"{result!r}. Make what it is combined with (a mask) from p.full_tensor(), "
                "before the backward"
            )
        return result

    return run


_OWN = ("place", "state_ref", "aliases", OTHER, IS_ROWS)
_FACTS = frozenset((*_OWN, *ShardedParameter.__annotations__))


class ShardedGrad(InPlace, Tensor):  # type: ignore[misc]
    """This rank's elements of an averaged gradient.

    Elementwise functions work on the local elements. Norms and full reductions are those of the
    full gradient, equal on all ranks (so ``torch.nn.utils.clip_grad_norm_`` is right unchanged).
    Others would silently be local and raise TypeError.
    """

    what = "the gradient of"
    source: ShardedGrad  # of what detach() gives: what has the same memory and came first

    @staticmethod
    def make(data: Tensor, place: Place, state_ref: Callable[[], Any]) -> ShardedGrad:
        """Wraps ``data`` (1-D) without copying."""
        grad = torch.Tensor._make_subclass(ShardedGrad, data, False)
        grad.place = place
        grad.state_ref = state_ref
        return grad

    def detach(self) -> ShardedGrad:
        """A gradient on the same memory; it keeps its values when ``grad`` is set to another."""
        source = getattr(self, "source", self)
        shard: ShardedGrad = InPlace.detach(source)
        shard.place, shard.source = self.place, source  # which is held, then
        return shard

    @property
    def data(self) -> ShardedGrad:
        """The same memory. A value that it is set to is copied, as setting ``grad`` does.

        Raises:
            TypeError, ValueError: set to another dtype, device or shape, or to full gradients that
                differ between the ranks.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._check_data(value)
            self._check_averaged(value, ".grad")
            local_of(self).copy_(self._part_of(value, ".grad"))


def _nothing() -> None:
    """The parameter of a gradient that is none's any more."""


class UnreducedGrad(ShardedGrad):
    """``p.grad`` after a backward under ``no_sync``, at stages 1 to 3.

    At stage 1 it is this rank's own gradient, in full, as under DistributedDataParallel. Where that
    is held back in parts, reads and changes raise RuntimeError.
    """

    param: Callable[[], ShardedParameter | None]

    @classmethod
    def of(cls, param: ShardedParameter, values: Tensor) -> UnreducedGrad:
        """Wraps ``values`` (1-D) without copying."""
        grad = torch.Tensor._make_subclass(cls, values, False)
        whole = (0, param.global_shape.numel())
        is_whole = values.numel() == whole[1]
        place = replace(param.place, shard_range=whole, group=None) if is_whole else param.place
        grad.place, grad.state_ref, grad.param = place, param.state_ref, ref(param)
        return grad

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if rules.needs_values(func, args):
            for value in leaves((args, kwargs)):
                if isinstance(value, UnreducedGrad):
                    value.check_readable()
        return rules.call(func, args, kwargs or {})

    @property
    def is_held(self) -> bool:
        """Whether it does not have this rank's gradient."""
        state, param = self.state_ref(), self.param()
        if state is None or param is None:
            return False  # its values have memory of their own
        return not state.engine.has_sums(param.unit, param.position)

    def check_readable(self) -> None:
        """Raises RuntimeError if its values are held back."""
        if self.is_held:
            raise RuntimeError(
                f"the gradient of '{self.fqn}' is held back: the last backward ran under no_sync, "
                "where this rank keeps no full gradient of its own. Read, clip and step after a "
                "backward outside of no_sync, or drop it with zero_grad(); under no_sync, "
                "zerocore.shard(model, stage=0) shows each rank's own gradient, as does stage=1 "
                "behind a zero_grad(), as DistributedDataParallel"
            )

    def replaced_by(self, value: Tensor, param: ShardedParameter) -> UnreducedGrad:
        """The new ``grad``, of ``value``: this rank's own, in full."""
        self.check_readable()
        if value.shape != self.global_shape and value.shape != self.shape:
            raise ValueError(
                f".grad of parameter '{self.fqn}' takes a tensor of shape "
                f"{tuple(self.global_shape)} after a backward under no_sync, but was set to shape "
                f"{tuple(value.shape)}"
            )
        if isinstance(value, UnreducedGrad):
            return value
        plain = local_of(value) if isinstance(value, Placed) else value.detach()
        flat = plain if plain.shape == self.shape else self.place.part_of(plain)
        return UnreducedGrad.of(param, flat.as_subclass(Tensor))

    def detach(self) -> ShardedGrad:
        """A gradient on the same memory, while it has this rank's sums."""
        param = self.param()
        if param is None:
            return super().detach()
        shard = UnreducedGrad.of(param, local_of(self))
        self._note_alias(shard)
        return shard

    def _let_go(self, values: Tensor) -> None:
        self.param = _nothing
        for alias in self._live_aliases():
            alias().param = _nothing  # type: ignore[union-attr]
        super()._let_go(values)

    def _check_averaged(self, value: Tensor, where: str) -> None:
        """Each rank sets its own."""


ShardedGrad.result_type = ShardedGrad
