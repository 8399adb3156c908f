"""A shard that is some rows of a parameter: a DTensor, and what the engine knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerocore._C import count_as_data, count_view_as_data
from zerocore.layout.place import Place
from zerocore.tensor import pending_host_updates
from zerocore.tensor.earlier import current
from zerocore.tensor.noted_writes import note_full
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import IS_ROWS, OTHER, Placed, leaf_of, local_of, shard_in
from zerocore.tensor.shard import LocalShard, as_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(eq=False)
class RowShard:
    """Of a DTensor what a :class:`ShardedParameter` knows of itself, by the same names."""

    fqn: str
    state_ref: Callable[[], Any]
    unit: int
    position: int
    elements: Tensor
    model_weight: Tensor | None = None
    on_host: bool = False
    on_disk: bool = False
    # Of the two objects that exchange their tensors: the other one. Weak in that of the hidden one.
    other: Any = None


_rows: Any = WeakTensorKeyDictionary()
# Calls of fully_shard, and what makes the engine of one. Not by parameter: torch swaps no tensor
# that has a weak reference.
_late: WeakKeyDictionary[Any, Callable[[Any], Any]] = WeakKeyDictionary()


def note_rows(param: Tensor, hidden: Tensor, shard: RowShard) -> None:
    """``param``, a DTensor, is a shard of an engine; it exchanges its tensor with ``hidden``."""
    _rows[param], _rows[hidden] = replace(shard, other=hidden), replace(shard, other=ref(param))


def forget_rows(*params: Tensor | None) -> None:
    """The engine of the two objects of a parameter is gone."""
    for param in params:
        _rows.pop(param, None)


def seen_shard(full: Any) -> Any:
    """The shard of a full parameter, if programs see this object. None of a hidden one, and where a
    pipeline's schedule adds the gradients of full parameters itself."""
    known = _rows.get(full)
    shard = vars(full).get(OTHER) if known is None else known.other
    if shard is None or isinstance(shard, ref):
        return None
    state = (known or shard).state_ref()
    return None if state is None or state.engine.defers_reductions else shard


def shard_of(param: Any) -> ShardedParameter | RowShard | None:
    """The shard of an engine that a parameter is, of either kind; None for another parameter."""
    shard: Any = shard_in(param)
    return _rows.get(current(param)) if shard is None else shard


def note_late(group: Any, make: Callable[[Any], Any]) -> None:
    """The ``params`` of ``group`` get an engine late: ``make(group)`` makes it, if need be."""
    _late[group] = make


def ready_shard_of(param: Any) -> ShardedParameter | RowShard | None:
    """As :func:`shard_of`; makes an engine that is made late, which is collective."""
    shard = shard_of(param)
    if shard is not None:
        return shard
    for group, make in list(_late.items()):
        if any(each.param is param for each in group.params):
            make(group)
            return _rows.get(param)
    return None


def counts_writes(data: Any) -> property:
    """The attribute ``data`` of DTensors, made from torch's ``data``: writes through it count, for
    a shard, and values that it is set to are copied, where torch would change nothing.

    Raises:
        ValueError: set to another dtype or shape, or to a DTensor that is placed in another way.
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
    """This rank's part of a value that ``data`` of the DTensor is set to."""
    facts = (value.shape, value.dtype)
    if not hasattr(value, "_spec") and facts == (param.shape, param.dtype):
        if (shard := shard_of(param)) is not None:
            note_full(shard, value)
        return part_like(param, value)
    if facts != (param.shape, param.dtype) or value._spec.placements != param._spec.placements:
        name = getattr(shard_of(param), "fqn", "of zerocore.fsdp")
        raise ValueError(
            f"data of parameter '{name}' takes a tensor of {param.dtype} and shape "
            f"{tuple(param.shape)}, the full one or a DTensor placed as {param.placements}, but "
            f"was set to {type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}, "
            f"placed as {getattr(value, 'placements', 'a plain tensor')}"
        )
    local: Tensor = value._local_tensor
    return local


def part_like(param: Any, full: Tensor) -> Tensor:
    """This rank's part of a full value of a DTensor; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    value: Any = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
    return local_part(value)


def local_part(tensor: Any) -> Tensor:
    """A DTensor's part of this rank, a plain tensor on the same memory; any other as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def own_elements(value: Any, reads_only: bool = False) -> Tensor:
    """This rank's part of a shard or DTensor, or all of a plain tensor, on its memory; changes
    count as those of ``value``, and there is no gradient. Of a parameter also while it is shown in
    full, from any thread."""
    if (known := shard_of(value)) is not None:
        (pending_host_updates.finish_updates if reads_only else pending_host_updates.finish)()
        return known.elements.detach()
    return local_of(value) if isinstance(value, Placed) else local_part(value).detach()


def at_origin(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own, from the begin on.

    ``torch.save`` and ``copy.deepcopy`` take a DTensor with a storage offset for one that has data.
    """
    begin = tensor.storage_offset() * tensor.element_size()
    memory: Any = tensor.untyped_storage()
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return own.set_(memory[begin : begin + tensor.nbytes], 0, tensor.shape, tensor.stride())


def as_dtensor(local: Tensor, like: Any) -> DTensor:
    """A DTensor over ``local``, this rank's dense part, placed as ``like``, without a gradient."""
    from torch.distributed.tensor import DTensor  # late: takes a second

    from zerocore.tensor.dtensors import spec_as

    spec = like._spec if local.dtype == like.dtype else spec_as(like._spec, local.dtype)
    return DTensor(local, spec, requires_grad=False)


def as_part(local: Tensor, like: Tensor) -> Tensor:
    """A DTensor over ``local``, if ``like`` is one."""
    return as_dtensor(at_origin(local), like) if hasattr(like, "_spec") else local


def groups_of(param: Any) -> Sequence[dist.ProcessGroup]:
    """The groups of ranks that have other parts of a shard; one for each mesh dimension."""
    if isinstance(param, ShardedParameter):
        return param.place.groups
    spec = getattr(param, "_spec", None)
    if spec is None:
        return ()
    cut = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    return tuple(spec.mesh.get_group(dim) for dim in cut if spec.mesh.size(dim) > 1)


# -- as a range of elements, which checkpoints know --------------------------------------------


def place_of(param: Any) -> Place | None:
    """Where this rank's elements lie in the full parameter, in memory order; None for what is no
    shard of an engine, ValueError for a DTensor that tensor parallelism cuts, too."""
    if isinstance(param, Placed):
        return param.place
    shard = shard_of(param) if hasattr(param, "_spec") else None
    if not isinstance(shard, RowShard):
        return None
    if len(_cut_dims(param)) != 1:
        raise ValueError(
            f"parameter '{shard.fqn}' is cut in several ways, {tuple(param._spec.placements)}: "
            "this rank's part is no range of its elements. Save it with "
            "torch.distributed.checkpoint"
        )
    return own_place_of(param, shard)


def own_place_of(param: Any, shard: RowShard) -> Place:
    """Where this rank's rows lie in what the ranks of its mesh share: where tensor parallelism cuts
    the parameter, too, that is one part of it."""
    state, dim = shard.state_ref(), _cut_dims(param)[0]
    rows = state.engine.spec(shard.unit, shard.position).shape
    full = torch.empty(rows, device="meta").movedim(0, dim)
    ranks = state.ranks_of(shard.unit)
    owned = state.engine.layout(shard.unit).owned(shard.position, ranks.shard_rank)
    strides = full.stride() if dim > 0 else None
    return Place(shard.fqn, full.shape, (owned.begin, owned.end), ranks.shard, strides)


def cuts_of(param: Any) -> list[int]:
    """The dimensions along which ranks have other parts than those that share this one."""
    if isinstance(param, ShardedParameter):
        return [] if param.place.part is None else [param.place.part.dim]
    return _cut_dims(param)[1:]


def elements_of(value: Any, param: Any) -> Tensor:
    """This rank's elements of a value of the parameter's shape, 1-D, in the order of its place; on
    the same memory if they lie in it in this order."""
    if isinstance(param, ShardedParameter):
        return local_of(value)
    return _rows_of(own_elements(value), param)


def as_range(value: Tensor, param: Any) -> Any:
    """A DTensor of the parameter's shape as a shard at its place, on the same memory; any other
    value as it is. ValueError for a DTensor that no engine knows, NotImplementedError for one
    around other tensors."""
    if not hasattr(value, "_spec"):
        return value
    shard = shard_of(param)
    if not isinstance(shard, RowShard) or value.shape != param.shape:
        raise ValueError(
            f"a DTensor of shape {tuple(value.shape)} is no part of a model of zerocore.fsdp: "
            "save it with torch.distributed.checkpoint"
        )
    if hasattr(local_part(value), "__tensor_flatten__"):
        raise NotImplementedError(
            f"parameter '{shard.fqn}' is a {type(local_part(value)).__name__}, which says itself "
            "what it consists of; save this model with torch.distributed.checkpoint"
        )
    place = place_of(param)
    assert place is not None
    return as_shard(_rows_of(value, param), place)


def as_rows(value: Any, param: Any) -> Any:
    """A shard of :func:`as_range` as a DTensor again, on its memory; any other value as it is."""
    if not isinstance(value, LocalShard) or not hasattr(param, "_spec"):
        return value
    dim, shape = _cut_dims(param)[0], local_part(param).shape
    sizes = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    return as_part(local_of(value).view(sizes).movedim(0, dim), param)


def _rows_of(value: Tensor, param: Any) -> Tensor:
    return local_part(value).detach().movedim(_cut_dims(param)[0], 0).reshape(-1)


def _cut_dims(param: Any) -> list[int]:
    return [each.dim for each in param._spec.placements if not each.is_replicate()]
