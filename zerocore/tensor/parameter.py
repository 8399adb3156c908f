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
from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates, rules
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.implicit_unshard import call_with_full, in_call, is_recorded
from zerocore.tensor.noted_writes import note_copied, note_writes
from zerocore.tensor.placed import (
    GRADIENT,
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
    """This rank's elements of a parameter, possibly none, which the optimizer updates.

    Its shape, ``numel()`` and strides are the full parameter's; :meth:`local` and ``shard_range``
    describe the shard. Functions that autograd records, or that need all elements, use the full
    value: all ranks must call them.

    ``grad`` has this rank's elements of the averaged gradient. It may be set to such elements, to a
    full gradient that is averaged already (this rank copies its part), or to None. All ranks must
    set a full one together, and also a vector's elements. Raises ValueError for a tensor of another
    shape, a shard of another tensor, or full gradients that differ between ranks.
    """

    result_type = LocalShard
    what = PlacedParameter.what

    unit: int  # index of its unit
    position: int  # in the unit
    elements: Tensor  # plain, on the same memory
    # The same elements in the dtype of layers; None if layers compute with this parameter.
    model_weight: Tensor | None = None
    spec: Any = None  # spec of the DTensor that modules see, under tensor parallelism
    make_view: Callable[[Tensor], Tensor] | None = None  # makes the view that modules see
    on_host: bool = False  # it is on the host, with its optimizer's states
    on_disk: bool = False  # its host memory is mapped from a file
    grad_device: torch.device  # the device of its gradient
    is_whole: bool = False  # programs hold the full parameter; this shard is hidden

    def shown(self) -> Tensor:
        """Returns the tensor that modules see while the unit is unsharded: the full parameter, or a
        view of it as a DTensor or in its class."""
        if self.make_view is None:
            return self.full
        with torch.enable_grad():  # recomputation within a backward records it, too
            view = self.make_view(self.full)
        view.__dict__.update(attributes_of(self))
        return as_view(view, self.full)

    def detach(self) -> Any:
        """Returns a shard on the same memory, until ``data`` is set; in a call, the full value."""
        if in_call(self):
            return call_with_full(Tensor.detach, (self,), {}, [self])
        return super().detach()

    def _own_data(self) -> Tensor:
        pending_host_updates.finish()
        with torch._C.DisableTorchFunctionSubclass():
            local: Tensor = _data.__get__(self)  # writes to it count, see data_writes.h
            return local

    def _keep_grad(self, grad: ShardedGrad) -> None:
        """Moves a gradient that the program keeps to memory of its own; C++ calls it."""
        state = self.state_ref()
        if state is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            reduced = state.engine.make_grad(self.unit, self.position)
            if isinstance(grad, UnreducedGrad):
                if grad.is_held:
                    return  # its values cannot be read
                self.bind_sums()
            elif reduced.untyped_storage()._cdata == grad.untyped_storage()._cdata:
                shard = ShardedGrad.make(reduced, self.place, self.state_ref)
                state.engine.bind_grad(self.unit, self.position, shard)
            else:
                return
            values = local_of(grad).clone()
            grad._let_go(values)
            _data.__set__(grad, values)

    def bind_sums(self) -> None:
        """Makes the ``grad`` of a backward under ``no_sync``, unless ``grad`` is a shard."""
        state = self.state_ref()
        sums = state.engine.make_sums(self.unit, self.position)
        state.engine.bind_sums(self.unit, self.position, UnreducedGrad.of(self, sums))

    def _assign_grad(self, value: Tensor) -> None:
        """Sets ``grad`` to a tensor; C++ calls it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = self._as_grad(value)
            _grad.__set__(self, grad)
            if grad is not value:
                note_copied(grad, value)

    def _as_grad(self, value: Tensor) -> ShardedGrad:
        if isinstance(self.grad, UnreducedGrad):
            return self.grad.replaced_by(value, self)
        state = self.state_ref()
        sums = state is not None and state.engine.has_sums(self.unit, self.position)
        if not sums or self.place.group is not None:
            self._check_averaged(value, ".grad")
        value = self._part_of(value, ".grad")
        if isinstance(value, ShardedGrad):
            return value
        return ShardedGrad.make(value.as_subclass(Tensor), self.place, self.state_ref)

    @property
    def data(self) -> Tensor:
        """A shard as from :meth:`detach`, but autograd does not see writes to it. Setting it to a
        full value, or to this rank's part, copies the value.

        Raises:
            TypeError, ValueError: it is set to another dtype, device or shape.
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
            # By identity, which agrees on all ranks: versions must change on all of them or none.
            is_own = value is self or any(alias() is value for alias in self._live_aliases())
            part = self._part_of(value, ".data")
            if not is_own:
                local = self._own_data()
                if self._live_aliases():
                    self._let_go(local.clone())
                local.copy_(part)
                note_writes("data=", [self], [value])
                note_copied(self, value)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Registers a hook as under DistributedDataParallel: it gets this rank's own full gradient,
        before it is averaged. A shard beside the gradient is gathered.

        Raises:
            TypeError: in the backward, if ``hook`` returns a shard.
        """
        if self.requires_grad and not self.full.requires_grad:
            self.full.requires_grad_(True)
        return self.full.register_hook(_checked_hook(hook, self.fqn))

    def full_tensor(self) -> Tensor:
        """Gathers the full value, a new plain tensor of ``global_shape``; all ranks must call it.

        Under mixed precision it has the main weights' values. If autograd records, it has the
        values that layers compute with, and gradients go back to the parameter.
        """
        if is_recorded((self,)):
            full = call_with_full(torch.clone, (self,), {}, [self])
            return full if self.spec is None else full.to_local()
        return super().full_tensor()

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise TypeError(
            f"parameter '{self.fqn}' is sharded and cannot be pickled; save "
            "zerocore.full_state_dict(model) instead"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns an independent shard without a gradient, as ``p.detach().clone()``."""
        memo[id(self)] = copied = self.detach().clone()
        return copied


def as_parameter(tensor: Tensor, kind: type[nn.Parameter], requires_grad: bool) -> Any:
    """Makes ``tensor`` itself a parameter: a new one would not count writes to its ``data``."""
    tensor.requires_grad_(requires_grad).__class__ = kind
    return tensor


def become_shard(param: Any, data: Tensor, full: Tensor, facts: dict[str, Any]) -> None:
    """Turns ``param`` into a :class:`ShardedParameter` over ``data``, with ``full`` as its hidden
    object. It keeps its attributes and hooks.

    Raises:
        TypeError: objects of the class of ``param`` have another memory layout.
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
    vars(param).update(facts, **{OTHER: full})  # either object may be the shard later
    vars(full).update(facts, **{OTHER: ref(param), "_zerocore_node": node})
    if hooks:
        full._backward_hooks = hooks
    if later:
        param._post_accumulate_grad_hooks = later


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the ``__slots__`` of a class."""
    return tuple(name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ()))


@cache
def with_slots(cls: Any, slots: tuple[str, ...]) -> Any:
    """Returns a class like ``cls`` whose objects have these slots."""
    if not slots:
        return cls
    base = type(cls)("Slots", (torch.Tensor,), {"__slots__": slots})
    slotted = type(cls)(cls.__name__, (cls, base), {"__module__": cls.__module__})
    if issubclass(slotted, ShardedParameter):
        note_kind(slotted)
    return slotted


KINDS: set[type] = set()  # the classes of shards


def note_kind(kind: type) -> None:
    """Tells torch's optimizers to use foreach functions for this class of tensors."""
    KINDS.add(kind)
    for known in (optimizer, _foreach_utils):
        known._foreach_supported_types.append(kind)


def attributes_of(param: Tensor) -> dict[str, Any]:
    """Returns the attributes that programs have set on a parameter."""
    return {key: value for key, value in vars(param).items() if key not in _FACTS}


def _checked_hook(
    hook: Callable[[Tensor], Tensor | None], fqn: str
) -> Callable[[Tensor], Tensor | None]:
    @wraps(hook)
    def run(grad: Tensor) -> Tensor | None:
        rules.hooks.of_gradient += 1
        try:
            result = hook(grad)
        finally:
            rules.hooks.of_gradient -= 1
        if isinstance(result, Placed):
            raise TypeError(
                f"a hook of parameter '{fqn}' got the full gradient but returned a shard, "
                f"{result!r}. Return a full gradient, such as mask * grad"
            )
        return result

    return run


_OWN = ("place", "state_ref", "aliases", OTHER, IS_ROWS)
_FACTS = frozenset((*_OWN, *ShardedParameter.__annotations__))


class ShardedGrad(InPlace, Tensor):  # type: ignore[misc]
    """This rank's elements of an averaged gradient.

    Elementwise functions work on the local elements. Norms and full reductions are computed over
    the full gradient, equal on all ranks (so ``torch.nn.utils.clip_grad_norm_`` is right). Others
    get the full gradient, which the ranks gather: all ranks must call them.
    """

    what = GRADIENT
    source: ShardedGrad  # on a result of detach(): the first gradient on the same memory

    @staticmethod
    def make(data: Tensor, place: Place, state_ref: Callable[[], Any]) -> ShardedGrad:
        """Wraps ``data`` (1-D) without copying."""
        grad = torch.Tensor._make_subclass(ShardedGrad, data, False)
        grad.place = place
        grad.state_ref = state_ref
        return grad

    def detach(self) -> ShardedGrad:
        """Returns a gradient on the same memory; it keeps its values when ``grad`` is replaced."""
        source = getattr(self, "source", self)
        shard: ShardedGrad = InPlace.detach(source)
        shard.place, shard.source = self.place, source  # the reference keeps the source alive
        return shard

    @property
    def data(self) -> ShardedGrad:
        """A gradient on the same memory. Setting ``data`` to a value copies the value.

        Raises:
            TypeError, ValueError: it is set to another dtype, device or shape, or to full gradients
                that differ between the ranks.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._check_data(value)
            self._check_averaged(value, ".grad")
            local_of(self).copy_(self._part_of(value, ".grad"))
            note_copied(self, value)


def _nothing() -> None:
    """Returns None, as the parameter of a gradient that belongs to none any more."""


class UnreducedGrad(ShardedGrad):
    """``p.grad`` after a backward under ``no_sync``, at stages 1 to 3.

    At stage 1 it is this rank's own full gradient, as under DistributedDataParallel. If the engine
    holds it back, reads and changes raise RuntimeError.
    """

    param: Callable[[], ShardedParameter | None]

    @classmethod
    def of(cls, param: ShardedParameter, values: Tensor) -> UnreducedGrad:
        """Wraps ``values`` (1-D) without copying."""
        grad = torch.Tensor._make_subclass(cls, values, False)
        place, numel = param.place, param.global_shape.numel()
        if values.numel() == numel:
            place = replace(place, shard_range=(0, numel), group=None, cut=Cut.whole(numel))
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
        """Whether the engine holds back this rank's gradient."""
        state, param = self.state_ref(), self.param()
        if state is None or param is None:
            return False  # its values have memory of their own
        return not state.engine.has_sums(param.unit, param.position)

    def check_readable(self) -> None:
        """Raises RuntimeError if the engine holds back its values."""
        if self.is_held:
            raise RuntimeError(
                f"the gradient of '{self.fqn}' is held back: the last backward ran under no_sync, "
                "and this rank keeps no full gradient. Read, clip and step after a backward "
                "outside of no_sync, or drop it with zero_grad(). To read this rank's gradient "
                "under no_sync, as with DistributedDataParallel, use stage=0, or use stage=1 and "
                "call zero_grad() first"
            )

    def replaced_by(self, value: Tensor, param: ShardedParameter) -> UnreducedGrad:
        """Returns the new ``grad`` with the values of ``value``, this rank's own full gradient."""
        self.check_readable()
        if value.shape != self.global_shape and value.shape != self.shape:
            raise ValueError(
                f".grad of parameter '{self.fqn}' takes this rank's full gradient, of shape "
                f"{tuple(self.global_shape)}, after a backward under no_sync, but was set to shape "
                f"{tuple(value.shape)}"
            )
        if isinstance(value, UnreducedGrad):
            return value
        plain = local_of(value) if isinstance(value, Placed) else value.detach()
        flat = plain if plain.shape == self.shape else self.place.part_of(plain)
        return UnreducedGrad.of(param, flat.as_subclass(Tensor))

    def detach(self) -> ShardedGrad:
        """Returns a gradient on the same memory, as long as this has the rank's sums."""
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
        """Checks nothing: each rank sets its own gradient."""


ShardedGrad.result_type = ShardedGrad
