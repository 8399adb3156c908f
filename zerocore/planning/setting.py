"""The question that a plan answers: the training step, the machine and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerocore.common.checks import check_int
from zerocore.common.links import Link, LinkLike, find_link
from zerocore.common.nodes import DEFAULT_NODE, MATMUL_SHARE, Gpu, Node, find_node
from zerocore.common.quantities import parse_bandwidth, parse_flops, parse_nbytes
from zerocore.options.config import Communication
from zerocore.options.parameter_mesh import ParameterMesh
from zerocore.planning.activations import Loss
from zerocore.planning.division import Division

DEFAULT_FLOPS = 400e12
"""Operations per second: about 40 % of an H100's 989e12 dense bf16 ones (NVIDIA's data sheet)."""

DEFAULT_MEMORY = "24GiB"

DEFAULT_HOST_BANDWIDTH = 400e9
"""Bytes per second: assumed of a server with two sockets, of about 600e9 that 16 channels of DDR5
reach on paper."""

UPDATE_NBYTES = 28
"""Host memory traffic for a parameter: AdamW in float32 reads four numbers and writes three."""
STEP_OPERATIONS = 6
"""For a parameter and a token: two in the forward, four in the backward."""


@dataclass(frozen=True, eq=False)  # inputs may be tensors, which have no truth value
class Workload:
    """A rank's training step, for :func:`zerocore.plan`.

    Attributes:
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``. Bytes
            are those of the whole step, times those of one micro-batch that communicates.
        inputs: one micro-batch for ``loss``, read for shapes only; made from ``micro_batch`` and
            ``seq_len`` for Hugging Face models.
        loss: called as ``loss(model, inputs)``; by default the model's ``loss`` or the sum of its
            outputs.
        optimizer: a name such as ``"adamw"``, or how many tensors of a parameter's size it keeps.
            ``"muon"`` is that on all matrices by shape: what it sends is counted, its time is not.
        rank: whose step, counted replica by replica; rank 0 owns the most.
        micro_batch: samples in a forward, for Hugging Face models.
        seq_len: tokens in a sample, at most what the configuration allows.
        checkpointing: recompute each block in the backward.
        zero_bubble: the model is a stage of a pipeline whose schedule splits the backward in two.
            Its units are gathered once a step and stay; gradients are reduced once, at its end.
        compiled: by torch.compile, which fuses elementwise kernels; for the time on a ``node``.

    Raises:
        ValueError: a number is below 1.
        TypeError: a number is no int.
    """

    micro_batches: int = 1
    micro_batch: int = 1
    seq_len: int = 2048
    checkpointing: bool = False
    zero_bubble: bool = False
    compiled: bool = False
    inputs: Any = None
    loss: Loss | None = None
    optimizer: str | int = "adamw"
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("micro_batches", "micro_batch", "seq_len"):
            check_int(name, getattr(self, name), 1)
        check_int("rank", self.rank, 0)
        if self.loss is not None and not callable(self.loss):
            raise TypeError(
                f"loss must be a function of the model and its inputs, got {self.loss!r}"
            )


@dataclass(frozen=True)
class Host:
    """The memory beside the devices of a machine.

    Attributes:
        memory_nbytes: bytes, for all ranks on the machine.
        bandwidth_bytes_per_s: what an update reads and writes in a second.
        num_ranks: ranks on the machine, at most.
    """

    memory_nbytes: int
    bandwidth_bytes_per_s: float
    num_ranks: int

    def nbytes_of(self, world_size: int) -> int:
        """The share of one of so many ranks."""
        return self.memory_nbytes // min(world_size, self.num_ranks)

    def hiding_tokens(self, world_size: int, flops_per_s: float) -> int:
        """Tokens that a machine computes with in a step that lasts as long as the host's update.

        Both are proportional to the parameters, which cancel.
        """
        flops = flops_per_s * min(world_size, self.num_ranks)
        return round(UPDATE_NBYTES * flops / (STEP_OPERATIONS * self.bandwidth_bytes_per_s))


@dataclass(frozen=True)
class Figures:
    """A :class:`Machine` in bytes, bytes a second and operations a second, for a number of ranks.

    ``replica_link`` and ``near_link`` are None where nothing goes there, or on ``links``, too.
    ``gpu`` says how fast each kind of operation is; None where all reach ``flops_per_s``.
    """

    memory_nbytes: int
    links: tuple[Link, ...]
    replica_link: Link | None
    near_link: Link | None
    flops_per_s: float
    host: Host | None
    node: Node
    gpu: Gpu | None = None


@dataclass(frozen=True)
class Machine:
    """Devices, the links between them and the host that they are in, for :func:`zerocore.plan`.

    Attributes:
        node: GPUs, links and network by name, such as ``"8xH100-ib400"``, see
            :func:`zerocore.common.nodes.find_node`, or a :class:`zerocore.common.nodes.Node`. The
            other options go before it. By default links are those of ``8xH100-ib400``.
        memory: bytes of a device, as a number or text such as ``"24GiB"``; by default that of the
            node's GPU, and 24 GiB without a node.
        links: presets, bandwidths such as ``"450GB/s"`` or ``"450GB/s,12us"``, or links, between
            the ranks that share the state; by default that of the node.
        replica_link: the link between replicas. By default they share the one of ``links``; without
            ``links`` it is that of the node.
        near_link: the link between ranks of ``regather``. By default that of ``links``; without
            ``links`` it is that of the node.
        flops: operations per second that layers reach. By default the node's GPU says it for each
            kind of kernel; without a node it is 400 TFLOP/s.
        host_memory: bytes of a machine beside its devices, such as ``"512GiB"``, which the ranks
            of a node share: says which stage and ``offload=`` fit.
        host_bandwidth: what the host reads and writes in a second, such as ``"400GB/s"``.

    Raises:
        ValueError, TypeError: no such quantity, machine or link.
    """

    node: str | Node | None = None
    memory: str | int | None = None
    links: Sequence[LinkLike] | LinkLike | None = None
    replica_link: LinkLike | None = None
    near_link: LinkLike | None = None
    flops: str | float | None = None
    host_memory: str | int | None = None
    host_bandwidth: str | float = DEFAULT_HOST_BANDWIDTH

    def __post_init__(self) -> None:
        self.figures(1, 1, 1)

    def figures(self, world_size: int, num_replicas: int, num_near: int) -> Figures:
        """Its figures; the links of a node depend on the numbers of ranks."""
        node = DEFAULT_NODE if self.node is None else find_node(self.node)
        num_shards, given = world_size // num_replicas, self.links

        def own_link(link: LinkLike | None, num_ranks: int, stride: int = 1) -> Link | None:
            if link is None and given is None:
                return node.link(num_ranks, stride)
            return None if link is None else find_link(link)

        links = node.link(num_shards) if given is None else given
        listed = links if isinstance(links, Sequence) and not isinstance(links, str) else [links]
        replica_link = own_link(self.replica_link, num_replicas, num_shards)
        near_link = own_link(self.near_link, num_near)
        gpu = None if self.node is None else node.gpu
        memory, flops = self.memory, self.flops
        if memory is None:
            memory = DEFAULT_MEMORY if gpu is None else gpu.memory_nbytes
        if flops is None:
            flops = DEFAULT_FLOPS if gpu is None else MATMUL_SHARE * gpu.matmul_flops
        return Figures(
            memory_nbytes=parse_nbytes(memory),
            links=tuple(find_link(link) for link in listed),
            replica_link=replica_link if num_replicas > 1 else None,
            near_link=near_link if num_near > 1 else None,
            flops_per_s=parse_flops(flops),
            host=self._host(node),
            node=node,
            gpu=gpu if self.flops is None else None,
        )

    def _host(self, node: Node) -> Host | None:
        rate = parse_bandwidth(self.host_bandwidth, "host_bandwidth")
        if not rate > 0:
            raise ValueError(f"host_bandwidth must be positive, got {self.host_bandwidth!r}")
        if self.host_memory is None:
            return None
        return Host(parse_nbytes(self.host_memory, "host_memory"), rate, node.num_ranks)


@dataclass(frozen=True)
class PlannedPart:
    """Parameters that not all ranks share.

    Attributes:
        pattern: their names match it.
        num_ranks: hold the same values, and share their state.
        num_parts: of each of them, along its first dimension.
    """

    pattern: str
    num_ranks: int
    num_parts: int


def planned_parts(groups: Mapping[str, Any] | None, world_size: int) -> tuple[PlannedPart, ...]:
    """The parts that ``groups=`` of :func:`zerocore.plan` names.

    Raises:
        TypeError: no dict of :class:`zerocore.ParameterMesh` with numbers of ranks.
        ValueError: a number below 1, or numbers that do not make up ``world_size``.
    """
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(
            "groups: expected a dict such as {'*.experts.*': zerocore.ParameterMesh(2, of=4)}, got "
            f"{type(groups)}"
        )
    found = []
    for pattern, part in (groups or {}).items():
        if not isinstance(part, ParameterMesh) or part.dim != 0:
            raise TypeError(
                f"groups['{pattern}']: expected numbers of ranks, zerocore.ParameterMesh(2, of=4), "
                f"along dimension 0, got {part!r}"
            )
        num_parts = 1 if part.of is None else part.of
        for name, number in (("mesh", part.mesh), ("of", num_parts)):
            check_int(f"groups['{pattern}'] {name}", number, 1)
        if part.mesh * num_parts != world_size:
            raise ValueError(
                f"groups['{pattern}']: {num_parts} parts on {part.mesh} ranks each are not the "
                f"{world_size} ranks of world_size"
            )
        found.append(PlannedPart(pattern, part.mesh, num_parts))
    return tuple(found)


@dataclass(frozen=True)
class Setting:
    """The question that a plan answers; fields are arguments of :func:`zerocore.plan`. The
    workload has no ``inputs`` and no ``loss``, which are measured before.

    Raises:
        ValueError: there is no such rank, or replicas or near ranks of unequal size.
        TypeError: a number that is no int.
    """

    world_size: int
    num_replicas: int
    communication: Communication
    workload: Workload
    machine: Figures
    groups: tuple[PlannedPart, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size % self.num_replicas != 0:
            raise ValueError(
                f"num_replicas must divide world_size, which counts all ranks: {self.world_size} "
                f"ranks are not {self.num_replicas} replicas of equal size"
            )
        num_shards, num_near = self.world_size // self.num_replicas, self.communication.num_near
        if num_shards % num_near != 0:
            raise ValueError(
                f"regather must divide the number of ranks that share the state, {num_shards}; got "
                f"{num_near}"
            )
        if self.workload.rank >= self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}, got {self.workload.rank}")

    def division(self, stage: int) -> Division:
        """How the state is divided at a stage."""
        rank = self.workload.rank
        parts = tuple((p.num_ranks, 1, rank // p.num_parts) for p in self.groups)
        return Division(
            stage, self.world_size, self.num_replicas, self.communication, rank, parts=parts
        )
