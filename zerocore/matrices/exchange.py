"""Sends parts of matrices to their owners, and the results back; see Note [Whole matrices]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore._C import Exchange
from zerocore.common.quantities import format_nbytes
from zerocore.common.tables import render_table
from zerocore.layout.cuts import Cut
from zerocore.matrices.ownership import Grid, Round
from zerocore.model.ranks import Ranks
from zerocore.model.state import ShardState
from zerocore.options.stages import placements_of
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import RowShard

Arrival = Callable[[], list[Tensor]]  # waits for received tensors and returns them


@dataclass(frozen=True)
class Lanes:
    """The ranks of one of a model's meshes, and their process groups."""

    grid: Grid
    rank: int  # index in the grid
    shards: dist.ProcessGroup | None  # group that shards parameters; None: each rank has all
    replicas: tuple[dist.ProcessGroup, ...]  # the group of each dimension of replicas
    members: tuple[int, ...]  # the ranks' indices in the model
    mesh: int  # index in the state's meshes
    state: ShardState  # its engine runs the exchange and counts the bytes

    @staticmethod
    def of(state: ShardState, mesh: int) -> Lanes:
        """Returns the lanes of a sharded model's mesh; at stage 0 all of its ranks are replicas."""
        ranks = state.meshes[mesh]
        shared = placements_of(state.config.stage).optimizer
        shards = ranks.shard if shared else None
        groups = (ranks.shard, ranks.replicas) if not shared else (ranks.replicas,)
        replicas = tuple(group for group in groups if group is not None)
        grid = Grid(1 if shards is None else shards.size(), tuple(g.size() for g in replicas))
        rank, stride = (0 if shards is None else shards.rank()), grid.num_shards
        for group in replicas:
            rank += group.rank() * stride
            stride *= group.size()
        members = tuple(state.ranks.members.index(member) for member in ranks.members) or (0,)
        return Lanes(grid, rank, shards, replicas, members, mesh, state)

    def cut(self, shard: ShardedParameter | RowShard) -> Cut:
        cut = Cut.of(self.state.engine.layout(shard.unit), shard.position)
        return cut if self.shards is not None else Cut.whole(cut.numel)


@dataclass(frozen=True)
class RoundExchange:
    """The exchange of one round's matrices; all ranks of the mesh must call its methods."""

    step: Round
    lanes: Lanes
    like: Tensor  # an empty tensor with the dtype and device of all messages

    def to_owners(self, parts: Sequence[Tensor]) -> Arrival:
        """Sends this rank's elements of each matrix (1-D) to its owner. Returns a function that
        waits for this rank's own matrices, flattened."""
        step = self.step
        if self.lanes.shards is None:
            return lambda: [parts[index].to(self.like.device) for index in step.mine]
        send = self._joined([parts[index] for owned in step.by_shard for index in owned])
        counts = step.elements_from_shards()
        sent = step.elements_to_owners()
        transfer = self._transfer(self.lanes.shards, send, sent, counts, step.exchanged_numel)

        def arrived() -> list[Tensor]:
            pieces: dict[int, list[Tensor]] = {index: [] for index in step.mine}
            messages = transfer.wait().split([count for count in counts if count > 0])
            for parts, message in zip(step.parts_of_mine.values(), messages, strict=True):
                sizes = [end - begin for _, begin, end in parts]
                for (index, _, _), piece in zip(parts, message.split(sizes), strict=True):
                    pieces[index].append(piece)
            return [self._joined(matrix) for matrix in pieces.values()]

        return arrived

    def to_shards(self, wholes: Sequence[Tensor]) -> Arrival:
        """Sends each rank its elements of this rank's own matrices (flattened). Returns a function
        that waits for this rank's elements of every matrix of the round."""
        step = self.step
        matrices: dict[int, Tensor] = dict(zip(step.mine, wholes, strict=True))
        transfer = None
        if self.lanes.shards is not None:
            cut = [
                matrices[index][begin:end]
                for parts in step.parts_of_mine.values()
                for index, begin, end in parts
            ]
            sent, counts = step.elements_from_shards(), step.elements_to_owners()
            send = self._joined(cut)
            transfer = self._transfer(self.lanes.shards, send, sent, counts, step.exchanged_numel)

        def arrived() -> list[Tensor]:
            if transfer is not None:
                order = [index for owned in step.by_shard for index in owned]
                matrices.update(self._split(order, transfer.wait()))
            self._spread(matrices)
            return [matrices[index] for index in range(len(step.matrices))]

        return arrived

    def _spread(self, held: dict[int, Tensor]) -> None:
        """Sends this replica's results to the other replicas and receives theirs."""
        for group, (place, by_rank) in zip(self.lanes.replicas, self.step.spreads, strict=True):
            message = self._joined([held[index] for index in by_rank[place]])
            counts = [self.step.own_numel(indices) for indices in by_rank]
            send = message.repeat(group.size())
            sent = [message.numel()] * group.size()
            transfer = self._transfer(group, send, sent, counts, sum(counts) * group.size())
            order = [index for indices in by_rank for index in indices]
            held.update(self._split(order, transfer.wait()))

    def _transfer(
        self,
        group: dist.ProcessGroup,
        send: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        total: int,
    ) -> Exchange:
        """Starts an all-to-all of a 1-D buffer with a message for each rank: ``sent`` elements to
        each, ``received`` from each. ``total``, equal on all ranks, counts all their messages."""
        lanes, size = self.lanes, send.element_size()
        sent_nbytes, received_nbytes = ([n * size for n in counts] for counts in (sent, received))
        across = group is lanes.state.meshes[lanes.mesh].replicas
        return lanes.state.engine.exchange(
            lanes.mesh, across, send, sent_nbytes, received_nbytes, total * size
        )

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        """Joins tensors, which may be on the host, on the device of messages."""
        return torch.cat(tensors).to(self.like.device) if tensors else self.like.new_empty(0)

    def _split(self, order: Sequence[int], message: Tensor) -> dict[int, Tensor]:
        sizes = [self.step.own_numel([index]) for index in order]
        return dict(zip(order, message.split(sizes), strict=True)) if order else {}


@dataclass(frozen=True)
class Choice:
    """An optimizer's choice of owners; ``str()`` is a table."""

    optimizer: str  # its name
    # The ranks that own the matrices of each parameter, by its name; ranks are numbered as in the
    # sharded model. Experts' owners are among the ranks that share them.
    owners: Mapping[str, tuple[int, ...]]
    others: tuple[str, ...]  # names of parameters that AdamW trains
    work: tuple[float, ...]  # each rank's part of the work on this rank's matrices; the sum is 1
    num_rounds: int  # exchanges of a step, each with an all-to-all to owners and one back
    sent_nbytes: int  # bytes that this rank sends in a step
    rank: int  # this rank

    def title(self) -> str:
        """Returns one line with the numbers of parameters and the bytes sent."""
        by_adamw = f", {len(self.others)} by AdamW" if self.others else ""
        return (
            f"{self.optimizer}: {len(self.owners)} parameters as whole matrices{by_adamw}; rank "
            f"{self.rank} of {len(self.work)} sends {format_nbytes(self.sent_nbytes)} in "
            f"{self.num_rounds} round{'s' if self.num_rounds != 1 else ''} a step"
        )

    def __str__(self) -> str:
        rows = [["parameter", "by", "owners"]]
        for name, owners in self.owners.items():
            rows.append([name, self.optimizer, ", ".join(map(str, owners))])
        rows += [[name, "AdamW", "all, a shard each"] for name in self.others]
        shares = ", ".join(f"{share:.1%}" for share in self.work)
        return render_table(self.title(), rows, [f"work on matrices by rank: {shares}"])


def choice_of(
    optimizer: str,
    rounds: Sequence[RoundExchange],
    names: Sequence[str],
    adamw_names: Sequence[str],
    ranks: Ranks,
    times_to_owners: int = 1,
) -> Choice:
    """Returns the choice that a step's rounds make; ``names``: the parameters' names."""
    owners: dict[str, set[int]] = {}
    work, sent_nbytes = [0] * ranks.world_size, 0
    for exchange in rounds:
        sent = times_to_owners * exchange.step.sent_to_owners() + exchange.step.sent_to_shards()
        sent_nbytes += sent * exchange.like.itemsize
        for matrix, place in zip(exchange.step.matrices, exchange.step.owners, strict=True):
            owner = exchange.lanes.members[place]
            owners.setdefault(names[matrix.param], set()).add(owner)
            work[owner] += matrix.cost
    total = max(sum(work), 1)
    return Choice(
        optimizer,
        {name: tuple(sorted(owners[name])) for name in names if name in owners},
        tuple(adamw_names),
        tuple(load / total for load in work),
        len(rounds),
        sent_nbytes,
        ranks.rank,
    )
