"""Notes writes to shards between calls: all ranks must write the same.

Each rank writes only its own elements, so the ranks compare the arguments of the writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocore.common import late
from zerocore.common.agreement import checksum
from zerocore.layout.place import Place
from zerocore.tensor.functions import is_foreach
from zerocore.tensor.placed import Placed, PlacedParameter, local_of

copied_views: Any = WeakIdKeyDictionary()  # views of larger tensors, by parameter or gradient
_SAMPLE = 1 << 20  # the most elements of a tensor that are compared


def note_writes(name: str, changed: Sequence[Any], other_args: Sequence[Any]) -> None:
    """Notes that function ``name`` has written to the shards ``changed``.

    ``other_args`` are its other arguments. The ranks compare them in the message that ends the next
    pass; the write itself sends none.
    """
    unique = list({id(shard): shard for shard in changed}.values())
    for number, shard in enumerate(unique):
        param = _param_of(shard)
        state = None if param is None else param.state_ref()
        if param is None or state is None or not state.engine.takes_notes:
            continue
        lists = (v for v in other_args if is_foreach(name) and isinstance(v, list | tuple))
        rows = {id(v): v[number] for v in lists if len(v) == len(unique)}
        text = repr([name, *(_told(rows.get(id(v), v), param.place) for v in other_args)])
        state.engine.note_write(param.unit, param.position, crc32(text.encode()))


def note_full(param: Any, value: Tensor) -> None:
    """Notes that ``param``, of ``shard`` or ``fully_shard``, is set to its part of ``value``."""
    state = param.state_ref()
    if state is not None and state.engine.takes_notes:
        state.engine.note_write(param.unit, param.position, _sum_of(value))


def note_copied(shard: Any, value: Tensor) -> None:
    """Notes that a parameter or gradient has copied ``value``, which may be a larger one's view."""
    copied_views.pop(shard, None)
    if not isinstance(value, Placed) and value.untyped_storage().nbytes() > value.nbytes:
        copied_views[shard] = late.call("view_of", shard, value)


def _param_of(shard: Any) -> Any:
    """Returns the parameter whose memory ``shard`` shares, if there is one."""
    if isinstance(shard, PlacedParameter):
        return shard
    param: Any = getattr(shard, "owner", lambda: None)()
    if not isinstance(param, PlacedParameter):
        return None
    storages = {local_of(tensor).untyped_storage()._cdata for tensor in (param, shard)}
    return param if len(storages) == 1 else None


def _told(value: Any, place: Place) -> Any:
    """Returns the part of an argument that the ranks compare: numbers, and full tensors. Shards and
    local elements differ between ranks, and a number on a device would have to be waited for."""
    if isinstance(value, list | tuple):
        return [_told(item, place) for item in value]
    if not isinstance(value, Tensor) or isinstance(value, Placed):
        return value if isinstance(value, int | float | complex) else None
    if value.shape == place.global_shape and not _may_be_local(place):
        return _sum_of(value.wait() if hasattr(value, "wait") else value)  # a collective's
    return value.item() if value.dim() == 0 and value.is_cpu else None


def _may_be_local(place: Place) -> bool:
    """Whether some rank may own all of a vector: its local elements then have the full shape. The
    answer is the same on all ranks."""
    if len(place.global_shape) != 1 or place.group is None:
        return False
    numel = place.global_shape.numel()
    return place.cut is None or any(end - begin == numel for begin, end in place.ranges)


def _sum_of(value: Tensor) -> int:
    flat = value.detach().reshape(-1)
    return 0 if flat.is_meta else int(checksum(flat[:: 1 + flat.numel() // _SAMPLE]))
