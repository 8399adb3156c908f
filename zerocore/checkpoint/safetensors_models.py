"""Sharded models from and to safetensors files, as Hugging Face lays them out; nothing gathered."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from zerocore._C import crc32_joined
from zerocore.checkpoint.byte_ranges import read_into, write_from
from zerocore.checkpoint.commit import (
    check_empty,
    gathered,
    on_all_ranks,
    same_id,
    same_on_all,
)
from zerocore.checkpoint.files import flush_folder
from zerocore.checkpoint.safe_files import opened, shown
from zerocore.checkpoint.safetensors_files import (
    INDEX_NAME,
    NAME_OF,
    Entry,
    FilePlan,
    check_sums,
    index_text,
    plan_files,
    read_folder,
)
from zerocore.common.agreement import agree
from zerocore.common.alarm import operation
from zerocore.common.quantities import parse_nbytes
from zerocore.model.state import Param, ShardState, state_of
from zerocore.state_dict import buffers_of, param_keys
from zerocore.tensor.place import local_of

Rename = Callable[[str], str | None] | Mapping[str, str]
Target = Param | Tensor  # a parameter, or a buffer
Written = tuple[str, int, int, int]  # name, offset in the file, bytes, checksum


@operation("load_safetensors")
def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    verify: bool = True,
) -> None:
    """Loads parameters and buffers from safetensors files; every rank reads its own bytes of them.

    All ranks must call, and see the same files. Values are cast to the dtypes of the model (of its
    main weights under mixed precision). Of tied parameters one name is enough.

    Args:
        folder: with ``model.safetensors`` or an index, as ``save_pretrained`` leaves it; or a file.
        rename: what a name in the files is called in ``model.state_dict()``: a dict, of which
            missing names stay, or a function, which leaves out what it returns None for.
        strict: missing and unexpected names are errors.
        verify: before loading, compare the checksums that :func:`save_safetensors` writes.

    Raises:
        ValueError: the model is not sharded; names, shapes or dtypes that do not fit, a truncated
            or damaged file; on every rank, before anything is changed.
        FileNotFoundError: as above, if there are no such files.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    state = state_of(model, by_rows=False)
    targets = _targets(model, state)
    found: dict[str, Entry] = {}

    def check() -> None:
        if state.shown_full.total() > 0:
            raise RuntimeError("load_safetensors inside of zerocore.unsharded; call it outside")
        found.update(_renamed(read_folder(folder), rename))
        _check(targets, found, strict, folder)

    on_all_ranks(state, check)
    same_on_all(state, [f"{name} at {e.begin} of {e.file.name}" for name, e in found.items()])

    if verify:
        on_all_ranks(state, lambda: check_sums(found.values(), state.rank, state.world_size))

    def load() -> None:
        done: set[int] = set()
        for name, entry in found.items():
            target = targets.get(name)
            if target is not None and id(target) not in done:
                done.add(id(target))
                _read_target(entry, target)

    state.begin_load()
    with torch.no_grad():
        on_all_ranks(state, load)


def _targets(model: nn.Module, state: ShardState) -> dict[str, Target]:
    keys = param_keys(model, state)
    targets: dict[str, Target] = {key: param for param, names in keys.items() for key in names}
    return {**targets, **buffers_of(model, keys)}


def _renamed(entries: Mapping[str, Entry], rename: Rename | None) -> dict[str, Entry]:
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        new: str | None = name
        if rename is not None:
            new = rename(name) if callable(rename) else rename.get(name, name)
        if new in renamed:
            raise ValueError(
                f"two tensors of {entry.file} become {shown(new)}; {shown(name)} is one"
            )
        if new is not None:
            renamed[new] = entry
    return renamed


def _check(
    targets: Mapping[str, Target], found: Mapping[str, Entry], strict: bool, folder: object
) -> None:
    loaded = {id(target) for name, target in targets.items() if name in found}
    missing = sorted(name for name, target in targets.items() if id(target) not in loaded)
    unexpected = sorted(set(found) - set(targets))
    if strict and (missing or unexpected):
        raise ValueError(
            f"{folder} does not fit the model: missing {shown(missing)}, unexpected "
            f"{shown(unexpected)}; rename= maps names, strict=False leaves them out"
        )
    for name, entry in found.items():
        if name not in targets:
            continue
        tensor = _full_of(targets[name])
        if entry.shape != tuple(tensor.shape):
            raise ValueError(
                f"{entry.file}: {shown(name)} has shape {shown(entry.shape)}, the model "
                f"{tuple(tensor.shape)}"
            )
        if _kind(entry.dtype) > _kind(tensor.dtype):
            raise ValueError(
                f"{entry.file}: {shown(name)} is {entry.dtype}, the model {tensor.dtype}"
            )


def _kind(dtype: torch.dtype) -> int:
    """Whole numbers become floating-point ones, and these complex ones; never the other way."""
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def _full_of(target: Target) -> Tensor:
    return target.full if isinstance(target, Param) else target


def _read_target(entry: Entry, target: Target) -> None:
    with opened(entry.file) as file:
        if isinstance(target, Param) and target.shard.place.strides is None:
            begin, _ = target.shard.shard_range
            offset = entry.begin + begin * entry.dtype.itemsize
            read_into(file.fileno(), offset, entry.dtype, local_of(target.shard))
            return
        dtype = target.shard.dtype if isinstance(target, Param) else target.dtype
        full = torch.empty(entry.shape, dtype=dtype)
        read_into(file.fileno(), entry.begin, entry.dtype, full.view(-1))
    if isinstance(target, Param):  # its elements are in another order in memory
        local_of(target.shard).copy_(target.shard.place.part_of(full))
    else:
        target.copy_(full)


@operation("save_safetensors")
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_size: str | int = "5GB",
) -> None:
    """Saves parameters and buffers as Hugging Face does; every rank writes its own bytes.

    All ranks must call, and see the same file system. The folder gets ``model.safetensors``, or
    several files and ``model.safetensors.index.json``, all at once when they are on disk. Main
    weights are saved; of tied parameters the first name, as ``save_pretrained`` does.

    Args:
        folder: made if need be; may hold other files, such as a configuration.
        dtype: of floating-point values in the files; None keeps each.
        max_file_size: of a file, in bytes or as text; a larger tensor has a file of its own.

    Raises:
        ValueError: the model is not sharded, or a dtype that safetensors does not know.
        FileExistsError: the folder has safetensors files already.
        RuntimeError: this process was forked from the one that sharded the model.
    """
    state = state_of(model, by_rows=False)
    path = Path(folder)
    temporary = path / f".safetensors-{same_id(state)}"
    targets: dict[str, Target] = {}
    files: list[FilePlan] = []

    def prepare() -> None:
        check_empty(path, ("*.safetensors", INDEX_NAME))
        nbytes = parse_nbytes(max_file_size, "max_file_size")
        metadata = {"format": "pt", **_first_names(_targets(model, state), targets)}
        files.extend(plan_files(temporary, _facts(targets, dtype), nbytes, metadata))
        if state.rank == 0:
            _create(temporary, files)

    on_all_ranks(state, prepare)
    written = _write_all(state, temporary, files, targets)
    sums = _joined(gathered(state, written))

    def commit() -> None:
        if state.rank == 0:
            for plan in files:
                _fill_sums(temporary / plan.name, plan, sums)
            for name in [file.name for file in files] + [INDEX_NAME] * (len(files) > 1):
                os.replace(temporary / name, path / name)
            temporary.rmdir()
            flush_folder(path)

    on_all_ranks(state, commit)


def _first_names(all_targets: Mapping[str, Target], kept: dict[str, Target]) -> dict[str, str]:
    """Fills ``kept`` with one name of each tensor; returns the others, and what they stand for."""
    first: dict[int, str] = {}
    others = {}
    for name, target in all_targets.items():
        if id(target) in first:
            others[name] = first[id(target)]
        else:
            first[id(target)] = name
            kept[name] = target
    return others


def _facts(
    targets: Mapping[str, Target], dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    facts = {}
    for name, target in targets.items():
        own = target.shard.dtype if isinstance(target, Param) else target.dtype
        chosen = dtype if dtype is not None and own.is_floating_point else own
        if chosen not in NAME_OF:
            raise ValueError(f"'{name}' is {chosen}, which safetensors does not know")
        facts[name] = (chosen, tuple(_full_of(target).shape))
    return facts


def _create(folder: Path, files: list[FilePlan]) -> None:
    folder.mkdir(parents=True)
    for plan in files:
        with open(folder / plan.name, "wb") as file:
            file.write(plan.header)
            file.truncate(plan.nbytes)
    if len(files) > 1:
        with open(folder / INDEX_NAME, "w") as file:
            file.write(index_text(files))
            file.flush()
            os.fsync(file.fileno())


def _write_all(
    state: ShardState, folder: Path, files: list[FilePlan], targets: Mapping[str, Target]
) -> list[Written]:
    written: list[Written] = []
    error: Exception | None = None
    with ExitStack() as stack, torch.no_grad():
        for plan in files:
            try:
                file = stack.enter_context(open(folder / plan.name, "r+b", buffering=0))
            except OSError as caught:
                error = error or caught
            for name, entry in plan.entries.items():
                values, begin = _own_part(state, targets[name])  # may be collective: on all ranks
                try:
                    if error is None and values.numel() > 0:
                        offset = entry.begin + begin * entry.dtype.itemsize
                        crc = write_from(file.fileno(), offset, entry.dtype, values)
                        written.append((name, offset, values.numel() * entry.dtype.itemsize, crc))
                except OSError as caught:
                    error = caught
            if error is None:
                os.fsync(file.fileno())
    agree(state.ranks.groups, error, [], state.device)
    return written


def _joined(parts: list[list[Written]]) -> dict[str, int]:
    """The checksum of each tensor, from those of its parts."""
    sums: dict[str, int] = {}
    for name, _, nbytes, crc in sorted(part for ranks in parts for part in ranks):
        sums[name] = crc32_joined(sums.get(name, 0), crc, nbytes)
    return sums


def _fill_sums(path: Path, plan: FilePlan, sums: Mapping[str, int]) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(plan.header_with({name: sums.get(name, 0) for name in plan.entries}))
        os.fsync(file.fileno())


def _own_part(state: ShardState, target: Target) -> tuple[Tensor, int]:
    """The elements in C order that this rank writes, plain and 1-D, and where they begin."""
    if not isinstance(target, Param):
        flat = target.detach().contiguous().view(-1)
        return (flat if state.rank == 0 else flat[:0]), 0
    place, local = target.shard.place, local_of(target.shard)
    if place.strides is not None:  # pieces of it are scattered over the file
        flat = place.gather(local).contiguous().view(-1)
        return (flat if state.rank == 0 else flat[:0]), 0
    copies = state.ranks.num_replicas if place.group is not None else state.world_size
    index = state.rank // state.ranks.num_shards if place.group is not None else state.rank
    size = -(-local.numel() // copies)
    begin = min(index * size, local.numel())
    return local[begin : begin + size], place.shard_range[0] + begin
