"""How a model's state is divided over ranks, in which one plan differs from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerocore.model.ranks import Ranks
from zerocore.options.config import Communication
from zerocore.options.offload import Offload
from zerocore.options.stages import Placements, placements_of

Part = tuple[int, int, int]
"""Ranks that share the state of a part of the model, replicas, and the rank's shard."""


def parts_of(meshes: Sequence[Ranks]) -> tuple[Part, ...]:
    """The parts of a model, seen from this rank."""
    return tuple((ranks.num_shards, ranks.num_replicas, ranks.shard_rank) for ranks in meshes)


@dataclass(frozen=True)
class Division:
    """A stage on so many ranks.

    Attributes:
        stage: 0 to 3.
        world_size: all ranks, numbered replica by replica.
        num_replicas: groups of ranks that hold the same; the ranks of one share the state.
        parts: those of the model, such as its experts.
        communication: its ``regather`` is a number of ranks.
        rank: whose bytes; rank 0 owns the most.
        backend: of the groups; the memory of a reduction depends on it.
        sums_on_host: sums over the replicas wait for the host, as on the CPU.
        offload: what leaves the device.
    """

    stage: int
    world_size: int
    num_replicas: int = 1
    communication: Communication = field(default_factory=Communication)
    rank: int = 0
    backend: str = "nccl"
    sums_on_host: bool = False
    offload: Offload | None = None
    parts: tuple[Part, ...] = ()

    @property
    def num_shards(self) -> int:
        """Ranks that share the state."""
        return self.world_size // self.num_replicas

    def num_parts(self, mesh: int) -> int:
        """Parts of each parameter of a mesh, on other ranks each."""
        if mesh == 0:
            return 1
        num_shards, num_replicas, _ = self.parts[mesh - 1]
        return max(1, self.world_size // (num_shards * num_replicas))

    @property
    def placements(self) -> Placements:
        """The state that these ranks share."""
        return placements_of(self.stage)

    @property
    def gathers(self) -> bool:
        """Whether units are gathered before they compute."""
        return self.placements.parameters and self.num_shards > 1

    @property
    def mesh(self) -> str:
        """Replicas by shards."""
        return f"({self.num_replicas}, {self.num_shards}) mesh"

    @property
    def ranks(self) -> str:
        """How many ranks, and of several replicas the mesh."""
        in_mesh = f" in a {self.mesh}" if self.num_replicas > 1 else ""
        return f"{self.world_size} ranks{in_mesh}"
