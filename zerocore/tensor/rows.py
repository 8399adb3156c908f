"""Shards that are rows of a parameter: DTensors, with the engine's facts about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerocore._C import count_as_data, count_view_as_data
from zerocore.layout.cuts import Cut
from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates
from zerocore.tensor.earlier import current
from zerocore.tensor.noted_writes import note_copied, note_full
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import IS_ROWS, OTHER, Placed, leaf_of, local_of, shard_in
from zerocore.tensor.shard import LocalShard, as_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(eq=False)
class RowShard:
    """The facts about a DTensor that a :class:`ShardedParameter` has as attributes."""

    fqn: str
    state_ref: Callable[[], Any]
    unit: int
    position: int
    elements: Tensor
    model_weight: Tensor | None = None
    on_host: bool = False
    on_disk: bool = False
    is_whole: ClassVar[bool] = False
    # The other one of two objects that exchange their tensors. The hidden one refers weakly.
    other: Any = None


# By parameter that is no shard itself: a DTensor, or a whole one of stage 0.
_shards: Any = WeakTensorKeyDictionary()
# By group of a fully_shard call: the function that makes its engine. Not by parameter, because
# torch does not swap a tensor that has a weak reference.
_late: WeakKeyDictionary[Any, Callable[[Any], Any]] = WeakKeyDictionary()


def note_rows(param: Tensor, hidden: Tensor, shard: RowShard) -> None:
    """Notes that ``param``, a DTensor, is a shard that exchanges its tensor with ``hidden``."""
    _shards[param], _shards[hidden] = replace(shard, other=hidden), replace(shard, other=ref(param))


def note_whole(param: Tensor, shard: ShardedParameter) -> None:
    """Notes the hidden shard of a parameter that programs hold in full."""
    _shards[param] = shard


def held_shard(param: Any) -> Any:
    """Returns the shard of a parameter of a ``shard`` model, hidden or not; None for any other."""
    shard = shard_of(param)
    return shard if isinstance(shard, ShardedParameter) else None


def forget_rows(*params: Tensor | None) -> None:
    """Forgets the two objects of a parameter, whose engine is gone."""
    for param in params:
        _shards.pop(param, None)


def seen_shard(full: Any) -> Any:
    """Returns the shard of a full parameter, if programs see this object. None for a hidden one,
    and while a pipeline schedule accumulates gradients in full parameters itself."""
    known = _shards.get(full)
    shard = vars(full).get(OTHER) if known is None else known.other
    if shard is None or isinstance(shard, ref):
        return None
    state = (known or shard).state_ref()
    return None if state is None or state.engine.defers_reductions else shard


def shard_of(param: Any) -> ShardedParameter | RowShard | None:
    """Returns the shard, of either kind, of an engine's parameter; None for any other."""
    shard: Any = shard_in(param)
    is_other = shard is None and param is not None
    return _shards.get(current(param)) if is_other else shard


def note_late(group: Any, make: Callable[[Any], Any]) -> None:
    """Notes that ``make(group)`` makes the engine of the group's ``params`` when needed."""
    _late[group] = make


def ready_shard_of(param: Any) -> ShardedParameter | RowShard | None:
    """Returns :func:`shard_of`, and makes the engine first if need be, which is collective."""
    shard = shard_of(param)
    if shard is not None:
        return shard
    for group, make in list(_late.items()):
        if any(row.object is param for row in group.params):
            make(group)
            return _shards.get(param)
    return None


def counts_writes(data: Any) -> property:
    """Wraps the attribute ``data`` of DTensors. For a shard, writes through ``data`` count, and
    setting it copies the value; torch would change nothing.

    Raises:
        ValueError: it is set to another dtype or shape, or to a DTensor with other placements.
    """

    def get(tensor: Any) -> Any:
        alias: Any = data.__get__(tensor)
        count_view_as_data(local_part(tensor), local_part(alias))
        shard = shard_of(tensor)
        source = leaf_of(tensor) if shard is None else local_part(tensor)
        if source is not tensor:
            count_as_data(source, alias)
            count_as_data(source, alias._local_tensor)
        return alias

    @torch.no_grad()
    def assign(tensor: Any, value: Any) -> None:
        if leaf_of(tensor) is not tensor:
            get(tensor).copy_(value)
        elif IS_ROWS in vars(tensor) or shard_of(tensor) is not None:
            local_part(tensor).data.copy_(_own_part(tensor, value))
        else:
            data.__set__(tensor, value)

    return property(get, assign, doc=data.__doc__)


def _own_part(param: Any, value: Any) -> Tensor:
    """Returns this rank's part of a value that a DTensor's ``data`` is set to."""
    facts = (value.shape, value.dtype)
    if not hasattr(value, "_spec") and facts == (param.shape, param.dtype):
        if (shard := shard_of(param)) is not None:
            note_full(shard, value)
        note_copied(param, value)
        return part_like(param, value)
    if facts != (param.shape, param.dtype) or value._spec.placements != param._spec.placements:
        name = getattr(shard_of(param), "fqn", "of zerocore.fsdp")
        raise ValueError(
            f"data of parameter '{name}' takes a tensor of {param.dtype} and shape "
            f"{tuple(param.shape)}, a full tensor or a DTensor with placements "
            f"{param.placements}, but was set to {type(value).__name__} of {value.dtype}, shape "
            f"{tuple(value.shape)} and placements {getattr(value, 'placements', None)}"
        )
    local: Tensor = value._local_tensor
    return local


def part_like(param: Any, full: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor's full value; communicates nothing."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    value: Any = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
    return local_part(value)


def local_part(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor, plain, on the same memory; any other unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def own_elements(value: Any, reads_only: bool = False) -> Tensor:
    """Returns this rank's part of a shard or DTensor, or a whole plain tensor, on its memory and
    without a gradient; writes count as writes to ``value``. It also works while a parameter is
    full, from any thread."""
    known = shard_of(value)
    if known is not None and known.is_whole:
        follow(known)
    elif known is not None:
        (pending_host_updates.finish_updates if reads_only else pending_host_updates.finish)()
        return known.elements.detach()
    return local_of(value) if isinstance(value, Placed) else local_part(value).detach()


def at_origin(tensor: Tensor) -> Tensor:
    """Returns a tensor on the same memory, with a storage of its own, as ``torch.save`` expects."""
    begin = tensor.storage_offset() * tensor.element_size()
    memory: Any = tensor.untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory[begin : begin + tensor.nbytes], 0, tensor.shape, tensor.stride())


def as_dtensor(local: Tensor, like: Any) -> DTensor:
    """Makes a DTensor over ``local``, this rank's dense part, with the placements of ``like``."""
    from torch.distributed.tensor import DTensor  # late: takes a second

    from zerocore.tensor.dtensors import spec_as

    spec = like._spec if local.dtype == like.dtype else spec_as(like._spec, local.dtype)
    begin = local.as_strided(local.shape, local.stride(), 0)  # deepcopy expects no storage offset
    made = DTensor(begin, spec, requires_grad=False)
    made._local_tensor = local
    return made


def as_part(local: Tensor, like: Tensor) -> Tensor:
    """Makes a DTensor over ``local`` if ``like`` is one."""
    return as_dtensor(at_origin(local), like) if hasattr(like, "_spec") else local


def groups_of(param: Any) -> Sequence[dist.ProcessGroup]:
    """Returns the groups whose ranks have other parts of a shard's tensor, one per dimension."""
    if isinstance(param, ShardedParameter):
        return param.place.groups
    spec = getattr(param, "_spec", None)
    if spec is None:
        return ()
    cut = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    return tuple(spec.mesh.get_group(dim) for dim in cut if spec.mesh.size(dim) > 1)


# -- as a range of elements, for checkpoints ---------------------------------------------------


def place_of(param: Any) -> Place | None:
    """Returns the place of this rank's elements in the full parameter, in memory order; None
    without a shard of an engine, ValueError for a DTensor that tensor parallelism also cuts."""
    if isinstance(param, Placed):
        return param.place
    shard = shard_of(param)
    if isinstance(shard, ShardedParameter):
        return shard.place
    if not isinstance(shard, RowShard):
        return None
    if len(_cut_dims(param)) != 1:
        raise ValueError(
            f"parameter '{shard.fqn}' is sharded over several mesh dimensions, as "
            f"{tuple(param._spec.placements)}: this rank's elements are not one range. Save it "
            "with torch.distributed.checkpoint"
        )
    return own_place_of(param, shard)


def own_place_of(param: Any, shard: RowShard) -> Place:
    """Returns the place of this rank's rows in the tensor that the ranks of its mesh share. If
    tensor parallelism also cuts the parameter, that tensor is one part of it."""
    state, dim = shard.state_ref(), _cut_dims(param)[0]
    rows = state.engine.spec(shard.unit, shard.position).shape
    full = torch.empty(rows, device="meta").movedim(0, dim)
    ranks = state.ranks_of(shard.unit)
    cut = Cut.of(state.engine.layout(shard.unit), shard.position)
    strides = full.stride() if dim > 0 else None
    elements = cut.owned(ranks.shard_rank)
    return Place(shard.fqn, full.shape, elements, ranks.shard, strides, cut=cut)


def cuts_of(param: Any) -> list[int]:
    """Returns the dimensions along which other ranks have other parts of a larger tensor."""
    if (shard := held_shard(param)) is not None:
        return [] if shard.place.part is None else [shard.place.part.dim]
    return _cut_dims(param)[1:]


def elements_of(value: Any, param: Any) -> Tensor:
    """Returns this rank's elements of a value of the parameter's shape, 1-D, in the order of its
    place; on the same memory if the memory has this order."""
    if (shard := held_shard(param)) is not None:
        follow(shard)
    if isinstance(param, ShardedParameter):
        return local_of(value)
    if not hasattr(param, "_spec"):
        return in_memory_order(value, param)
    return _rows_of(own_elements(value), param)


def as_range(value: Tensor, param: Any) -> Any:
    """Returns a DTensor of the parameter's shape as a shard at its place, on the same memory; any
    other value unchanged. Raises ValueError for a DTensor without an engine, NotImplementedError
    for one around other tensors."""
    if not hasattr(value, "_spec"):
        return value
    shard = shard_of(param)
    if not isinstance(shard, RowShard) or value.shape != param.shape:
        raise ValueError(
            f"a DTensor of shape {tuple(value.shape)} does not belong to a model of "
            "zerocore.fsdp: save it with torch.distributed.checkpoint"
        )
    if hasattr(local_part(value), "__tensor_flatten__"):
        raise NotImplementedError(
            f"parameter '{shard.fqn}' is a {type(local_part(value)).__name__}, a tensor subclass "
            "around other tensors: save this model with torch.distributed.checkpoint"
        )
    place = place_of(param)
    assert place is not None
    return as_shard(_rows_of(value, param), place)


def as_rows(value: Any, param: Any) -> Any:
    """Returns a shard of :func:`as_range` as a DTensor again, on its memory; others unchanged."""
    if not isinstance(value, LocalShard) or not hasattr(param, "_spec"):
        return value
    dim, shape = _cut_dims(param)[0], local_part(param).shape
    sizes = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    return as_part(local_of(value).view(sizes).movedim(0, dim), param)


def follow(shard: Any) -> None:
    """Lets the hidden shard of a parameter follow the memory that a program has set as ``data``."""
    if shard.is_whole and (state := shard.state_ref()) is not None:
        state.engine.follow(shard.unit)


def in_memory_order(value: Tensor, param: Tensor) -> Tensor:
    """Returns the elements of a plain tensor, 1-D, in the order of the parameter's memory; on the
    same memory if that has this order."""
    value = value.detach()
    if value.stride() != param.stride():
        value = torch.empty_like(param).copy_(value)
    return value.as_strided((value.numel(),), (1,))


def _rows_of(value: Tensor, param: Any) -> Tensor:
    return local_part(value).detach().movedim(_cut_dims(param)[0], 0).reshape(-1)


def _cut_dims(param: Any) -> list[int]:
    return [placement.dim for placement in param._spec.placements if not placement.is_replicate()]
