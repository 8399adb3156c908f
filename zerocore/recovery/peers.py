"""Checkpoints in the memory of nodes: what a rank has saved is on its node, and on another one.

Files go from rank to rank, and each is checked where it arrives.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim import Optimizer

from zerocore.checkpoint.checkpoints import Checkpoints
from zerocore.checkpoint.checksums import METADATA, NAME, Checksums, check_files, read_sums
from zerocore.checkpoint.commit.folder import path_of, steps_in
from zerocore.checkpoint.commit.saving import Save, own_name
from zerocore.checkpoint.commit.writer import finish_writes
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.loading import TrainingLoad
from zerocore.checkpoint.dcp.save_plan import VALUES, SavePlan
from zerocore.checkpoint.dcp.saved_state import SavedState
from zerocore.common.agreement import gather_objects, on_all_ranks
from zerocore.common.alarm import operation, waiting
from zerocore.model.state import ShardState

T = TypeVar("T")
_log = logging.getLogger("zerocore")
_Key = tuple[int, int]  # step, and sum of the list of files, as a step may be saved again
_PIECE_NBYTES = 64 << 20  # of a message


class Move(NamedTuple):
    """A file of a folder that ``source`` has and ``target`` gets; ranks of the group."""

    name: str
    nbytes: int
    source: int
    target: int


def rounds_of(moves: Iterable[Move]) -> list[list[Move]]:
    """The moves in rounds, in each of which a rank sends one file and receives one at most.

    The same on all ranks, which go through the rounds in order: none waits for a rank that waits
    for it.
    """
    rounds: list[list[Move]] = []
    first_free: dict[tuple[str, int], int] = {}
    for move in moves:
        ends = (("send", move.source), ("receive", move.target))
        number = max(first_free.get(end, 0) for end in ends)
        for end in ends:
            first_free[end] = number + 1
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(move)
    return rounds


def carry_out(group: dist.ProcessGroup | None, moves: Sequence[Move], folder: Path) -> None:
    """Sends and receives what is this rank's part of the moves; collective of ``group``. Raises
    OSError for a file that cannot be read or made, when all else has arrived: the others are not
    held."""
    if group is None:
        return  # one rank has all
    failed: OSError | None = None
    own = group.rank()
    for moved in rounds_of(moves):
        works = []
        for move in moved:
            if own not in (move.source, move.target):
                continue
            try:
                memory = _memory_of(folder / move.name, move.nbytes, own == move.target)
            except OSError as error:
                failed = error
                memory = torch.zeros(move.nbytes, dtype=torch.uint8, device="cpu")
            start = dist.isend if own == move.source else dist.irecv
            other = dist.get_global_rank(group, move.target if own == move.source else move.source)
            works += [start(piece, other, group=group) for piece in memory.split(_PIECE_NBYTES)]
        with waiting(group, "a copy of a file to another rank"):
            for work in works:
                if work is not None:
                    work.wait()
    if failed is not None:
        raise failed


def _memory_of(path: Path, nbytes: int, is_new: bool) -> Tensor:
    """The bytes of a file, mapped; of a new one they are its from now on."""
    if is_new:
        with path.open("wb") as file:
            file.truncate(nbytes)
    elif path.stat().st_size != nbytes:
        raise OSError(f"{path} has {path.stat().st_size} bytes, expected {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(str(path), shared=is_new, size=nbytes, dtype=torch.uint8)


class Held(NamedTuple):
    """Sizes of the good files of a checkpoint that a rank has seen, and how many it consists of."""

    files: dict[str, int]
    total: int


@dataclass(frozen=True)
class Nodes:
    """The ranks of a model by the node that they run on."""

    group: dist.ProcessGroup | None  # None for one rank. Ranks here are those of the group.
    names: tuple[str, ...]  # the node of each rank
    numbers: tuple[int, ...]  # of each rank, in the model

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def ranks_on(self, name: str) -> list[int]:
        return [rank for rank, each in enumerate(self.names) if each == name]

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this node."""
        return self.ranks_on(self.names[self.rank])

    def peers(self) -> dict[int, int]:
        """By rank, the one on the next node that holds a copy; none if there is one node."""
        names = list(dict.fromkeys(self.names))
        if len(names) == 1:
            return {}
        found = {}
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            others = self.ranks_on(following)
            for place, rank in enumerate(self.ranks_on(name)):
                found[rank] = others[place % len(others)]
        return found


def files_of(number: int) -> tuple[str, str]:
    """Names of what a rank of the model saves."""
    return SavePlan({}, 1).file_name(number), own_name(number)


@dataclass(frozen=True)
class PeerSave(Save):
    """A checkpoint that is being written on all nodes."""

    nodes: Nodes
    texts: dict[str, bytes] = field(default_factory=dict)  # small files that are on each node

    @property
    def leader(self) -> int:
        return self.nodes.numbers[self.nodes.neighbours[0]]

    def _begin(self) -> Path:
        temporary = super()._begin()
        own = super()._common() if self.saved.rank == 0 else {}
        for texts in gather_objects(self.groups, [own], None):
            self.texts.update(texts)
        return temporary

    def _refuse_good(self) -> None:
        """One of the same step is replaced: other nodes may have lost their part of it."""

    def _common(self) -> dict[str, bytes]:
        return self.texts

    def _spread(self, temporary: Path, sums: Checksums) -> None:
        moves = [
            Move(name, sums[name].nbytes, rank, peer)
            for rank, peer in self.nodes.peers().items()
            for name in files_of(self.nodes.numbers[rank])
            if name in sums
        ]

        def copy() -> None:
            carry_out(self.nodes.group, moves, temporary)
            check_files(temporary, _received(moves, self.nodes.rank, sums))

        self._together(copy)

    def _kept(self, sums: Checksums) -> Checksums:
        peers = self.nodes.peers()
        here = set(self.nodes.neighbours)
        ranks = here | {rank for rank, peer in peers.items() if peer in here}
        names = {*self.texts, *(name for r in ranks for name in files_of(self.nodes.numbers[r]))}
        return Checksums({name: each for name, each in sums.items() if name in names})


def _received(moves: Sequence[Move], rank: int, sums: Checksums) -> Checksums:
    names = [move.name for move in moves if move.target == rank and move.name in sums]
    return Checksums({name: sums[name] for name in names})


class PeerLoad(TrainingLoad):
    """A load from files that are on several nodes: those that a rank lacks are brought first."""

    def __init__(self, bring: Callable[[Path, set[str]], None], folder: Path, *args: Any) -> None:
        super().__init__(folder, *args)
        self._bring_files = bring

    def _check_sizes(self, contents: Contents) -> None:
        """Files are compared with the list before, and behind their way to this node."""

    def _bring(self, contents: Contents) -> None:
        planner = DefaultLoadPlanner()
        planner.set_up_planner(self._flat()[0], contents.metadata, True)
        places = contents.metadata.storage_data
        items = planner.create_local_plan().items
        self._bring_files(
            contents.folder, {places[item.storage_index].relative_path for item in items}
        )


def _boot() -> str:
    """Tells hosts of the same name apart; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class PeerCheckpoints(Checkpoints):
    """Checkpoints that survive processes and nodes, without a disk that all of them see.

    ``folder`` is each node's own, in memory: ``/dev/shm/run``. A rank's file is written there, and
    a copy to a rank of the next node, both in the background under the next steps. After a restart
    :meth:`load` brings what a node lacks from those that have it: the same number of ranks or
    another one, and a node that is new. A checkpoint can be loaded as long as no two neighbouring
    nodes are lost. Everything is compared with checksums where it is written, kept and received;
    what is damaged is named, and not used. Use :class:`Checkpoints` beside it for what is to last.

    Args:
        folder: on each node, of a file system that outlives the processes; ranks that see the same
            folder are one node.
        model, optimizer, background, memory_budget, rng, stateful: as of :class:`Checkpoints`.
        keep: how many checkpoints stay on each node.

    Raises:
        ValueError, TypeError, RuntimeError: as :class:`Checkpoints`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        keep: int | None = 2,
        **options: Any,
    ) -> None:
        super().__init__(folder, model, optimizer, keep=keep, **options)
        groups = self._writer.groups

        def find() -> tuple[int, str]:
            self.folder.mkdir(parents=True, exist_ok=True)
            facts = self.folder.stat()
            name = f"{socket.gethostname()} {_boot()} {facts.st_dev} {facts.st_ino}"
            return self._ready_state().rank, name

        found = on_all_ranks(groups, find)
        numbers, names = zip(*found, strict=True)
        self._nodes = Nodes(groups[0] if groups else None, names, numbers)

    def _make_save(self, final: Path, saved: SavedState, own: bytes) -> Save:
        groups = self._writer.groups
        return PeerSave(final, saved, own, groups, self._keep, self._known, self._nodes)

    @operation("PeerCheckpoints.load")
    def load(self, step: int | None = None, *, fallback: bool = True) -> int | None:
        """Loads the newest checkpoint of which every file is on some node, or that of ``step``.

        Returns its step, or None if there is none: then load another kind of checkpoint, if you
        have one. A copy that is damaged is a warning, and so is a checkpoint that lacks files.

        Args:
            fallback: if the newest step lacks a file, the one before is loaded; else an error.

        Raises:
            FileNotFoundError: there is no complete checkpoint of this step.
            ValueError: it does not fit; names file and key, on every rank.
        """
        state = self._ready_state()
        finish_writes()
        held = self._gather(self._good_files())
        keys = sorted({key for each in held for key in each}, reverse=True)
        counts = {key: _num_found(key, held) for key in keys}
        complete = [key for key, (found, total) in counts.items() if found == total]
        chosen = [key for key in complete if step in (None, key[0])][:1]
        wanted = keys[0][0] if keys and not fallback else step
        if wanted is not None and (not chosen or chosen[0][0] != wanted):
            steps = [key[0] for key in complete]
            raise FileNotFoundError(f"no complete checkpoint of step {wanted}: {steps}")
        if not chosen:
            for key, (found, total) in counts.items():
                lost = f"{total - found} of its {total} files are lost, or damaged on all nodes"
                _log.warning("step %d cannot be loaded: %s", key[0], lost)
            return None
        files = [each[chosen[0]].files if chosen[0] in each else {} for each in held]
        self._load_from(chosen[0], files, state)
        return chosen[0][0]

    def _load_from(self, key: _Key, held: list[dict[str, int]], state: ShardState) -> None:
        def bring(folder: Path, names: set[str]) -> None:
            needs = self._gather(sorted(names))
            moves = _moves(needs, held, self._nodes)
            groups = self._writer.groups
            on_all_ranks(groups, lambda: carry_out(self._nodes.group, moves, folder))
            on_all_ranks(groups, lambda: self._check(folder, moves))  # the list of files is there
            for move in moves:
                held[move.target][move.name] = move.nbytes

        path = path_of(self.folder, key[0])
        path.mkdir(parents=True, exist_ok=True)
        names = {name for each in held for name in each}
        own = own_name(state.rank)
        bring(path, {NAME, METADATA, own if own in names else own_name(0)} | (names & {VALUES}))
        load = PeerLoad(bring, path, state, self._model, self._optimizers, False, self._budget)
        load.run(self._stateful, self._rng)

    def _check(self, folder: Path, moves: Sequence[Move]) -> None:
        sums = read_sums(folder)
        assert sums is not None
        check_files(folder, _received(moves, self._nodes.rank, sums))

    def _good_files(self) -> dict[_Key, Held]:
        """Files of this node that have their checksums; its ranks look at some of them each."""
        found: dict[_Key, Held] = {}
        here = self._nodes.neighbours
        share = slice(here.index(self._nodes.rank), None, len(here))
        for step in steps_in(self.folder):
            path = path_of(self.folder, step)
            try:
                sums, text = read_sums(path) or Checksums(), (path / NAME).read_bytes()
            except (OSError, ValueError) as error:
                _log.warning("%s is not used: %s", path, error)
                continue
            names = [name for name in sorted(sums) if (path / name).exists()]
            good = {NAME: len(text)}
            for name in names[share]:
                try:
                    check_files(path, {name: sums[name]})
                except (OSError, ValueError) as error:
                    _log.warning("%s is not used: %s", path / name, error)
                else:
                    good[name] = sums[name].nbytes
            found[step, crc32(text)] = Held(good, len(sums))
        return found

    def _gather(self, value: T) -> list[T]:
        return gather_objects(self._writer.groups, [value], None)


def _num_found(key: _Key, held: Sequence[Mapping[_Key, Held]]) -> tuple[int, int]:
    """How many good files of a checkpoint there are on all nodes, and of how many it consists."""
    parts = [each[key] for each in held if key in each]
    names = {name for part in parts for name in part.files}
    return len(names - {NAME}), parts[0].total


def _moves(
    needs: Sequence[Sequence[str]], held: Sequence[Mapping[str, int]], nodes: Nodes
) -> list[Move]:
    """Files that a rank needs and no rank of its node has; one of each node gets them."""
    here = {
        name: {file for rank in nodes.ranks_on(name) for file in held[rank]} for name in nodes.names
    }
    moves = []
    for target, files in enumerate(needs):
        for file in files:
            if file not in here[nodes.names[target]]:
                source = next(rank for rank, each in enumerate(held) if file in each)
                moves.append(Move(file, held[source][file], source, target))
                here[nodes.names[target]].add(file)
    return moves
