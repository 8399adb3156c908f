"""How a model's state is divided over ranks: the input in which plans of one model differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerocore.model.ranks import Ranks
from zerocore.options.config import Communication
from zerocore.options.offload import Offload
from zerocore.options.stages import Placements, placements_of

Part = tuple[int, int, int]
"""A part of the model: ranks that share its state, replicas, and the index of this shard."""


def parts_of(meshes: Sequence[Ranks]) -> tuple[Part, ...]:
    """Returns the parts of a model, seen from this rank."""
    return tuple((ranks.num_shards, ranks.num_replicas, ranks.shard_rank) for ranks in meshes)


@dataclass(frozen=True)
class Division:
    """A stage, the ranks, and the options that decide the bytes of a rank.

    Attributes:
        stage: 0 to 3.
        world_size: number of all ranks, which are numbered replica by replica.
        num_replicas: replicas; the ranks of each share the state.
        communication: as for ``shard``; its ``regather`` is a number of ranks.
        parts: parts of the model that fewer ranks share, such as its experts.
        rank: the rank whose bytes are planned; rank 0 owns the most.
        backend: backend of the groups, on which the memory of a reduction depends.
        sums_on_host: the host waits for sums over the replicas, as on the CPU.
        offload: state that is offloaded from the device.
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
        """The number of ranks that share the state."""
        return self.world_size // self.num_replicas

    def num_parts(self, mesh: int) -> int:
        """Returns into how many parts, on different ranks, a mesh's parameters are cut."""
        if mesh == 0:
            return 1
        num_shards, num_replicas, _ = self.parts[mesh - 1]
        return max(1, self.world_size // (num_shards * num_replicas))

    @property
    def placements(self) -> Placements:
        """Which state the ranks share."""
        return placements_of(self.stage)

    @property
    def gathers(self) -> bool:
        """Whether units are gathered before they compute."""
        return self.placements.parameters and self.num_shards > 1

    @property
    def mesh(self) -> str:
        """The mesh as text, replicas by shards."""
        return f"({self.num_replicas}, {self.num_shards}) mesh"

    @property
    def ranks(self) -> str:
        """The number of ranks as text, with the mesh if there are several replicas."""
        in_mesh = f" in a {self.mesh}" if self.num_replicas > 1 else ""
        return f"{self.world_size} ranks{in_mesh}"
