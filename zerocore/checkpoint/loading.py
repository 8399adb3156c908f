"""Loads a checkpoint into a sharded model: everything is compared first, then read in place."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zerocore.checkpoint.checksums import read_sums
from zerocore.checkpoint.commit import on_all_ranks
from zerocore.checkpoint.kept_plan import KeptPlan
from zerocore.checkpoint.saved_state import SavedState, saved_state
from zerocore.checkpoint.saving import own_name
from zerocore.checkpoint.single_pass import Target, own_targets, verify_own
from zerocore.checkpoint.torch_files import load_tensors
from zerocore.checkpoint.training_state import (
    check_model,
    drop_states,
    fit_optimizer,
    load_optimizer,
    params_without_state,
    set_random_state,
    training_state,
)
from zerocore.checkpoint.verify import check_files, check_wholes, is_ours, read_metadata, verify
from zerocore.model.state import ShardState
from zerocore.tensor.place import Placed, local_of

_log = logging.getLogger("zerocore")


def load_training_state(
    folder: Path,
    state: ShardState,
    model: nn.Module,
    optimizer: Optimizer | None,
    checksums: bool,
) -> None:
    """Loads model and optimizer. Collective.

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
        read = _verify(folder, found[0], state, own, stateless) if checksums else set()
    except Exception:
        if optimizer is not None:
            drop_states(model, optimizer, stateless)
        raise
    tensors = {"model": own["model"]}
    if optimizer is not None:
        tensors["optim"] = {"state": _without(own["optim"]["state"], read)}
    state.finish_reads()
    on_all_ranks(state, lambda: load_tensors(tensors, folder))
    model.load_state_dict(tensors["model"])
    if optimizer is not None:
        load_optimizer(model, optimizer, own["optim"])


def _verify(
    folder: Path, metadata: Metadata, state: ShardState, own: dict[str, Any], new: set[str]
) -> set[str]:
    """Compares all checksums; the keys of what it read of the states of ``new``. Collective.

    Raises:
        ValueError: bytes have changed; names file and keys.
    """
    kept: list[SavedState] = []
    found: list[dict[int, Target] | None] = []
    read: set[str] = set()

    def plan() -> bool:
        kept.append(saved_state(KeptPlan(state), own, copy=False))
        keys = {
            f"optim.state.{name}.{what}"
            for name, values in own.get("optim", {"state": {}})["state"].items()
            for what, value in values.items()
            if name in new and isinstance(value, Placed) and local_of(value).is_cpu
        }
        found.append(own_targets(kept[0], metadata, keys))
        return found[0] is not None

    def verify_all() -> None:
        if found[0] is None or not all(have_own):
            verify(folder, metadata, state.rank, state.world_size)
            return
        if state.rank == 0:
            check_wholes(folder)
        read.update(verify_own(folder, metadata, kept[0], found[0]))

    have_own = on_all_ranks(state, plan)
    on_all_ranks(state, verify_all)
    return read


def _without(states: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The states of each parameter but those whose keys in the checkpoint are ``keys``."""
    return {
        name: {what: v for what, v in values.items() if f"optim.state.{name}.{what}" not in keys}
        for name, values in states.items()
    }


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
