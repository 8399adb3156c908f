"""The place of a shard in its tensor, and the ways from the full value to the shard and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore.common.alarm import waiting
from zerocore.layout.cuts import Cut


def spread(
    group: dist.ProcessGroup, value: Tensor | None, shape: torch.Size, like: Tensor
) -> Tensor:
    """Broadcasts the first rank's ``value`` of ``shape``, in the dtype of ``like``; collective."""
    sent = torch.empty(shape, dtype=like.dtype, device=like.device)
    if value is not None:
        sent.copy_(value)
    with waiting(group, "a broadcast of parts"):
        dist.broadcast(sent, group=group, group_src=0)
    return sent


@dataclass(frozen=True)
class PartOf:
    """A larger tensor that has a parameter as its part along one dimension."""

    # The ranks that hold all parts, each as a parameter of its own: see
    # :class:`zerocore.ParameterMesh`. None in a shard that was loaded from a file.
    group: dist.ProcessGroup | None
    shape: torch.Size
    dim: int
    begin: int  # index along ``dim`` of the parameter's first element

    @property
    def origin(self) -> tuple[int, ...]:
        """The index of the parameter's first element."""
        return tuple(self.begin if dim == self.dim else 0 for dim in range(len(self.shape)))

    def gather(self, part: Tensor) -> Tensor:
        """Gathers the larger tensor, a new one, from each rank's part; collective."""
        whole = part.new_zeros(self.shape)
        whole.narrow(self.dim, self.begin, part.shape[self.dim]).copy_(part)
        assert self.group is not None
        _sum_bytes(whole.view(-1), self.group, "a gather of parts")
        return whole


@dataclass(frozen=True)
class Place:
    """The place of a local shard in its parameter.

    Attributes:
        fqn: name of the parameter.
        global_shape: shape of the full parameter.
        shard_range: ``(start, end)`` of this rank's elements. Elements of a parameter that is not
            C-contiguous (channels_last) count in memory order.
        group: the ranks that share the parameter; None if every rank holds all of it, and in a
            shard that was loaded from a file.
        strides: of the full parameter; None if it is C-contiguous.
        part: the larger tensor that the parameter is a part of; None without one.
        cut: the elements of the other ranks; None in a shard that was loaded from a file.
        is_own: the shard is a copy for files or other processes, and has only this rank's part.
    """

    fqn: str
    global_shape: torch.Size
    shard_range: tuple[int, int]
    group: dist.ProcessGroup | None = None
    strides: tuple[int, ...] | None = None
    part: PartOf | None = None
    cut: Cut | None = None
    is_own: bool = False

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold different elements, and together all of them."""
        groups = (self.group, None if self.part is None else self.part.group)
        return tuple(group for group in groups if group is not None)

    @property
    def whole_shape(self) -> torch.Size:
        """The shape in files: of the larger tensor, if there is one."""
        return self.global_shape if self.part is None else self.part.shape

    def without_groups(self) -> Place:
        """Returns the same place for another process."""
        part = None if self.part is None else replace(self.part, group=None)
        return replace(self, group=None, part=part, cut=None, is_own=True)

    def holds_same(self, other: Place) -> bool:
        """Whether shards at both places hold the same elements in the same layout; on all ranks, if
        both know their cut.

        A place from a file knows no group, and matches any.
        """
        if self.cut is None or other.cut is None:
            return len({self.group, other.group} - {None}) < 2 and self.elements == other.elements
        is_alike = (self.global_shape, self.strides) == (other.global_shape, other.strides)
        is_alike = is_alike and self.group is other.group
        return is_alike and (self.cut == other.cut or self.ranges == other.ranges)

    def can_take(self, other: Place) -> bool:
        """Whether :meth:`take` accepts a shard at the ``other`` place; the same on all ranks if
        both know their cut."""
        is_known = self.cut is not None and other.cut is not None
        return self.holds_same(other) or (is_known and self.global_shape == other.global_shape)

    def take(self, local: Tensor, other: Place) -> Tensor:
        """Returns the elements of this place, from a tensor whose shard ``local`` is at ``other``.

        Collective, unless both places hold the same elements.
        """
        if self.holds_same(other):
            return local
        if self.group is None or self.group is not other.group or self.strides != other.strides:
            return self.part_of(other.gather(local))
        from zerocore.layout.moves import move  # late: most shards of a parameter are cut alike

        what = f"a move of '{other.fqn}' to the elements of '{self.fqn}'"
        return move(local, other.ranges, self.ranges, self.group, what)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of all ranks; the cut must be known."""
        assert self.cut is not None
        return self.cut.spans

    @property
    def elements(self) -> tuple[torch.Size, tuple[int, int], tuple[int, ...] | None]:
        """The full shape, the range and the strides, which identify the elements."""
        return self.global_shape, self.shard_range, self.strides

    @property
    def text(self) -> str:
        """The elements, as errors name them."""
        start, end = self.shard_range
        return f"{start}:{end} of shape {tuple(self.global_shape)}"

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all elements."""
        return self.group is None and self.shard_range == (0, self.global_shape.numel())

    @property
    def origin(self) -> str:
        """The origin, as errors name it, of a shard from a file with one rank's part."""
        return " from a file with one rank's part of it" if self.is_own else ""

    def check_whole(self) -> None:
        """Rejects a shard whose other elements are on unknown ranks (RuntimeError)."""
        if self.group is None and not self.is_whole:
            raise RuntimeError(
                f"'{self.fqn}': this is the part of one rank, elements {self.text}, from a file "
                "that this rank has saved; the other elements are not in it. "
                "model.load_state_dict takes it on the rank that saved it, and needs the files of "
                "all ranks. To save all elements, call zerocore.full_state_dict(model) on all ranks"
            )

    def like_full(self, local: Tensor) -> Tensor:
        """Returns an uninitialised plain tensor of full shape, on the shard's dtype and device."""
        outline = self.outline(local.dtype)
        size, strides = outline.shape, outline.stride()
        return torch.empty_strided(size, strides, dtype=local.dtype, device=local.device)

    def outline(self, dtype: torch.dtype) -> Tensor:
        """Returns a cached meta tensor of the full shape and strides; do not change it."""
        return _outline(self.global_shape, self.strides, dtype)

    def part_of(self, full: Tensor) -> Tensor:
        """Returns this rank's elements of a plain full tensor, 1-D; may share its memory."""
        start, end = self.shard_range
        return self.flat(full)[start:end]

    def flat(self, full: Tensor) -> Tensor:
        """Returns all elements of a plain full tensor, 1-D; may share its memory."""
        if full.stride() != self.outline(full.dtype).stride():
            full = self.like_full(full).copy_(full)
        return full.as_strided((full.numel(),), (1,), full.storage_offset())

    def full_of(self, flat: Tensor) -> Tensor:
        """Returns a new plain tensor of full shape and strides, from all elements as 1-D."""
        full = self.like_full(flat)
        full.as_strided((full.numel(),), (1,)).copy_(flat)
        return full

    def view_of_whole(self, local: Tensor) -> Tensor | None:
        """Returns the full value as a view of ``local``; None unless this rank has all of it."""
        if self.group is not None or self.shard_range != (0, self.global_shape.numel()):
            return None
        outline = self.outline(local.dtype)
        return local.as_strided(outline.shape, outline.stride())

    def gather(self, local: Tensor) -> Tensor:
        """Gathers the full value, a new tensor, from every rank's plain 1-D part; collective."""
        self.check_whole()
        if self.group is None:
            return self.full_of(local)
        full = self.like_full(local)
        flat = full.as_strided((full.numel(),), (1,)).zero_()
        start, end = self.shard_range
        flat[start:end] = local
        _sum_bytes(flat, self.group, f"full_tensor of '{self.fqn}'")
        return full

    def whole_of(self, full: Tensor) -> Tensor:
        """Gathers the larger tensor from full parameters, which is collective; ``full`` without."""
        return full if self.part is None else self.part.gather(full)

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """Returns the full parameter as a view of the larger tensor; ``whole`` without a part."""
        part = self.part
        if part is None:
            return whole
        return whole.narrow(part.dim, part.begin, self.global_shape[part.dim])


def _sum_bytes(flat: Tensor, group: dist.ProcessGroup, what: str) -> None:
    """Sums elements that are zero on all ranks but one, as bytes, which keeps every bit."""
    if flat.numel() > 0:
        with waiting(group, what):
            dist.all_reduce(flat.view(torch.uint8), group=group)


@lru_cache(maxsize=4096)  # programs read shapes often
def _outline(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
