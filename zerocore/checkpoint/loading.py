"""Loads a checkpoint into a sharded model: everything is compared first, then read in place."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from zerocore.checkpoint.checksums import MAX_SMALL_NBYTES, METADATA
from zerocore.checkpoint.commit import on_all_ranks, reading
from zerocore.checkpoint.contents import Contents, Stored
from zerocore.checkpoint.kept_plan import KeptPlan
from zerocore.checkpoint.own_file import OwnFile, Target, own_targets, values_of
from zerocore.checkpoint.safe_files import is_count, named, opened, read_small, shown
from zerocore.checkpoint.safe_pickles import load_plain
from zerocore.checkpoint.save_plan import SavePlan
from zerocore.checkpoint.saved_state import SavedState, saved_state
from zerocore.checkpoint.saving import own_name
from zerocore.checkpoint.torch_files import load_tensors
from zerocore.checkpoint.training_state import (
    Optimizers,
    State,
    check_model,
    check_random_state,
    drop_states,
    fit_optimizers,
    flat,
    load_model,
    load_optimizers,
    params_without_state,
    set_random_state,
    training_state,
)
from zerocore.checkpoint.verify import verify
from zerocore.model.state import ShardState

_log = logging.getLogger("zerocore")


class TrainingLoad:
    """A load of model and optimizers, in steps that all ranks take together.

    Attributes:
        own: what this rank saved for itself.

    Args:
        folder: of the checkpoint.
        state: of the model.
        checksums: whether to compare them before.
        budget: bytes that may be kept beside the model until then.
    """

    def __init__(
        self,
        folder: Path,
        state: ShardState,
        model: nn.Module,
        optimizers: Optimizers,
        checksums: bool,
        budget: int,
    ) -> None:
        self._folder, self._state, self._checksums = folder, state, checksums
        self._model, self._optimizers = model, optimizers
        self._file = OwnFile(folder / SavePlan({}, 1).file_name(state.rank), budget)
        self._stateless: set[str] = set()  # parameters whose states are made to be loaded
        self._wanted: State = {}  # in the model's memory
        self._saved: SavedState | None = None  # this rank's parts
        self._targets: dict[int, Target] | None = None  # their memory, by the place in the file
        self._values: dict[str, Tensor] = {}  # small tensors that all ranks need, 1-D
        self.own: State = {}

    def run(self, stateful: Iterable[str]) -> None:
        """Loads both; collective.

        Args:
            stateful: names that ``own`` must have.

        Raises:
            DamagedError: what cannot be read, by file and key; before anything is changed, if
                checksums are compared.
            ValueError: what does not fit, by file and key, before anything is changed.
        """
        try:
            have_own = on_all_ranks(self._state, lambda: self._prepare(stateful))
            if self._checksums:
                self._values, *_ = on_all_ranks(self._state, lambda: self._verify(all(have_own)))
            self._state.begin_load()
            on_all_ranks(self._state, self._read_rest)
        except BaseException:
            drop_states(self._model, self._optimizers, self._stateless)  # may hold anything
            raise
        load_model(self._model, self._wanted["model"])
        if self._optimizers:
            load_optimizers(self._model, self._optimizers, self._wanted["optim"])

    def _prepare(self, stateful: Iterable[str]) -> bool:
        """Compares names, shapes and sizes; whether this rank needs what its own file has."""
        with reading(self._folder):
            self._contents = contents = Contents(self._folder)
            contents.check_sizes()
            self.own = read_own(contents, self._state.rank)
            groups = read_groups(contents) if self._optimizers else []
            # The small files are read: they would wait behind what is read from now on.
            if self._checksums and self.own["world_size"] == self._state.world_size:
                self._file.begin()
        if missing := sorted(set(stateful) - set(self.own["stateful"])):
            raise ValueError(f"{self._folder} has no state of {missing}")
        self._wanted = training_state(self._model, ())
        check_model(self._wanted, contents.metadata, self._folder)
        self._check_buffers()
        if self._optimizers:
            self._stateless = params_without_state(self._model, self._optimizers)
            self._wanted["optim"] = fit_optimizers(
                self._model, self._optimizers, groups, contents.metadata, self._folder
            )
        if self._checksums:
            self._saved = saved_state(KeptPlan(self._state), self._wanted, copy=False)
            self._targets = own_targets(self._saved, contents, self._new_keys())
        return self._targets is not None

    def _check_buffers(self) -> None:
        """Raises ValueError if what this rank saved of its buffers are others."""
        for key, value in self.own["buffers"].items():
            own = self._wanted["model"].get(key)
            if not isinstance(own, Tensor) or getattr(value, "shape", None) != own.shape:
                raise ValueError(f"{self._folder}: the model has no such buffer as {shown(key)}")

    def _new_keys(self) -> set[str]:
        """Keys of states that nobody has used yet."""
        states = self._wanted["optim"]["state"] if "optim" in self._wanted else {}
        return {
            f"optim.state.{name}.{what}"
            for name, values in states.items()
            if name in self._stateless
            for what in values
        }

    def _verify(self, all_have_own: bool) -> dict[str, Tensor]:
        """Compares checksums, reading what has memory to land in; values that others need."""
        with reading(self._folder):
            if not all_have_own:
                self._targets = None
                verify(self._contents, self._state.rank, self._state.world_size)
                return {}
            assert self._targets is not None
            if self._state.rank == 0:
                self._contents.check_wholes()
            self._file.verify(self._contents, self._targets)
            return values_of(self._targets)

    def _read_rest(self) -> None:
        """Reads what is not read yet: from this rank's file, and with torch's reader from any."""
        with reading(self._folder):
            self._read()

    def _read(self) -> None:
        read: set[str] = set()
        if self._targets is not None and self._saved is not None:
            read = self._file.read_rest(self._saved, self._targets)
            _set_values(self._wanted, self._values)
            read.update(self._values)
        tensors = {"model": _without(self._wanted["model"], "model.", read)}
        if "optim" in self._wanted:
            states = self._wanted["optim"]["state"]
            tensors["optim"] = {
                "state": {
                    name: _without(values, f"optim.state.{name}.", read)
                    for name, values in states.items()
                }
            }
        if any(True for _ in flat(tensors, "")):
            load_tensors(tensors, self._contents)


@torch.no_grad()
def _set_values(own: dict[str, Any], values: dict[str, Tensor]) -> None:
    tensors = dict(flat(own, ""))
    for key, value in values.items():
        tensors[key].copy_(value.view(tensors[key].shape))


def _without(values: dict[str, Any], prefix: str, keys: set[str]) -> dict[str, Any]:
    """The values but those whose keys in the checkpoint are in ``keys``."""
    return {name: value for name, value in values.items() if f"{prefix}{name}" not in keys}


def read_groups(contents: Contents) -> list[dict[str, Any]]:
    """The saved options of the optimizer's groups, and the names of their parameters.

    Raises:
        ValueError: one is broken; names file and key.
    """
    stored = {item.key: (name, item) for name, items in contents.files.items() for item in items}
    found: dict[int, dict[str, Any]] = {}
    for key, path in (contents.metadata.planner_data or {}).items():
        if path[:2] == ("optim", "param_groups"):
            if len(path) != 4 or key not in stored:
                raise ValueError(f"{contents.folder / METADATA}: {shown(key)} is no group's option")
            name, item = stored[key]
            found.setdefault(path[2], {})[path[3]] = _read_value(contents.folder / name, item)
    groups = [found.get(number, {}) for number in range(len(found))]
    if not all(type(group.get("params")) is list for group in groups):
        raise ValueError(f"{contents.folder / METADATA} lacks parameters of the optimizer's groups")
    return groups


def _read_value(path: Path, item: Stored) -> Any:
    with opened(path) as file:
        data = os.pread(file.fileno(), item.length, item.offset)
    if item.crc not in (None, crc32(data)):
        raise ValueError(f"{path} is damaged: {shown(item.key)} is not what was written")
    with named(path, f"cannot be read at {shown(item.key)}"):
        return load_plain(io.BytesIO(data), len(data))


def read_own(contents: Contents, rank: int) -> dict[str, Any]:
    """The values that one rank saved for itself; the first rank's if there was no such rank.

    Raises:
        ValueError: they cannot be read; names the file.
    """
    path = contents.folder / own_name(rank)
    path = path if path.exists() else path.with_name(own_name(0))
    with named(path):
        sums = contents.sums
        data = read_small(path, MAX_SMALL_NBYTES) if sums is None else sums.check_whole(path)
        own = load_plain(io.BytesIO(data), len(data))
        tests = {
            "step": is_count,
            "world_size": is_count,
            "buffers": _is_dict,
            "stateful": _is_dict,
        }
        if not _is_dict(own) or not all(key in own and tests[key](own[key]) for key in tests):
            raise ValueError("it is not what a rank saves for itself")
        if own["rng"] is not None:
            check_random_state(own["rng"])
    return dict(own)


def _is_dict(value: Any) -> bool:
    return type(value) is dict


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
