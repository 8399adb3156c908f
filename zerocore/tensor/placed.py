"""Tensors that know their place: shards, and full parameters and views that stand for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates
from zerocore.tensor.functions import BEHIND_OPERATORS, base_of, is_elementwise

_LEAF = "_zerocore_leaf"  # on what modules see: the parameter that autograd knows
IS_ROWS = "_zerocore_fsdp_rows"  # set on a parameter that fully_shard has made
OTHER = "_zerocore_other"  # of the two objects that exchange their tensors: the other one


def other_of(param: Any) -> Any:
    """The other object of a pair; None of a tensor that is in none."""
    other = getattr(param, "__dict__", {}).get(OTHER)
    return other() if isinstance(other, ref) else other


def shard_in(param: Any) -> PlacedParameter | None:
    """The shard of a parameter: itself, or the object that has it while this one is shown in full.
    None of a tensor that is no parameter of a sharded model."""
    if isinstance(param, PlacedParameter):
        return param
    other = other_of(param)
    return other if isinstance(other, PlacedParameter) else None


def as_view(view: Tensor, leaf: Tensor) -> Tensor:
    """``view``, which modules see in the place of ``leaf``, an engine's full parameter."""
    view.__dict__[_LEAF] = leaf
    return view


def leaf_of(tensor: Tensor) -> Tensor:
    """The full parameter of an engine that ``tensor`` is a view of, or itself."""
    return tensor.__dict__.get(_LEAF, tensor)


class Placed:
    """Attributes and methods common to all tensors that are a shard of something."""

    place: Place
    dtype: torch.dtype
    what = "the shard of"  # how errors call it
    is_read = False  # made of a parameter by a function that changes nothing

    @property
    def fqn(self) -> str:
        return self.place.fqn

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.place.global_shape

    @property
    def shard_range(self) -> tuple[int, int]:
        """This rank's elements of the flattened parameter, ``(start, end)``."""
        return self.place.shard_range

    def check_readable(self) -> None:
        """Raises RuntimeError where the values are held back."""

    def local(self) -> Tensor:
        """The local elements as a plain 1-D tensor on the same memory."""
        return local_of(self)

    def own_part(self) -> Tensor:
        """A copy that is pickled as this rank's part, for a file of each rank; the same rank loads
        it, at the same stage and on the same number of ranks."""
        raise NotImplementedError

    def full_tensor(self) -> Tensor:
        """The full value, a new plain tensor of ``global_shape``; all ranks must call.

        Raises:
            RuntimeError: the shard was loaded from a file and is in no model.
        """
        return self.place.gather(local_of(self))

    def whole_tensor(self) -> Tensor:
        """As :meth:`full_tensor`; of a :class:`zerocore.ParameterMesh` the larger tensor."""
        return self.place.whole_of(self.full_tensor())


class PlacedParameter(Placed):
    """A shard that has a full parameter which layers compute with."""

    what = "parameter"
    unit: int
    state_ref: Any
    requires_grad: bool

    @property
    def full(self) -> Any:
        """The full parameter, which layers compute with."""
        return other_of(self)

    def shown(self) -> Tensor:
        """The tensor of modules while the unit is gathered."""
        raise NotImplementedError


def local_of(shard: Any) -> Tensor:
    """The elements of a shard as a plain tensor on the same memory, without gradient."""
    pending_host_updates.finish()
    if isinstance(shard, Placed):
        shard.check_readable()
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(shard).as_subclass(Tensor)


def keep_place(result: Any, source: Any) -> Any:
    """A changed copy of a shard is as local as the shard: a shard, if ``result`` has its shape."""
    if type(result) is not Tensor or result.shape != local_of(source).shape:
        return result
    placed: Any = result.as_subclass(type(source).result_type)
    placed.place = source.place
    return placed


def outline_of(value: Any) -> Any:
    """A shard's full shape and strides as a meta tensor; any other value as it is."""
    return value.place.outline(value.dtype) if isinstance(value, Placed) else value


def leaves(value: Any) -> Iterator[Any]:
    """The values that nested lists, tuples and dicts hold.

    Every torch function of a shard asks, and torch's ``tree_leaves`` takes seven times as long.
    """
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


_REASONS = {
    "data_ptr": ", and a shard without elements has no address: a trainer that finds parameters of "
    "an optimizer by it cannot prepare a sharded model, zerocore.integrations can",
    "storage": ", and safetensors.torch looks for tied tensors by it: zerocore.load_safetensors "
    "and zerocore.save_safetensors read and write the same files",
    **dict.fromkeys(
        ("all_reduce", "all_reduce_coalesced", "reduce"),
        ", and the backward has averaged gradients over the ranks: leave out lines that average "
        "them by hand",
    ),
}


def refuse(name: str, shard: Placed, reason: str = "") -> NoReturn:
    """Raises the error for a function that has no meaning on a shard.

    A TypeError; but a RuntimeError from what Python's operators call: of a TypeError they would
    make "unsupported operand type(s)", and the advice would be lost.
    """
    reason = reason or _REASONS.get(name, "")
    kind = RuntimeError if base_of(name) in BEHIND_OPERATORS else TypeError
    raise kind(
        f"{name}() of {shard.what} '{shard.fqn}' would only see this rank's elements "
        f"({shard.place.text}){reason}. "
        f"{_advice_in_step()}{_advice_on_operator(name)}Call .full_tensor() on all "
        "ranks for the full value, .local() for the local elements as a plain tensor; to change "
        "it, use `with zerocore.unsharded(model, write_back=True)`; to save, "
        "zerocore.full_state_dict(model), in save_pretrained as state_dict="
    )


def _advice_on_operator(name: str) -> str:
    if "::" not in name or is_elementwise(name):
        return ""
    return (
        "If the operator computes each element from the elements at its place alone, declare it: "
        f"zerocore.register_elementwise('{name}'). "
    )


def _advice_in_step() -> str:
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        optimizer = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            return (
                f"{name} needs full parameters. If its update of a parameter needs no other one, "
                f"build it as zerocore.matrices.owned({name}, params, ...), which gives each "
                "parameter to one rank in full. "
            )
    return ""
