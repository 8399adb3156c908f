"""Loads a checkpoint into a sharded model: everything is compared first, then read in place."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zerocore.checkpoint.checksums import read_sums
from zerocore.checkpoint.commit import on_all_ranks
from zerocore.checkpoint.kept_plan import KeptPlan
from zerocore.checkpoint.own_file import OwnFile, Target, own_targets, values_of
from zerocore.checkpoint.saved_state import SavedState, saved_state
from zerocore.checkpoint.saving import own_name
from zerocore.checkpoint.torch_files import load_tensors
from zerocore.checkpoint.training_state import (
    check_model,
    drop_states,
    fit_optimizer,
    flat,
    load_optimizer,
    params_without_state,
    set_random_state,
    training_state,
)
from zerocore.checkpoint.verify import check_files, check_wholes, is_ours, read_metadata, verify
from zerocore.common.agreement import from_first
from zerocore.model.state import ShardState

_log = logging.getLogger("zerocore")


def load_training_state(
    folder: Path,
    state: ShardState,
    model: nn.Module,
    optimizer: Optimizer | None,
    checksums: bool,
    own_file: OwnFile,
) -> None:
    """Loads model and optimizer. Collective.

    Args:
        checksums: whether to compare them before.
        own_file: this rank's.

    Raises:
        ValueError: what does not fit or is damaged, by file and key, before anything is changed.
    """
    own: dict[str, Any] = {}
    found: list[Metadata] = []
    stateless = set() if optimizer is None else params_without_state(model, optimizer)

    def check() -> None:
        found.append(read_metadata(folder))
        check_files(folder, found[0])
        own.update(training_state(model, None))
        check_model(own, found[0], folder)

    def check_optimizer() -> None:
        if optimizer is not None:
            groups = read_groups(folder, found[0])
            own["optim"] = fit_optimizer(model, optimizer, groups, found[0], folder)

    try:
        on_all_ranks(state, check)
        on_all_ranks(state, check_optimizer)
        ready = _verify(own_file, found[0], state, own, stateless) if checksums else None
        state.begin_load()
        on_all_ranks(state, lambda: _read(folder, own, ready))
    except BaseException:
        if optimizer is not None:
            drop_states(model, optimizer, stateless)  # they may hold anything
        raise
    model.load_state_dict(own["model"])
    if optimizer is not None:
        load_optimizer(model, optimizer, own["optim"])


@dataclass
class _Ready:
    """What was read while checksums were compared.

    Attributes:
        file: this rank's.
        saved: this rank's parts.
        targets: their memory, by the place in the file.
        values: small tensors that all ranks need, 1-D.
    """

    file: OwnFile
    saved: SavedState
    targets: dict[int, Target]
    values: dict[str, Tensor] = field(default_factory=dict)


def _verify(
    file: OwnFile, metadata: Metadata, state: ShardState, own: dict[str, Any], new: set[str]
) -> _Ready | None:
    """Compares all checksums; where this rank has a file, what it needs of it. Collective.

    The states of ``new`` may have been read.

    Raises:
        ValueError: bytes have changed; names files and keys.
    """
    found: list[_Ready] = []
    folder = file.path.parent

    def plan() -> bool:
        saved = saved_state(KeptPlan(state), own, copy=False)
        keys = {
            f"optim.state.{name}.{what}"
            for name, values in own.get("optim", {"state": {}})["state"].items()
            for what in values
            if name in new
        }
        targets = own_targets(saved, metadata, keys)
        if targets is not None:
            found.append(_Ready(file, saved, targets))
        return bool(found)

    def verify_all() -> None:
        if not all(have_own):
            verify(folder, metadata, state.rank, state.world_size)
            return
        if state.rank == 0:
            check_wholes(folder)
        file.verify(metadata, found[0].targets)

    have_own = on_all_ranks(state, plan)
    on_all_ranks(state, verify_all)
    if all(have_own):
        found[0].values = from_first(state.ranks.groups, values_of(found[0].targets), state.device)
    return found[0] if found else None


def _read(folder: Path, own: dict[str, Any], ready: _Ready | None) -> None:
    """Reads what is not read yet: from this rank's file, and with torch's reader from any."""
    read: set[str] = set()
    if ready is not None:
        read = ready.file.read_rest(ready.saved, ready.targets)
        _set_values(own, ready.values)
        read.update(ready.values)
    tensors = {"model": _without(own["model"], "model.", read)}
    if "optim" in own:
        states = own["optim"]["state"]
        tensors["optim"] = {
            "state": {
                name: _without(values, f"optim.state.{name}.", read)
                for name, values in states.items()
            }
        }
    if any(True for _ in flat(tensors, "")):
        load_tensors(tensors, folder)


@torch.no_grad()
def _set_values(own: dict[str, Any], values: dict[str, Tensor]) -> None:
    tensors = dict(flat(own, ""))
    for key, value in values.items():
        tensors[key].copy_(value.view(tensors[key].shape))


def _without(values: dict[str, Any], prefix: str, keys: set[str]) -> dict[str, Any]:
    """The values but those whose keys in the checkpoint are in ``keys``."""
    return {name: value for name, value in values.items() if f"{prefix}{name}" not in keys}


def read_groups(folder: Path, metadata: Metadata) -> list[dict[str, Any]]:
    """The saved options of the optimizer's groups, and the names of their parameters."""
    groups: list[dict[str, Any]] = []
    stored = {index.fqn: info for index, info in metadata.storage_data.items()}
    sums = read_sums(folder) if is_ours(metadata) else None
    for key, path in metadata.planner_data.items():
        if path[:2] == ("optim", "param_groups"):
            groups.extend({} for _ in range(path[2] + 1 - len(groups)))
            info = stored[key]
            crc = None if sums is None else sums.values.get(key)
            groups[path[2]][path[3]] = _read_value(folder / info.relative_path, key, info, crc)
    if not groups:
        raise ValueError(f"{folder} holds no optimizer's state")
    return groups


def _read_value(path: Path, key: str, info: Any, crc: int | None) -> Any:
    with open(path, "rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if crc not in (None, crc32(data)):
        raise ValueError(f"{path} is damaged: '{key}' is not what was written")
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(f"{path}: '{key}' cannot be read: {error}") from error


def read_own(folder: Path, rank: int) -> dict[str, Any]:
    """The values that one rank saved for itself; the first rank's if there was no such rank."""
    path = folder / own_name(rank)
    try:
        path = path if path.exists() else folder / own_name(0)
        sums = read_sums(folder)
        data = path.read_bytes() if sums is None else sums.check_whole(folder, path.name)
        own: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return own


@torch.no_grad()
def restore_buffers(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Sets buffers to what this rank had; running means of other batches differ between ranks."""
    own = model.state_dict()
    for key, value in buffers.items():
        own[key].copy_(value)


def restore_own(own: dict[str, Any], rank: int, world_size: int) -> None:
    """Continues this rank's random streams, or begins new ones on another number of ranks."""
    if own["rng"] is None:
        return
    if own["world_size"] == world_size:
        set_random_state(own["rng"])
        return
    step: int = own["step"]
    seed = int(own["rng"]["torch"][:8].view(torch.int64).item())
    torch.manual_seed((seed + 1_000_003 * step + rank) % (1 << 63))
    if rank == 0:
        _log.warning(
            "the checkpoint was saved on %d ranks: on %d ranks the random streams are new ones",
            own["world_size"],
            world_size,
        )
