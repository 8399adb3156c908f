"""The base classes of shards, and the shards of state dicts.

A shard's shape is the full tensor's; its memory is 1-D and has this rank's elements. C++ sees the
memory, and so does Python while torch functions are disabled. ``zerocore/tensor/rules.py`` has the
rules of torch functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zerocore.common.agreement import checksum, highest
from zerocore.layout.place import Place
from zerocore.tensor import rules
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.pickling import goes_as_part, keep_owner, whole_of
from zerocore.tensor.placed import Placed, keep_place, local_of

_data: Any = torch._C.TensorBase.data
set_data = _data.__set__


class Shard(Placed):
    """The base class of all kinds of shards."""

    result_type: type[Tensor]  # the class of results of elementwise functions
    owner: Callable[[], Any]  # the parameter or gradient that it comes from, if any
    version: int  # version of ``owner``'s parameter, if this copies its values

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return rules.call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        start, end = self.shard_range
        local = local_of(self)
        return (
            f"{type(self).__name__}('{self.fqn}', global_shape={tuple(self.global_shape)}, "
            f"elements {start}:{end}, dtype={local.dtype}, device='{local.device}')"
        )

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor().item(), spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = keep_owner(keep_place(local_of(self).clone(), self), self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        if goes_as_part(self.place):
            # A copy, because the storage has other shards, too. Plain types, for weights_only.
            place = self.place
            facts = (place.fqn, tuple(place.global_shape), place.shard_range, place.strides)
            return rebuild_shard, (local_of(self).clone(), *facts)
        return whole_of(self).__reduce_ex__(proto)

    def own_part(self) -> Any:
        return as_shard(local_of(self).clone(), self.place.without_groups())

    # torch.distributed.checkpoint calls these on tensors that are parts of others.

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        from zerocore.layout.chunks import write_items

        return write_items(fqn, self.place, local_of(self))

    def __create_chunk_list__(self) -> list[Any]:
        from zerocore.layout.chunks import chunk_list

        return chunk_list(self.place)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        from zerocore.layout.chunks import find_chunk

        return find_chunk(self.place, local_of(self), index)


class InPlace(Shard):
    """A shard whose memory belongs to the engine: new values are copied there."""

    shape: torch.Size  # shape of the local elements, while torch functions are disabled
    # Weak: the state of its model. Results of functions of gradients have none.
    state_ref: Callable[[], Any] = staticmethod(lambda: None)
    aliases: list[ref[Any]]  # results of detach() and data

    def detach(self) -> Any:
        """Returns a shard on the same memory, until the parameter's ``data`` is replaced."""
        return self._alias(local_of(self))

    def _alias(self, local: Tensor) -> Any:
        shard: Any = local.as_subclass(self.result_type)
        shard.place, shard.owner = self.place, ref(self)
        self._note_alias(shard)
        return shard

    def _note_alias(self, shard: Any) -> None:
        live = [*self._live_aliases(), ref(shard)]
        self.__dict__.setdefault("aliases", live)[:] = live  # both objects of a pair have the list

    def _live_aliases(self) -> list[ref[Any]]:
        return [alias for alias in getattr(self, "aliases", ()) if alias() is not None]

    def _let_go(self, values: Tensor) -> None:
        """Lets tensors from an earlier ``data`` keep their values, as on a plain parameter."""
        for alias in self._live_aliases():
            set_data(alias(), values)
        self.__dict__.get("aliases", []).clear()

    def set_(self, source: Any) -> Any:
        """Copies ``source``, as setting ``data`` does; the memory stays the same."""
        self.data = source
        torch.autograd.graph.increment_version(self)  # type: ignore[arg-type]
        return self

    def _check_data(self, value: Tensor) -> None:
        local = local_of(self)
        if (value.dtype, value.device) != (local.dtype, local.device):
            raise TypeError(
                f"{self.what} '{self.fqn}' is sharded: its data takes {local.dtype} on "
                f"{local.device}, but was set to {value.dtype} on {value.device}. Change dtype "
                "and device before zerocore.shard"
            )

    def _check_averaged(self, value: Tensor, where: str) -> None:
        """Rejects full gradients that differ between ranks. Collective for each full one, and for
        each plain one of a vector: if one rank owns all of it, the shape alone does not tell."""
        state = self.state_ref()
        is_full = value.shape == self.global_shape
        is_local = self.place.group is not None and value.shape == self.shape
        is_vector = len(self.global_shape) == 1
        if state is None or isinstance(value, Placed) or not (is_full or (is_vector and is_local)):
            return
        number = int(checksum(value))
        facts = [is_full and not is_local, is_local and not is_full, number, -number]
        groups = state.ranks_holding(self.fqn).groups
        full, local, most, least = highest(groups, facts, value.device)
        if (full and local) or (not local and most != -least):
            raise ValueError(
                f"{where} of parameter '{self.fqn}' was set to full gradients that differ between "
                "the ranks. Average them first, with dist.all_reduce (torch.autograd.grad does "
                "not average), or call loss.backward(), which averages them"
            )

    def _part_of(self, value: Tensor, where: str) -> Tensor:
        """Returns this rank's elements of a value that ``where`` is set to; torch functions are
        disabled."""
        if not isinstance(value, Placed) and value.shape == self.global_shape:
            part = self.place.part_of(value.detach())
            return part if self.place.group is None else part.clone()  # frees the full value
        known = value.place if isinstance(value, Placed) else self.place
        if value.shape == self.shape and known.holds_same(self.place):
            return value
        if isinstance(value, Placed) and self.place.can_take(known):
            return self.place.take(local_of(value), known)
        actual = repr(value) if isinstance(value, Placed) else f"shape {tuple(value.shape)}"
        start, end = self.shard_range
        raise ValueError(
            f"{where} of parameter '{self.fqn}' takes a tensor of shape "
            f"{tuple(self.global_shape)}, or this rank's elements {start}:{end} of it, 1-D, but "
            f"was set to {actual}. Change a parameter's shape before zerocore.shard"
        )


class LocalShard(Shard, Tensor):  # type: ignore[misc]
    """A sharded parameter in a ``state_dict``: this rank's elements, with the full shape.

    Elementwise functions work on the local elements and return a shard. Norms and full reductions
    are computed over the full tensor, equal on all ranks, which must all call them. Others get the
    full tensor, which the ranks gather. ``torch.distributed.checkpoint`` saves and loads it as a
    part of the full tensor.
    """


LocalShard.result_type = LocalShard


def as_shard(local: Tensor, place: Place) -> LocalShard:
    """Makes a shard on the memory of ``local``, plain and 1-D."""
    shard = local.as_subclass(LocalShard)
    shard.place = place
    return shard


def rebuild_shard(
    data: Tensor,
    fqn: str,
    global_shape: tuple[int, ...],
    shard_range: tuple[int, int],
    strides: tuple[int, ...] | None,
) -> LocalShard:
    """Makes a shard from a file; it knows its place, but not the ranks that hold the rest."""
    place = Place(fqn, torch.Size(global_shape), shard_range, None, strides, is_own=True)
    return as_shard(data, place)
