"""The inputs of a plan: the training step, the machine and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zerocore.common.checks import check_int
from zerocore.common.links import Link, LinkLike, find_link
from zerocore.common.nodes import DEFAULT_NODE, MATMUL_SHARE, Gpu, Node, find_node
from zerocore.common.parsing import parse_nbytes
from zerocore.common.quantities import parse_bandwidth, parse_flops
from zerocore.options.config import Communication
from zerocore.options.parameter_mesh import ParameterMesh
from zerocore.planning.activations import Loss
from zerocore.planning.division import Division

DEFAULT_FLOPS = 400e12
"""Operations a second: about 40 % of an H100's 989e12 dense bf16 ones (NVIDIA's data sheet)."""

DEFAULT_MEMORY = "24GiB"

DEFAULT_HOST_BANDWIDTH = "400GB/s"
"""Bytes a second, assumed for a server with two sockets; its 16 channels of DDR5 have a nominal
600 GB/s."""

UPDATE_NBYTES = 28
"""Bytes of host memory that AdamW in float32 reads (four numbers) and writes (three) for each
parameter."""
STEP_OPERATIONS = 6
"""Operations for each parameter and token: two in the forward, four in the backward."""


@dataclass(frozen=True, eq=False)  # inputs may be tensors, which have no truth value
class Workload:
    """A rank's training step, for :func:`zerocore.plan`.

    Attributes:
        micro_batches: forwards and backwards of a step, all but the last under ``no_sync``. Bytes
            are for the whole step, times for the one micro-batch that communicates.
        inputs: one micro-batch for ``loss``, read for shapes only; made from ``micro_batch`` and
            ``seq_len`` for Hugging Face models.
        loss: called as ``loss(model, inputs)``; by default the model's ``loss`` or the sum of its
            outputs.
        optimizer: a name such as ``"adamw"``, or the number of state tensors of a parameter's size.
            ``"muon"`` trains all matrices, chosen by shape; its bytes count, its time does not.
        rank: the rank whose step is planned, numbered replica by replica; rank 0 owns the most.
        micro_batch: samples in a forward, for Hugging Face models.
        seq_len: tokens in a sample, at most as many as the configuration allows.
        checkpointing: recompute each block in the backward.
        zero_bubble: the model is a stage of a pipeline whose schedule splits the backward in two.
            Its units are gathered once a step and stay; gradients are reduced once, at its end.
        compiled: torch.compile fuses elementwise kernels; changes the time on a ``node``.

    Raises:
        ValueError: a number is below 1.
        TypeError: a number is not an int.
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
class Machine:
    """The devices, their links and their host, for :func:`zerocore.plan`.

    Attributes:
        node: GPUs, links and network by name, such as ``"8xH100-ib400"``, see
            :func:`zerocore.common.nodes.find_node`, or a :class:`zerocore.common.nodes.Node`. The
            other options override it. Without a node, the default links are from ``8xH100-ib400``.
        memory: bytes of a device, as a number or text such as ``"24GiB"``; by default the memory of
            the node's GPU, or 24 GiB without a node.
        links: one or several links between the ranks that share the state, as presets, bandwidths
            such as ``"450GB/s"`` or ``"450GB/s,12us"``, or objects; by default the node's link.
        replica_link: the link between replicas. If only ``links`` is given, replicas share it; by
            default it is the node's link.
        near_link: the link between ranks of ``regather``. If only ``links`` is given, near ranks
            share it; by default it is the node's link.
        flops: operations a second that layers reach. By default the node's GPU has a rate for each
            kind of kernel; without a node it is 400 TFLOP/s.
        host_memory: bytes of a host, such as ``"512GiB"``, which the ranks of a node share. If
            given, the plan says which stage and ``offload=`` fit.
        host_bandwidth: bytes that the host reads and writes in a second, such as ``"400GB/s"``.

    Raises:
        ValueError, TypeError: a quantity, machine or link does not exist.
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
        Setting(1, 1, Communication(), Workload(), self).to_dict()


@dataclass(frozen=True)
class Setting:
    """The inputs of a plan. Fields are arguments of :func:`zerocore.plan`; ``groups`` has numbers
    of ranks. The workload's ``inputs`` and ``loss`` are None: activations are measured already.

    Raises:
        ValueError: there is no such rank, or replicas or near ranks differ in size.
        TypeError: a number is not an int.
    """

    world_size: int
    num_replicas: int
    communication: Communication
    workload: Workload
    machine: Machine
    groups: Mapping[str, ParameterMesh] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size % self.num_replicas != 0:
            raise ValueError(
                f"num_replicas must divide world_size, which counts all ranks: {self.world_size} "
                f"ranks are not {self.num_replicas} replicas of equal size"
            )
        if self.num_shards % self.communication.num_near != 0:
            raise ValueError(
                f"regather must divide the number of ranks that share the state, {self.num_shards}"
                f"; got {self.communication.num_near}"
            )
        if self.workload.rank >= self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}, got {self.workload.rank}")

    @property
    def num_shards(self) -> int:
        """The number of ranks that share the state."""
        return self.world_size // self.num_replicas

    def division(self, stage: int) -> Division:
        """Returns how the state is divided at a stage."""
        rank = self.workload.rank
        parts = tuple((group.mesh, 1, rank // group.of) for group in self.groups.values())
        return Division(
            stage, self.world_size, self.num_replicas, self.communication, rank, parts=parts
        )

    @property
    def node(self) -> Node:
        """The machine's node; without one, the default node, whose links alone are used."""
        return DEFAULT_NODE if self.machine.node is None else find_node(self.machine.node)

    @property
    def named_gpu(self) -> Gpu | None:
        """The GPU of the named machine; None without a name."""
        return None if self.machine.node is None else self.node.gpu

    @property
    def gpu(self) -> Gpu | None:
        """The GPU with a rate for each kind of kernel; None if :attr:`flops_per_s` applies."""
        return self.named_gpu if self.machine.flops is None else None

    @property
    def memory_nbytes(self) -> int:
        """Memory of a device."""
        default = DEFAULT_MEMORY if self.named_gpu is None else self.named_gpu.memory_nbytes
        return parse_nbytes(default if self.machine.memory is None else self.machine.memory)

    @property
    def flops_per_s(self) -> float:
        """Operations per second that layers reach, on average."""
        gpu, flops = self.named_gpu, self.machine.flops
        default = DEFAULT_FLOPS if gpu is None else MATMUL_SHARE * gpu.matmul_flops
        return parse_flops(default if flops is None else flops)

    @property
    def links(self) -> tuple[Link, ...]:
        """The links between the ranks that share the state."""
        links = self.machine.links
        if links is None:
            return (self.node.link(self.num_shards),)
        listed = links if isinstance(links, Sequence) and not isinstance(links, str) else [links]
        return tuple(map(find_link, listed))

    @property
    def replica_link(self) -> Link | None:
        """The link between replicas; None for one replica, or if replicas use :attr:`links`."""
        return self._link(self.machine.replica_link, self.num_replicas, self.num_shards)

    @property
    def near_link(self) -> Link | None:
        """The link between near ranks; None without near ranks, or if they use :attr:`links`."""
        return self._link(self.machine.near_link, self.communication.num_near)

    def _link(self, chosen: LinkLike | None, num_ranks: int, stride: int = 1) -> Link | None:
        if chosen is None and self.machine.links is None:
            link: Link | None = self.node.link(num_ranks, stride)
        else:
            link = None if chosen is None else find_link(chosen)
        return link if num_ranks > 1 else None

    @property
    def host_nbytes(self) -> int | None:
        """Memory of a host, for all its ranks together; None if unknown."""
        memory = self.machine.host_memory
        return None if memory is None else parse_nbytes(memory, "host_memory")

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes that an update on the host reads and writes in a second."""
        rate = parse_bandwidth(self.machine.host_bandwidth, "host_bandwidth")
        if not rate > 0:
            raise ValueError(
                f"host_bandwidth must be positive, got {self.machine.host_bandwidth!r}"
            )
        return rate

    @property
    def host_share(self) -> int | None:
        """A rank's part of the host's memory; None if unknown."""
        ranks = min(self.world_size, self.node.num_ranks)
        return None if self.host_nbytes is None else self.host_nbytes // ranks

    @property
    def hiding_tokens(self) -> int:
        """Tokens a step whose compute takes as long as the host's update, and so hides the update.

        Both times are proportional to the number of parameters, which cancels.
        """
        flops = self.flops_per_s * min(self.world_size, self.node.num_ranks)
        return round(UPDATE_NBYTES * flops / (STEP_OPERATIONS * self.host_bytes_per_s))

    def to_dict(self) -> dict[str, Any]:
        """Returns values for JSON: the workload's numbers, and the machine's bytes, bytes a second
        and operations a second."""
        values = asdict(self)
        for name in ("inputs", "loss"):
            del values["workload"][name]
        host = {
            "memory_nbytes": self.host_nbytes,
            "bandwidth_bytes_per_s": self.host_bytes_per_s,
            "num_ranks": self.node.num_ranks,
        }
        replica_link, near_link, gpu = self.replica_link, self.near_link, self.gpu
        values["machine"] = {
            "memory_nbytes": self.memory_nbytes,
            "links": [asdict(link) for link in self.links],
            "replica_link": replica_link and asdict(replica_link),
            "near_link": near_link and asdict(near_link),
            "flops_per_s": self.flops_per_s,
            "host": None if self.host_nbytes is None else host,
            "node": asdict(self.node),
            "gpu": gpu and asdict(gpu),
        }
        values["groups"] = [
            {"pattern": pattern, "num_ranks": group.mesh, "num_parts": group.of}
            for pattern, group in self.groups.items()
        ]
        return values


def checked_groups(groups: Mapping[str, Any] | None, world_size: int) -> dict[str, ParameterMesh]:
    """Checks ``groups=`` of :func:`zerocore.plan`; returns the groups with their numbers of parts.

    Raises:
        TypeError: ``groups`` is not a dict of :class:`zerocore.ParameterMesh` with numbers.
        ValueError: a number is below 1, or a group's numbers do not multiply to ``world_size``.
    """
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(
            "groups: expected a dict such as {'*.experts.*': zerocore.ParameterMesh(2, of=4)}, got "
            f"{type(groups)}"
        )
    checked = {}
    for pattern, group in (groups or {}).items():
        if not isinstance(group, ParameterMesh) or group.dim != 0:
            raise TypeError(
                f"groups['{pattern}']: expected numbers of ranks, zerocore.ParameterMesh(2, of=4), "
                f"along dimension 0, got {group!r}"
            )
        num_parts = 1 if group.of is None else group.of
        for name, number in (("mesh", group.mesh), ("of", num_parts)):
            check_int(f"groups['{pattern}'] {name}", number, 1)
        if group.mesh * num_parts != world_size:
            raise ValueError(
                f"groups['{pattern}']: {num_parts} parts on {group.mesh} ranks each are not the "
                f"{world_size} ranks of world_size"
            )
        checked[pattern] = ParameterMesh(group.mesh, of=num_parts)
    return checked
