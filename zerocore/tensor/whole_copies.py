"""Pickles and copies parameters of stage 0 alone.

They are views of one storage for each unit, and torch would save or copy the whole storage. It also
refuses to save one that has several dtypes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from zerocore.common.patching import around

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # models, by their storages
_pickled: dict[Any, Any] = {}  # storages of copies in the current pickle, by what they copy


def note_memory(state: Any, tensor: Tensor) -> None:
    """Notes that the storage of ``tensor`` belongs to the model of ``state``."""
    _owners[tensor.untyped_storage()._cdata] = state


def _key(tensor: Tensor) -> Any:
    """Names the elements of a tensor over a model's memory; None for any other tensor."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper of torch.func
        return None
    if storage not in _owners:
        return None
    return storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


@around
def pickles_alone(reduce: Any, tensor: Tensor, proto: Any) -> Any:
    """Wraps ``Tensor.__reduce_ex__``; names of one parameter share memory in a file."""
    key = _key(tensor)
    if key is None or isinstance(tensor, nn.Parameter):  # torch reduces a parameter's data
        return reduce(tensor, proto)
    storage = _pickled.get(key, lambda: None)()
    if storage is None:
        for old in [each for each, known in _pickled.items() if known() is None]:
            del _pickled[old]
        storage = tensor.detach().clone().untyped_storage()
        _pickled[key] = ref(storage)  # the pickler keeps the storage alive
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, 0, tensor.shape, _dense_strides(tensor))
    return reduce(copy, proto)


@around
def copies_alone(deepcopy: Any, tensor: Tensor, memo: dict[Any, Any]) -> Any:
    """Wraps ``Tensor.__deepcopy__``."""
    key = _key(tensor)
    if key is None or id(tensor) in memo or tensor.grad_fn is not None:
        return deepcopy(tensor, memo)
    alone = memo.get(key)
    if alone is None:
        alone = memo[key] = tensor.detach().clone()
    copy = alone.detach().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()
