"""Compares the ranks' intentions, so that a mistake on one rank is an error on all."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerocore._C import crc32
from zerocore.common.alarm import waiting
from zerocore.common.groups import check_exists

T = TypeVar("T")
Groups = Sequence[dist.ProcessGroup]
_COMPARISON = "a comparison of the ranks"
_BLOCK = 2**20  # elements that one sum covers


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether the group's other ranks are not real."""
    check_exists(group)
    return dist.get_backend(group) in ("fake", "emulated")


def real_groups(groups: Groups) -> list[dist.ProcessGroup]:
    """Returns the groups whose other ranks are real."""
    return [group for group in groups if not is_simulated(group)]


def agree(
    groups: Groups, error: Exception | None, facts: list[Any], device: torch.device | None = None
) -> str:
    """Raises on every rank if any rank failed or if the ranks' facts differ.

    Args:
        groups: groups that reach all ranks, one after the other; simulated ones are skipped.
        error: this rank's error so far.
        facts: small picklable values, in the same order on all ranks.
        device: the model's, if known. NCCL sends objects from the current device, which is the
            first one on every rank if the script never sets it.

    Returns:
        A name that is the same on all ranks, and unique to this call.

    Raises:
        Exception: ``error`` itself on the rank it came from.
        RuntimeError: another rank failed; its message is included.
        ValueError: facts differ; the first difference is named.
    """

    def outcome() -> None:
        if error is not None:
            raise error

    digest = int.from_bytes(sha256(repr(facts).encode()).digest()[:7], "big")
    numbers = [int(error is not None), digest, -digest, secrets.randbits(62)]
    failed, most, least, name = highest(groups, numbers, device)
    if failed:
        on_all_ranks(groups, outcome, device)
    if most != -least:
        _compare(groups, facts, digest, device)
    return f"{name:016x}"


def highest(groups: Groups, numbers: list[int], device: torch.device | None) -> list[int]:
    """Returns the maximum of each number over the ranks; arguments as :func:`agree`. Collective."""
    with _on(device):
        for group in real_groups(groups):
            kinds = group._device_types
            here = next((kind for kind in kinds if kind.type == "cpu"), kinds[0])
            values = torch.tensor(numbers, dtype=torch.int64, device=here)
            with waiting(group, f"{_COMPARISON} ({len(numbers)} numbers)"):
                dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
            numbers = values.tolist()
    return numbers


def _compare(groups: Groups, facts: list[Any], digest: int, device: torch.device | None) -> None:
    """Raises ValueError if facts differ. Rank 0 and one rank for each other digest send facts."""
    digests = gather_objects(groups, [digest], device)
    expected = from_rank(groups, facts, device)
    for rank in sorted({digests.index(value) for value in digests} - {0}):
        theirs = from_rank(groups, facts, device, rank)
        if theirs != expected:
            raise ValueError(_difference(rank, expected, theirs))


class SharedError(ValueError):
    """An error of one rank that all ranks raise with its type, unless one has another error."""


def on_all_ranks(
    groups: Groups, action: Callable[[], T], device: torch.device | None = None
) -> list[T]:
    """Runs ``action`` on every rank, and returns the small picklable values of all ranks.

    Collective; arguments as :func:`agree`.

    Raises:
        Exception: the error of ``action`` on the rank where it failed; RuntimeError on the others.
            If all errors are :class:`SharedError`, all ranks raise its type.
    """
    error: Exception | None = None
    values: list[T] = []
    try:
        values = [action()]
    except Exception as caught:
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    shared = type(error) if isinstance(error, SharedError) else None
    answers = gather_objects(groups, [(message, shared, values)], device)
    failed = [(rank, *answer[:2]) for rank, answer in enumerate(answers) if answer[0] is not None]
    unshared = [failure for failure in failed if failure[2] is None]
    if error is not None and (shared is None or not unshared):
        raise error
    for rank, message, kind in unshared or failed:
        raise (kind or RuntimeError)(f"rank {rank} failed: {message}")
    return [value for *_, values in answers for value in values]


@contextmanager
def together(groups: Groups, device: torch.device | None = None) -> Iterator[list[Any]]:
    """Makes a rank's error in the block an error on all ranks; see :func:`agree`.

    Yields a list; facts that the block appends to it are compared, too.
    """
    facts: list[Any] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as caught:
        error = caught
    agree(groups, error, [] if error else facts, device)


def gather_objects(groups: Groups, objects: list[Any], device: torch.device | None) -> list[Any]:
    """Returns the picklable objects of all ranks, in order; arguments as :func:`agree`."""
    with _on(device):
        for group in real_groups(groups):
            gathered: list[Any] = [None] * group.size()
            with waiting(group, f"{_COMPARISON} (objects)"):
                dist.all_gather_object(gathered, objects, group=group)
            objects = [value for part in gathered for value in part]
    return objects


def from_rank(groups: Groups, value: T, device: torch.device | None = None, rank: int = 0) -> T:
    """Broadcasts the picklable value of a rank; arguments as :func:`agree`. Collective.

    ``rank`` is an index in the order of :func:`gather_objects`.
    """
    values = [value]
    steps = []
    for group in real_groups(groups):
        rank, place = divmod(rank, group.size())
        steps.append((group, place))
    with _on(device):
        for group, place in reversed(steps):
            with waiting(group, f"{_COMPARISON} (of rank {place})"):
                dist.broadcast_object_list(values, group=group, group_src=place)
    return values[0]


def _on(device: torch.device | None) -> AbstractContextManager[None]:
    """Makes a CUDA device current, because NCCL sends objects from it; does nothing for others."""
    return torch.cuda.device(device.index if device is not None and device.type == "cuda" else -1)


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor's elements as integers, 1-D."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = value.detach()
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return plain.contiguous().view(-1).view(kinds[plain.element_size()])


def checksum(value: torch.Tensor) -> torch.Tensor:
    """Returns an int64 that depends on the tensor's bits and their order: CRC-32 on the CPU,
    :func:`ordered_sum` on a device."""
    bits = bits_of(value)
    return torch.tensor(crc32(bits), device="cpu") if bits.is_cpu else ordered_sum(bits)


def ordered_sum(bits: torch.Tensor) -> torch.Tensor:
    """Returns the sum of 1-D integers, each with a weight by position: it depends on the order."""
    words = bits.view(torch.int32) if bits.element_size() == 8 else bits
    positions = torch.arange(max(1, min(len(words), _BLOCK)), device=bits.device)
    weights = _scattered(positions) | 1
    sums = torch.stack([(words_ * weights[: len(words_)]).sum() for words_ in words.split(_BLOCK)])
    return _scattered(sums + _scattered(torch.arange(len(sums), device=bits.device))).sum()


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """Returns a pseudo-random number for each int64."""
    for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47):  # SplitMix64's
        numbers = (numbers ^ (numbers >> 30)) * factor
    return numbers ^ (numbers >> 31)


def differing(groups: Groups, numbers: torch.Tensor) -> list[int]:
    """Returns the indices at which the ranks' 1-D int64 tensors differ; collective."""
    bounds = torch.stack([numbers, -numbers])
    for group in real_groups(groups):
        with waiting(group, f"{_COMPARISON} ({numbers.numel()} numbers)"):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    highest, lowest = bounds.tolist()
    return [index for index, high in enumerate(highest) if high != -lowest[index]]


def ranks_by_value(values: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Groups ranks by value, from pairs ``(rank, value)``, in order of first occurrence."""
    ranks: dict[int, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return list(ranks.values())


def _difference(rank: int, expected: list[Any], theirs: list[Any]) -> str:
    missing = object()
    pairs = zip_longest(expected, theirs, fillvalue=missing)
    first, second = next((one, other) for one, other in pairs if one != other)
    text = f"rank 0 has {first}, rank {rank} has {second}"
    if second is missing:
        text = f"only rank 0 has {first}"
    elif first is missing:
        text = f"only rank {rank} has {second}"
    return (
        f"the ranks shard different models: {text}; build the same model with the same options on "
        "every rank"
    )
