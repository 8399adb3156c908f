"""Moves training state off the device for a while, such as for a rollout on the same device."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore._C import HostMemory, free_memory, move_window, take_memory
from zerocore.model.state import ShardState, ready_state_of
from zerocore.tensor.placed import leaves
from zerocore.tensor.rows import own_elements

_ALIGNMENT = 256
_MESSAGE = "this tensor is parked: leave `with zerocore.parked(...)` before you use it"
# Keys in ``state.kept``: the parked memory of each unit, then of other tensors; and the host's
# memory, which stays for the next time.
_PARKED, _HOST = "parked", "host memory of parked"


@dataclass
class Memory:
    """Memory of several tensors, on the device or in copies on the host."""

    tensors: list[Tensor]  # 1-D bytes, each a whole storage
    copies: list[Tensor] = field(default_factory=list)  # on the host; empty unless parked
    # Tensors with storages of their own on parts of ``tensors``, and these parts.
    windows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def save(self) -> None:
        """Copies the memory to the host."""
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            copy.copy_(tensor, non_blocking=True)

    def leave(self) -> None:
        """Frees the memory on the device."""
        for tensor in (*self.tensors, *(window for window, _ in self.windows)):
            if self.copies and tensor.nbytes > 0:
                free_memory(tensor, _MESSAGE)

    def bring(self, count: int | None = None, take: Callable[[Tensor], None] = take_memory) -> None:
        """Takes memory on the device for the first ``count`` tensors, and copies their values."""
        brought = set()
        for tensor, copy in list(zip(self.tensors, self.copies, strict=False))[:count]:
            take(tensor)
            tensor.copy_(copy, non_blocking=True)
            brought.add(tensor.untyped_storage()._cdata)
        for window, part in self.windows:
            if window.nbytes > 0 and part.untyped_storage()._cdata in brought:
                move_window(window, part)


def memory_of(state: ShardState, unit: int) -> Memory:
    """Returns the memory of a unit of a parked model; an empty one if it is not parked."""
    parked = state.kept.get(_PARKED)
    return Memory([]) if parked is None else parked[unit]


@contextmanager
def parked(model: nn.Module, *optimizers: Optimizer, to: str = "cpu") -> Iterator[None]:
    """Moves a sharded model's state off the device within the block; all ranks must enter.

    Parameters, main weights and gradients of the model and the states of ``optimizers`` go to one
    mapping of host memory, and the bucket pool is freed. The mapping stays for the next time.
    Afterwards all bits are the same, at other addresses. Inside, the model and its optimizer may
    not be used; :func:`export` takes weights from the host. With ``registered=True``, the group's
    backend gets its memory back, and NCCL keeps it.

    Args:
        to: ``"cpu"``, the only place so far.

    Raises:
        ValueError: the model is not sharded, or ``to`` is another place.
        RuntimeError: the model is parked already; there is not enough host memory.
    """
    if to != "cpu":
        raise ValueError(f'to must be "cpu", got {to!r}')
    state = ready_state_of(model)
    state.finish_reads()
    state.engine.set_parked(True)
    memories = _find(state, optimizers)
    try:
        _give_copies(state, memories)
        for memory in memories:
            memory.save()
        _synchronize(state.device)
    except BaseException:
        state.engine.set_parked(False)
        raise
    for memory in memories:
        memory.leave()
    state.kept[_PARKED] = memories
    try:
        yield
    finally:
        del state.kept[_PARKED]
        for memory in memories:
            memory.bring(take=state.engine.take_memory)
        _synchronize(state.device)
        state.engine.set_parked(False)


def _find(state: ShardState, optimizers: Sequence[Optimizer]) -> list[Memory]:
    units = [Memory(state.engine.device_memory(unit.index)) for unit in state.units]
    storages = {tensor.untyped_storage()._cdata for memory in units for tensor in memory.tensors}

    def take(values: Iterable[Any]) -> list[Tensor]:
        """Returns each other storage of these tensors on the device, as bytes."""
        found = []
        for plain in (own_elements(value) for value in values if isinstance(value, Tensor)):
            if plain.device.type != state.device.type or hasattr(plain, "__tensor_flatten__"):
                continue
            storage = plain.untyped_storage()
            if storage._cdata not in storages and storage.nbytes():
                storages.add(storage._cdata)
                bytes_of: Any = torch.empty(0, dtype=torch.uint8, device=plain.device)
                found.append(bytes_of.set_(storage, 0, (storage.nbytes(),), (1,)))
        return found

    windows = []
    for param in chain.from_iterable(unit.params for unit in state.units):
        seen = (param.object, param.object.grad) if param.is_whole else ()
        windows += take((param.shard, *seen))
    _add_windows(units, windows)
    states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    return [*units, Memory(take(leaves([list(each.values()) for each in states])))]


def _add_windows(units: list[Memory], storages: list[Tensor]) -> None:
    """Adds storages on a unit's memory, also on another unit's: a program may have moved them."""
    places = sorted(
        ((tensor.data_ptr(), tensor, memory) for memory in units for tensor in memory.tensors),
        key=itemgetter(0),
    )
    for window in storages:
        address = window.data_ptr()
        for begin, tensor, memory in places[: bisect(places, address, key=itemgetter(0))][-1:]:
            if address < begin + tensor.nbytes:
                part = tensor[address - begin :][: window.nbytes]
                memory.windows.append((window, part))


def _give_copies(state: ShardState, memories: list[Memory]) -> None:
    tensors = [tensor for memory in memories for tensor in memory.tensors]
    sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    ends = list(accumulate(sizes, initial=0))
    host = state.kept.get(_HOST)
    if host is None or host.nbytes < ends[-1]:
        pinned = ends[-1] if state.device.type == "cuda" else 0
        state.kept[_HOST] = host = HostMemory(ends[-1], pinned_nbytes=pinned, inherited=True)
    views = iter([host.view(begin, t.nbytes, torch.uint8) for begin, t in zip(ends, tensors)])  # noqa: B905
    for memory in memories:
        memory.copies = [next(views) for _ in memory.tensors]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
