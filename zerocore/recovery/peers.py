"""Checkpoints in the nodes' memory: each rank's file is on its own node and on another one.

Ranks send files to each other, and the receiver verifies each.
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

from zerocore.checkpoint.checked_reads import check_files, read_sums
from zerocore.checkpoint.checkpoints import Checkpoints
from zerocore.checkpoint.checksums import METADATA, NAME, Checksums
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
_Key = tuple[int, int]  # step, and checksum of the list of files: a step may be saved again
_PIECE_NBYTES = 64 << 20  # bytes of a message


class Move(NamedTuple):
    """A file that rank ``source`` of the group sends to rank ``target``."""

    name: str
    nbytes: int
    source: int
    target: int


def rounds_of(moves: Iterable[Move]) -> list[list[Move]]:
    """Groups moves into rounds: in a round, a rank sends and receives at most one file.

    All ranks get the same rounds and run them in order, so no ranks wait for each other in a cycle.
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
    """Sends and receives this rank's files among the moves; collective of ``group``. If a file
    cannot be read or made, raises OSError after all other files, for which other ranks wait."""
    if group is None:
        return  # a single rank has all files
    failed: OSError | None = None
    rank = group.rank()
    for moved in rounds_of(moves):
        works = []
        for move in moved:
            if rank not in (move.source, move.target):
                continue
            try:
                memory = _memory_of(folder / move.name, move.nbytes, rank == move.target)
            except OSError as error:
                failed = error
                memory = torch.zeros(move.nbytes, dtype=torch.uint8, device="cpu")
            start = dist.isend if rank == move.source else dist.irecv
            other = dist.get_global_rank(group, move.target if rank == move.source else move.source)
            works += [start(piece, other, group=group) for piece in memory.split(_PIECE_NBYTES)]
        with waiting(group, "a copy of a file to another rank"):
            for work in works:
                if work is not None:
                    work.wait()
    if failed is not None:
        raise failed


def _memory_of(path: Path, nbytes: int, is_new: bool) -> Tensor:
    """Maps the bytes of a file; if it is new, writes to the memory go to the file."""
    if is_new:
        with path.open("wb") as file:
            file.truncate(nbytes)
    elif path.stat().st_size != nbytes:
        raise OSError(f"{path} has {path.stat().st_size} bytes, expected {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(str(path), shared=is_new, size=nbytes, dtype=torch.uint8)


class Held(NamedTuple):
    """Sizes of a checkpoint's good files that a rank has found, and the number of all its files."""

    files: dict[str, int]
    total: int


@dataclass(frozen=True)
class Nodes:
    """The nodes of a model's ranks."""

    group: dist.ProcessGroup | None  # ranks in this class are the group's; None for one rank
    names: tuple[str, ...]  # the node of each rank
    numbers: tuple[int, ...]  # the rank in the model, of each rank

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def ranks_on(self, name: str) -> list[int]:
        return [rank for rank, node in enumerate(self.names) if node == name]

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this node."""
        return self.ranks_on(self.names[self.rank])

    def peers(self) -> dict[int, int]:
        """Returns, by rank, the rank of the next node that holds its copy; empty for one node."""
        names = list(dict.fromkeys(self.names))
        if len(names) == 1:
            return {}
        holders = {}
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            next_ranks = self.ranks_on(following)
            for place, rank in enumerate(self.ranks_on(name)):
                holders[rank] = next_ranks[place % len(next_ranks)]
        return holders


def files_of(number: int) -> tuple[str, str]:
    """Returns the names of the files that a rank of the model saves."""
    return SavePlan({}, 1).file_name(number), own_name(number)


@dataclass(frozen=True)
class PeerSave(Save):
    """The save of a checkpoint on all nodes."""

    nodes: Nodes
    texts: dict[str, bytes] = field(default_factory=dict)  # small files that are on each node

    @property
    def leader(self) -> int:
        return self.nodes.numbers[self.nodes.neighbours[0]]

    def _begin(self) -> Path:
        temporary = super()._begin()
        small_files = super()._common() if self.saved.rank == 0 else {}
        for texts in gather_objects(self.groups, [small_files], None):
            self.texts.update(texts)
        return temporary

    def _refuse_good(self) -> None:
        """Replaces a good checkpoint of the same step: other nodes may have lost their part."""

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
        return Checksums({name: file_sums for name, file_sums in sums.items() if name in names})


def _received(moves: Sequence[Move], rank: int, sums: Checksums) -> Checksums:
    names = [move.name for move in moves if move.target == rank and move.name in sums]
    return Checksums({name: sums[name] for name in names})


class PeerLoad(TrainingLoad):
    """The load of files on several nodes; a rank first fetches the files that its node lacks."""

    def __init__(self, bring: Callable[[Path, set[str]], None], folder: Path, *args: Any) -> None:
        super().__init__(folder, *args)
        self._bring_files = bring

    def _check_sizes(self, contents: Contents) -> None:
        """Skips the check: files are verified before they are sent, and on arrival."""

    def _bring(self, contents: Contents) -> None:
        planner = DefaultLoadPlanner()
        planner.set_up_planner(self._flat()[0], contents.metadata, True)
        places = contents.metadata.storage_data
        items = planner.create_local_plan().items
        self._bring_files(
            contents.folder, {places[item.storage_index].relative_path for item in items}
        )


def _boot() -> str:
    """Returns an id that tells hosts of the same name apart; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class PeerCheckpoints(Checkpoints):
    """Checkpoints that survive lost processes and nodes, without a shared disk.

    ``folder`` is a folder in each node's own memory, such as ``/dev/shm/run``. A rank writes its
    file there, and sends a copy to a rank of the next node; both happen behind the next steps.
    After a restart :meth:`load` fetches files that a node lacks from nodes that have them.
    The number of ranks may change, and nodes may be new. A checkpoint can be loaded unless two
    neighbouring nodes are lost. Checksums verify every file when it is written, kept and received;
    a damaged file is named and not used. Also save :class:`Checkpoints` to permanent storage.

    Args:
        folder: a folder on each node, in a file system that outlives the processes. Ranks that see
            the same folder count as one node.
        model, optimizer, background, memory_budget, rng, stateful: as for :class:`Checkpoints`.
        keep: the number of checkpoints that stay on each node.

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

        answers = on_all_ranks(groups, find)
        numbers, names = zip(*answers, strict=True)
        self._nodes = Nodes(groups[0] if groups else None, names, numbers)

    def _make_save(self, final: Path, saved: SavedState, rank_values: bytes) -> Save:
        groups = self._writer.groups
        return PeerSave(final, saved, rank_values, groups, self._keep, self._known, self._nodes)

    @operation("PeerCheckpoints.load")
    def load(self, step: int | None = None, *, fallback: bool = True) -> int | None:
        """Loads the checkpoint of ``step``, or the newest one whose files are all on some node.

        Returns its step, or None if there is none: then load another kind of checkpoint, if you
        have one. Logs a warning for each damaged copy, and for checkpoints that lack files.

        Args:
            fallback: load an earlier step if the newest lacks a file; otherwise raise.

        Raises:
            FileNotFoundError: there is no complete checkpoint of this step.
            ValueError: the checkpoint does not fit; names file and key, on every rank.
        """
        state = self._ready_state()
        finish_writes()
        held = self._gather(self._good_files())
        keys = sorted({key for rank in held for key in rank}, reverse=True)
        counts = {key: _num_found(key, held) for key in keys}
        complete = [key for key, (present, total) in counts.items() if present == total]
        chosen = [key for key in complete if step in (None, key[0])][:1]
        wanted = keys[0][0] if keys and not fallback else step
        if wanted is not None and (not chosen or chosen[0][0] != wanted):
            steps = [key[0] for key in complete]
            raise FileNotFoundError(f"no complete checkpoint of step {wanted}; complete: {steps}")
        if not chosen:
            for key, (good, total) in counts.items():
                lost = f"{total - good} of its {total} files are lost, or damaged on all nodes"
                _log.warning("step %d cannot be loaded: %s", key[0], lost)
            return None
        files = [rank[chosen[0]].files if chosen[0] in rank else {} for rank in held]
        self._load_from(chosen[0], files, state)
        return chosen[0][0]

    def _load_from(self, key: _Key, held: list[dict[str, int]], state: ShardState) -> None:
        def bring(folder: Path, names: set[str]) -> None:
            needs = self._gather(sorted(names))
            moves = _moves(needs, held, self._nodes)
            groups = self._writer.groups
            on_all_ranks(groups, lambda: carry_out(self._nodes.group, moves, folder))
            on_all_ranks(groups, lambda: self._check(folder, moves))  # the list has arrived
            for move in moves:
                held[move.target][move.name] = move.nbytes

        path = path_of(self.folder, key[0])
        path.mkdir(parents=True, exist_ok=True)
        names = {name for of_rank in held for name in of_rank}
        file = own_name(state.rank)
        bring(path, {NAME, METADATA, file if file in names else own_name(0)} | (names & {VALUES}))
        load = PeerLoad(bring, path, state, self._model, self._optimizers, False, self._budget)
        load.run(self._stateful, self._rng)

    def _check(self, folder: Path, moves: Sequence[Move]) -> None:
        sums = read_sums(folder)
        assert sums is not None
        check_files(folder, _received(moves, self._nodes.rank, sums))

    def _good_files(self) -> dict[_Key, Held]:
        """Returns files of this node with the right checksums; its ranks divide the check."""
        files: dict[_Key, Held] = {}
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
            files[step, crc32(text)] = Held(good, len(sums))
        return files

    def _gather(self, value: T) -> list[T]:
        return gather_objects(self._writer.groups, [value], None)


def _num_found(key: _Key, held: Sequence[Mapping[_Key, Held]]) -> tuple[int, int]:
    """Returns the number of a checkpoint's good files on all nodes, and of all its files."""
    parts = [of_rank[key] for of_rank in held if key in of_rank]
    names = {name for part in parts for name in part.files}
    return len(names - {NAME}), parts[0].total


def _moves(
    needs: Sequence[Sequence[str]], held: Sequence[Mapping[str, int]], nodes: Nodes
) -> list[Move]:
    """Returns moves of files that a node's ranks need and lack; one rank of the node gets each."""
    here = {
        name: {file for rank in nodes.ranks_on(name) for file in held[rank]} for name in nodes.names
    }
    moves = []
    for target, files in enumerate(needs):
        for file in files:
            if file not in here[nodes.names[target]]:
                source = next(rank for rank, of_rank in enumerate(held) if file in of_rank)
                moves.append(Move(file, held[source][file], source, target))
                here[nodes.names[target]].add(file)
    return moves
