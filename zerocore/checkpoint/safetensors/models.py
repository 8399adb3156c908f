"""Loads and saves sharded models as Hugging Face's safetensors files, without a gather."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from zerocore._C import BLOCK_NBYTES, StreamWay
from zerocore.checkpoint.byte_ranges import read_into, write_from
from zerocore.checkpoint.checksums import NAME, Checksums, FileSums
from zerocore.checkpoint.commit import files
from zerocore.checkpoint.safe_files import opened, shown
from zerocore.checkpoint.safetensors.files import (
    INDEX_NAME,
    Entry,
    Facts,
    FilePlan,
    Held,
    check_entries,
    plan_files,
    read_folder,
    write_lists,
)
from zerocore.common.agreement import agree, on_all_ranks
from zerocore.common.alarm import operation
from zerocore.common.parsing import parse_nbytes
from zerocore.hooks.loading import as_loaded, changed_by_hooks, has_own_loading
from zerocore.layout.place import Place
from zerocore.model.extensions import check_engine_gathers, check_plain
from zerocore.model.parameter_meshes import check_has_places
from zerocore.model.state import ShardState, ready_state_of
from zerocore.state_dict import buffers_of, param_keys
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import local_of
from zerocore.tensor.rows import elements_of, own_elements, part_like, place_of, shard_of

Rename = Callable[[str], str | None] | Mapping[str, str]
Written = tuple[int, dict[int, int]]  # bytes of a file, and sums of blocks by index


@operation("load_safetensors")
def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    verify: bool = True,
) -> None:
    """Loads parameters and buffers from safetensors files; every rank reads only its own bytes.

    All ranks must call it, and see the same files. Values are cast to the model's dtypes (under
    mixed precision, to the main weights'). One name of tied parameters is enough.

    Args:
        folder: a folder with ``model.safetensors`` or an index, as from ``save_pretrained``; or a
            file.
        rename: maps names in the files to names in ``model.state_dict()``. A dict keeps names that
            it lacks; a function leaves out a name by returning None.
        strict: missing and unexpected names are errors.
        verify: before loading, compare the checksums that :func:`save_safetensors` writes.

    Raises:
        ValueError: the model is not sharded, names, shapes or dtypes do not fit, or a file is
            truncated or damaged; on every rank, before anything is changed.
        FileNotFoundError: there are no such files; on every rank, too.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    state = ready_state_of(model)
    check_plain(state, "safetensors")
    check_engine_gathers(state.units, "load_safetensors")
    targets = _targets(model, state)
    read: dict[str, Entry] = {}
    loaded: dict[str, Entry] = {}

    def check() -> set[str]:
        if state.shown_full.total() > 0:
            raise RuntimeError("load_safetensors inside zerocore.unsharded; call it outside")
        read.update(_renamed(read_folder(folder, verify), rename))
        loaded.update(_as_loaded(model, read))
        _check(targets, loaded, strict, folder)
        return {f"{name} at {entry.begin} of {entry.file.name}" for name, entry in read.items()}

    groups, device = state.ranks.groups, state.device
    for rank, (before, after) in enumerate(pairwise(on_all_ranks(groups, check, device)), 1):
        if differing := sorted(before ^ after):
            raise ValueError(f"ranks {rank - 1} and {rank} see different files: {differing[0]}")
    if verify:
        part, parts = state.rank, state.world_size
        compare = partial(check_entries, read.values(), part, parts, StreamWay.CACHED)
        on_all_ranks(groups, compare, device)

    def load() -> None:
        done: set[int] = set()
        for name, entry in loaded.items():
            target = targets.get(name)
            if target is not None and id(target) not in done:
                done.add(id(target))
                _read_target(entry, target)

    state.finish_reads()
    with torch.no_grad():
        on_all_ranks(groups, load, device)


def _targets(model: nn.Module, state: ShardState) -> dict[str, Tensor]:
    """Returns the shards of parameters, and the buffers, by name."""
    keys = param_keys(model, state, by_name=True)
    shards = {key: param.shard for param, names in keys.items() for key in names}
    return {**shards, **buffers_of(model, keys)}


def _as_loaded(model: nn.Module, read: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Returns the tensors as the model's loading hooks change them; the hooks see full tensors."""
    if not has_own_loading(model) or not read:
        return read
    values = {name: entry.read(entry.dtype) for name, entry in read.items()}
    path = next(iter(read.values())).file
    return {
        name: Held(path, value.dtype, tuple(value.shape), 0, value.nbytes, name, value)
        for name, value in as_loaded(model, values).items()
    }


def _renamed(entries: Mapping[str, Entry], rename: Rename | None) -> dict[str, Entry]:
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        new: str | None = name
        if rename is not None:
            new = rename(name) if callable(rename) else rename.get(name, name)
        if new in renamed:
            raise ValueError(
                f"rename: two tensors of {entry.file} become {shown(new)}: {shown(name)} is one"
            )
        if new is not None:
            renamed[new] = entry
    return renamed


def _check(
    targets: Mapping[str, Tensor], entries: Mapping[str, Entry], strict: bool, folder: object
) -> None:
    loaded = {id(target) for name, target in targets.items() if name in entries}
    missing = sorted(name for name, target in targets.items() if id(target) not in loaded)
    unexpected = sorted(set(entries) - set(targets))
    if strict and (missing or unexpected):
        raise ValueError(
            f"{folder} does not fit the model: missing {shown(missing)}, unexpected "
            f"{shown(unexpected)}; rename= maps names, strict=False leaves them out"
        )
    for name, entry in entries.items():
        if name not in targets:
            continue
        target = targets[name]
        if entry.shape != (shape := _shape_of(target)):
            raise ValueError(
                f"{entry.file}: {shown(name)} has shape {shown(entry.shape)}, expected {shape}"
            )
        dtype = (target.full if isinstance(target, ShardedParameter) else target).dtype
        if _kind(entry.dtype) > _kind(dtype):
            raise ValueError(f"{entry.file}: {shown(name)} is {entry.dtype}, expected {dtype}")


def _kind(dtype: torch.dtype) -> int:
    """Ranks dtypes: integers may be loaded as floats, floats as complex numbers, never back."""
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def _shape_of(target: Tensor) -> tuple[int, ...]:
    """Returns the target's shape in the files."""
    return tuple(target.place.whole_shape if isinstance(target, ShardedParameter) else target.shape)


def _begin_in_file(place: Place) -> int | None:
    """Returns the index in C order of a shard's first element; None if it is not contiguous."""
    if place.strides is not None or (place.part is not None and place.part.dim != 0):
        return None
    before = 0 if place.part is None else place.part.begin * prod(place.part.shape[1:])
    return before + place.shard_range[0]


def _read_target(entry: Entry, target: Tensor) -> None:
    if (place := place_of(target)) is None:
        target.copy_(entry.read(target.dtype))
        return
    begin = _begin_in_file(place)
    if begin is not None and not isinstance(entry, Held):
        with opened(entry.file) as file:
            offset = entry.begin + begin * entry.dtype.itemsize
            read_into(file.fileno(), offset, entry.dtype, elements_of(target, target))
        return
    full = entry.read(target.dtype)  # the shard's elements are not contiguous in the file
    if isinstance(target, ShardedParameter):
        local_of(target).copy_(place.part_of(place.part_of_whole(full)))
    else:
        own_elements(target).copy_(part_like(target, full) if hasattr(target, "_spec") else full)


@operation("save_safetensors")
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_size: str | int = "5GB",
) -> None:
    """Saves parameters and buffers as Hugging Face does; every rank writes its own bytes.

    All ranks must call it, and share a file system. The folder gets ``model.safetensors``, or
    several files and then ``model.safetensors.index.json``, when all are on disk; a failed save
    leaves nothing. It saves main weights, and tied parameters under their first name, as
    ``save_pretrained`` does.

    Args:
        folder: made if need be; may hold other files, such as a configuration.
        dtype: of floating-point values in the files; None keeps each value's dtype.
        max_file_size: of a file, in bytes or as text; a larger tensor has a file of its own.

    Raises:
        ValueError: the model is not sharded, or safetensors does not know a dtype.
        FileExistsError: the folder has safetensors files already.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    state = ready_state_of(model)
    check_plain(state, "safetensors")
    check_engine_gathers(state.units, "save_safetensors")
    check_has_places(state)
    path = Path(folder)
    groups, device = state.ranks.groups, state.device
    temporary = path / f".safetensors-{agree(groups, None, [], device)}"
    targets: dict[str, Tensor] = {}
    plans: list[FilePlan] = []

    def prepare() -> None:
        for old in (old for name in ("*.safetensors", INDEX_NAME, NAME) for old in path.glob(name)):
            raise FileExistsError(f"{old} exists and is not overwritten; delete it first")
        _check_can_be_saved(model)
        nbytes = parse_nbytes(max_file_size, "max_file_size")
        metadata = {"format": "pt", **_first_names(_targets(model, state), targets)}
        plans.extend(plan_files(temporary, _facts(targets, dtype), nbytes, metadata))
        if state.rank == 0:
            temporary.mkdir(parents=True)
            for plan in plans:
                with open(temporary / plan.name, "wb") as file:
                    file.truncate(plan.nbytes)

    with _nothing_left(temporary if state.rank == 0 else None) as moved:
        on_all_ranks(groups, prepare, device)
        sums = _joined(_write_all(state, temporary, plans, targets))
        on_all_ranks(groups, lambda: _commit(state, temporary, plans, sums, moved), device)


def _check_can_be_saved(model: nn.Module) -> None:
    kinds = {k: v for k, v in model.state_dict().items() if not isinstance(v, Tensor)}
    for key in (*kinds, *changed_by_hooks(model)):
        reason = "is not a tensor" if key in kinds else "is changed by a state_dict hook"
        raise ValueError(
            f"'{key}' {reason}, which save_safetensors does not write; save with "
            "zerocore.Checkpoints, or zerocore.full_state_dict(model)"
        )


@contextmanager
def _nothing_left(temporary: Path | None) -> Iterator[list[Path]]:
    """Yields a list of files; deletes these and the folder if the block fails."""
    moved: list[Path] = []
    try:
        yield moved
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            for path in moved:
                path.unlink(missing_ok=True)
        raise


def _commit(
    state: ShardState, temporary: Path, plans: list[FilePlan], sums: Checksums, moved: list[Path]
) -> None:
    """Renames the temporary files on rank 0, and appends each final name to ``moved``."""
    if state.rank != 0:
        return
    folder = temporary.parent
    lists = write_lists(temporary, plans, sums)
    for name in [*(file.name for file in plans), *reversed(lists)]:  # the index last
        os.replace(temporary / name, folder / name)
        moved.append(folder / name)
    temporary.rmdir()
    files.flush_path(folder)


def _first_names(all_targets: Mapping[str, Tensor], kept: dict[str, Tensor]) -> dict[str, str]:
    """Fills ``kept`` with tensors by their first names; returns the other names, with the first."""
    first: dict[int, str] = {}
    aliases = {}
    for name, target in all_targets.items():
        if id(target) in first:
            aliases[name] = first[id(target)]
        else:
            first[id(target)] = name
            kept[name] = target
    return aliases


def _facts(targets: Mapping[str, Tensor], dtype: torch.dtype | None) -> Facts:
    facts = {}
    for name, target in targets.items():
        chosen = dtype if dtype is not None and target.dtype.is_floating_point else target.dtype
        facts[name] = (chosen, _shape_of(target))
    return facts


def _write_all(
    state: ShardState, folder: Path, plans: list[FilePlan], targets: Mapping[str, Tensor]
) -> list[dict[str, Written]]:
    """Writes this rank's parts; returns each rank's sums of the blocks that it has written to."""
    written: dict[str, Written] = {}
    errors: list[OSError] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            errors.append(error)

    with ExitStack() as stack, torch.no_grad():
        for plan in plans:
            with noted():
                file = stack.enter_context(open(folder / plan.name, "r+b", buffering=0))
                writer = files.writer(file.fileno(), plan.nbytes, StreamWay.CACHED)
                if state.rank == 0:
                    files.write(writer, 0, plan.header)
            for name, entry in plan.entries.items():
                values, begin = _own_part(state, targets[name])  # may be collective: not skipped
                with noted():
                    if not errors:
                        offset = entry.begin + begin * entry.dtype.itemsize
                        write_from(writer, offset, entry.dtype, values)
            with noted():
                if not errors:
                    os.fsync(file.fileno())
                    sums = {index: crc for index, crc in enumerate(writer.sums()) if crc}
                    written[plan.name] = (plan.nbytes, sums)

    def outcome() -> dict[str, Written]:
        if errors:
            raise errors[0]
        return written

    return on_all_ranks(state.ranks.groups, outcome, state.device)


def _joined(parts: list[dict[str, Written]]) -> Checksums:
    sums = Checksums()
    for name, (nbytes, _) in parts[0].items():
        sums[name] = FileSums(nbytes, [0] * -(-nbytes // BLOCK_NBYTES))
        for part in parts:
            for index, crc in part[name][1].items():
                sums[name].crcs[index] ^= crc
    return sums


def _own_part(state: ShardState, target: Tensor) -> tuple[Tensor, int]:
    """Returns the elements that this rank writes, plain and 1-D, and the index of the first."""
    if (place := place_of(target)) is None:
        flat = target.detach().contiguous().view(-1)
        return (flat if state.rank == 0 else flat[:0]), 0
    local, shard = elements_of(target, target), shard_of(target)
    first = _begin_in_file(place)
    if first is None:  # not contiguous in the file
        flat = place.whole_of(place.gather(local)).contiguous().view(-1)
        return (flat if state.rank == 0 else flat[:0]), 0
    assert shard is not None
    is_spread = state.tensor_ranks is not None and place.part is None  # tensor ranks share the work
    ranks = state.ranks if is_spread else state.ranks_of(shard.unit)
    copies = ranks.num_replicas if place.group is not None else ranks.world_size
    index = ranks.rank // ranks.num_shards if place.group is not None else ranks.rank
    size = -(-local.numel() // copies)
    begin = min(index * size, local.numel())
    return local[begin : begin + size], first + begin
