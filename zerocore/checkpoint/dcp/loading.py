"""Loads a checkpoint into a sharded model: checks everything first, then reads in place."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from zerocore._C import StreamWay
from zerocore.checkpoint import loaded_state, training_state
from zerocore.checkpoint.checked_reads import check_files, read_checked, read_range, reading
from zerocore.checkpoint.checksums import METADATA
from zerocore.checkpoint.commit.saving import own_name
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.rank_file_reader import OwnFile, Target, own_targets, values_of
from zerocore.checkpoint.dcp.safe_reader import load_tensors
from zerocore.checkpoint.dcp.save_plan import VALUES, SavePlan
from zerocore.checkpoint.dcp.saved_state import KeptPlan, SavedState, saved_state
from zerocore.checkpoint.safe_files import is_count, named, shown
from zerocore.checkpoint.safe_pickles import load_plain
from zerocore.checkpoint.training_state import Optimizers, State
from zerocore.common.agreement import on_all_ranks
from zerocore.model.state import ShardState

T = TypeVar("T")
_log = logging.getLogger("zerocore")


class TrainingLoad:
    """The load of one checkpoint, in steps that all ranks take together. ``checksums``: whether to
    compare them first. ``budget``: bytes that a load may keep beside the model until then."""

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
        self._stateless: set[str] = set()  # parameters whose states this load makes
        self._wanted: State = {}  # the state to fill, in the model's memory
        self._saved: SavedState | None = None  # this rank's parts
        self._targets: dict[int, Target] | None = None  # their memory, by offset in the file
        self._values: dict[str, tuple[torch.dtype, bytes]] = {}  # small tensors for all ranks
        self.own: State = {}  # this rank's own values

    def run(self, stateful: Mapping[str, Any], rng: bool) -> None:
        """Loads model, optimizers and this rank's own values; collective. Raises DamagedError if
        files cannot be read, ValueError with file and key if they do not fit: before any change,
        if checksums are compared."""
        try:
            have_own = self._together(lambda: self._prepare(stateful))
            self._bring(self._contents)
            if self._checksums:
                self._values, *_ = self._together(lambda: self._verify(all(have_own)))
            self._state.finish_reads()
            self._together(self._read_rest)
        except BaseException:
            # The new states may be partly filled.
            loaded_state.drop_states(self._model, self._optimizers, self._stateless)
            raise
        loaded_state.load_model(self._model, self._wanted["model"])
        if self._optimizers:
            with named(self._folder, "has states that the optimizer rejects"):
                loaded_state.load_optimizers(self._model, self._optimizers, self._wanted["optim"])
        rank_values, state = self.own, self._state
        for name, value in stateful.items():
            value.load_state_dict(rank_values["stateful"][name])
        if rank_values["world_size"] == state.world_size:  # each rank's buffers are its own
            _restore_buffers(self._model, rank_values["buffers"])
        if rng:
            _restore_random(rank_values, state.rank, state.world_size)

    def _together(self, action: Callable[[], T]) -> list[T]:
        return on_all_ranks(self._state.ranks.groups, action, self._state.device)

    def _bring(self, contents: Contents) -> None:
        """Does nothing; a subclass may fetch the files that this rank needs; collective."""

    def _check_sizes(self, contents: Contents) -> None:
        contents.check_sizes()

    def _prepare(self, stateful: Iterable[str]) -> bool:
        """Compares names, shapes and sizes; returns whether this rank needs only its own file."""
        with reading(self._folder):
            self._contents = contents = Contents(self._folder)
            names = loaded_state.names_by_hooks(self._model, contents.metadata)
            if names:
                contents.rename(names)
            self._check_sizes(contents)
            self.own = read_own(contents, self._state.rank)
            groups = read_groups(contents) if self._optimizers else []
            for group in groups:
                group["params"] = [names.get(name, name) for name in group["params"]]
            buffers = self.own["buffers"]
            self.own["buffers"] = {names.get(key, key): buffers[key] for key in buffers}
            # Only now: earlier, the reads of small files would have waited for these.
            if self._checksums and self.own["world_size"] == self._state.world_size:
                self._file.begin()
        self._check_stateful(set(stateful))
        self._wanted = training_state.training_state(self._model, ())
        wanted = self._wanted["model"]
        self._wanted["model"] = loaded_state.resized(wanted, contents.metadata)
        trouble = f"{self._folder} does not fit the model"
        loaded_state.check_tensors(self._wanted["model"], "model.", contents.metadata, trouble)
        self._check_buffers()
        if self._optimizers:
            self._stateless = loaded_state.params_without_state(self._model, self._optimizers)
            self._wanted["optim"] = loaded_state.fit_optimizers(
                self._model,
                self._optimizers,
                self._stateless,
                groups,
                contents.metadata,
                self._folder,
            )
        if self._checksums:
            self._saved = saved_state(KeptPlan(self._state), self._wanted, copy=False)
            self._targets = own_targets(self._saved, contents, self._new_keys())
        return self._targets is not None

    def _check_stateful(self, names: set[str]) -> None:
        saved: State = self.own["stateful"]
        if missing := sorted(names - set(saved)):
            raise ValueError(f"{self._folder} has no state for {missing}; it has {sorted(saved)}")
        unused = sorted(set(saved) - names)
        if unused and self._state.rank == 0:
            _log.warning("%s has states of %s, which this load leaves out", self._folder, unused)
        used = {name: saved[name] for name in names}
        saved_on, ranks = self.own["world_size"], self._state.world_size
        with named(self._folder, "does not fit"):
            loaded_state.check_parts(self._model, used, saved_on, ranks)

    def _check_buffers(self) -> None:
        for key, value in self.own["buffers"].items():
            buffer = self._wanted["model"].get(key)
            if not isinstance(buffer, Tensor) or getattr(value, "shape", None) != buffer.shape:
                raise ValueError(f"{self._folder}: the model has no buffer like {shown(key)}")

    def _new_keys(self) -> set[str]:
        """Returns the keys of states that this load has made."""
        states = self._wanted["optim"]["state"] if "optim" in self._wanted else {}
        return {
            f"optim.state.{name}.{key}"
            for name, values in states.items()
            if name in self._stateless
            for key in values
        }

    def _verify(self, all_have_own: bool) -> dict[str, tuple[torch.dtype, bytes]]:
        """Compares checksums, and reads chunks that have memory; returns values for other ranks."""
        with reading(self._folder):
            if not all_have_own:
                self._targets = None
                rank, world_size = self._state.rank, self._state.world_size
                self._contents.verify(rank, world_size, StreamWay.CACHED)  # a second read follows
                return {}
            assert self._targets is not None
            self._file.verify(self._contents, self._targets)
            sums = self._contents.sums
            if self._state.rank == 0 and sums is not None and VALUES in sums:
                check_files(self._contents.folder, {VALUES: sums[VALUES]})
            return values_of(self._targets) if self._state.rank == 0 else {}

    def _flat(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the state to read, by key, and each key's path in the nested state."""
        wanted, paths = flatten_state_dict(self._wanted)
        return {k: v for k, v in wanted.items() if paths[k][1] != "param_groups"}, paths

    @torch.no_grad()
    def _read_rest(self) -> None:
        """Reads the rest: from this rank's file, then from any file with torch's reader."""
        with reading(self._folder):
            wanted, paths = self._flat()
            if self._targets is not None and self._saved is not None:
                for key in self._file.read_rest(self._saved, self._targets):
                    del wanted[key]
                for key, (dtype, data) in self._values.items():
                    tensor = wanted.pop(key)
                    tensor.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(tensor.shape))
            if wanted:
                load_tensors(wanted, self._contents)
            for key, value in wanted.items():
                if not isinstance(value, Tensor):  # a get_extra_state() value
                    set_element(self._wanted, paths[key], value)


def read_groups(contents: Contents) -> list[dict[str, Any]]:
    """Reads the options of the saved parameter groups, and the names of their parameters."""
    groups = contents.metadata.planner_data or {}
    paths = {key: path for key, path in groups.items() if path[:2] == ("optim", "param_groups")}
    by_number: dict[int, dict[str, Any]] = {}
    for name, items in contents.files.items():
        stored = [item for item in items if item.key in paths]
        begin, end = (stored[0].begin, stored[-1].end) if stored else (0, 0)
        file = contents.folder / name
        data = read_range(file, contents.sums_of(name), begin, end - begin) if stored else b""
        for item in stored:
            path = paths.pop(item.key)
            value = data[item.begin - begin : item.end - begin]
            with named(file, f"cannot be read at {shown(item.key)}"):
                number, option = path[2:]
                by_number.setdefault(number, {})[option] = load_plain(io.BytesIO(value), len(value))
    if paths:
        key = next(iter(paths))
        raise ValueError(f"{contents.folder / METADATA}: no file has the option {shown(key)}")
    groups = [by_number.get(number, {}) for number in range(len(by_number))]
    if not all(type(group.get("params")) is list for group in groups):
        raise ValueError(f"{contents.folder / METADATA} lacks parameters of the optimizer's groups")
    return groups


def read_own(contents: Contents, rank: int) -> dict[str, Any]:
    """Reads a rank's own values; the first rank's if that rank has saved none."""
    path = contents.folder / own_name(rank)
    if not (path.exists() or (contents.sums is not None and path.name in contents.sums)):
        path = path.with_name(own_name(0))
    with named(path):
        data = read_checked(path, contents.sums)
        values = load_plain(io.BytesIO(data), len(data))
        tests = {"step": is_count, "world_size": is_count, "buffers": _is_dict}
        tests["stateful"] = _is_dict
        if not _is_dict(values) or not all(k in values and tests[k](values[k]) for k in tests):
            raise ValueError("it does not hold a rank's own values")
        if values["rng"] is not None:
            loaded_state.check_random_state(values["rng"])
    return dict(values)


def _is_dict(value: Any) -> bool:
    return type(value) is dict


@torch.no_grad()
def _restore_buffers(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Sets buffers to this rank's saved ones: running means differ from rank to rank."""
    state = model.state_dict()
    for key, value in buffers.items():
        state[key].copy_(value)


def _restore_random(saved: dict[str, Any], rank: int, world_size: int) -> None:
    """Continues this rank's random streams; begins new ones on another number of ranks."""
    if saved["rng"] is None:
        return
    if saved["world_size"] == world_size:
        loaded_state.set_random_state(saved["rng"])
        return
    step: int = saved["step"]
    seed = int(saved["rng"]["torch"][:8].view(torch.int64).item())
    torch.manual_seed((seed + 1_000_003 * step + rank) % (1 << 63))
    if rank == 0:
        _log.warning(
            "the checkpoint was saved on %d ranks: on %d ranks, new random streams begin",
            saved["world_size"],
            world_size,
        )
