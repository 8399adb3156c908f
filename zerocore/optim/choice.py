"""The choice of an optimizer of whole matrices: its parameters, their owners, bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerocore.common.quantities import format_nbytes
from zerocore.common.tables import render_table
from zerocore.model.ranks import Ranks
from zerocore.optim.exchange import Lanes
from zerocore.planning.ownership import Round


@dataclass(frozen=True)
class Choice:
    """An optimizer's plan; ``str()`` is a table.

    Attributes:
        optimizer: its name.
        owners: for each parameter that is updated as a whole, its name and the ranks that own its
            matrices, numbered as in the sharded model; of experts, among those that share them.
        others: names of parameters that AdamW trains.
        work: share of each rank of the work on matrices that this one shares; their sum is 1.
        num_rounds: exchanges of a step, each of one all-to-all there and one back.
        sent_nbytes: what this rank sends in a step.
        rank: this one.
    """

    optimizer: str
    owners: Mapping[str, tuple[int, ...]]
    others: tuple[str, ...]
    work: tuple[float, ...]
    num_rounds: int
    sent_nbytes: int
    rank: int

    def title(self) -> str:
        """One line: how many parameters whom, and what is sent."""
        others = f", {len(self.others)} by AdamW" if self.others else ""
        return (
            f"{self.optimizer}: {len(self.owners)} parameters as whole matrices{others}; rank "
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
    rounds: Sequence[tuple[Round, Lanes]],
    names: Sequence[str],
    others: Sequence[str],
    ranks: Ranks,
    sent_nbytes: int,
) -> Choice:
    """The choice that follows from the rounds of a step; ``names`` are those of parameters."""
    owners: dict[str, dict[int, None]] = {}
    work = [0] * ranks.world_size
    for step, lanes in rounds:
        for matrix, place in zip(step.matrices, step.owners, strict=True):
            owner = lanes.members[place]
            owners.setdefault(names[matrix.param], {})[owner] = None
            work[owner] += matrix.cost
    total = max(sum(work), 1)
    return Choice(
        optimizer,
        {name: tuple(sorted(owners[name])) for name in names if name in owners},
        tuple(others),
        tuple(load / total for load in work),
        len(rounds),
        sent_nbytes,
        ranks.rank,
    )
