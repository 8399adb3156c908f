"""The ranks that a model is sharded over, its replicas, and the process groups between them."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerocore._C import connect_control
from zerocore.common.agreement import is_simulated
from zerocore.common.groups import shared_group, timeout_of

_log = logging.getLogger("zerocore")
_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a sharded model, numbered replica by replica."""

    shard: dist.ProcessGroup | None = None  # share the state between them; None for one rank
    replicas: dist.ProcessGroup | None = None  # hold the same shards; None for one replica
    members: tuple[int, ...] = ()  # all ranks, by their numbers in the default group
    # A second communicator of ``shard``, for reductions; None if reductions use ``shard``.
    reductions: dist.ProcessGroup | None = None
    # Ranks of ``shard`` from which later gathers come; None without, and before `make_near`.
    near: dist.ProcessGroup | None = None
    num_near: int = 1  # the size of ``near``
    # If replicas share the optimizer's states, ``shard`` has the ranks of all replicas. These are
    # the ranks of this replica, and the ranks with the same part of each replica.
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of more than one rank; a collective on each in turn reaches all ranks."""
        return tuple(group for group in (self.shard, self.replicas) if group is not None)

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.size()

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of replicas and of ranks in one; replicas may share the optimizer's states."""
        if self.levels is None:
            return self.num_replicas, self.num_shards
        return self.levels[1].size(), self.levels[0].size()

    @property
    def shard_rank(self) -> int:
        """The index of this rank's shard."""
        return 0 if self.shard is None else self.shard.rank()

    @property
    def world_size(self) -> int:
        return self.num_shards * self.num_replicas

    @property
    def text(self) -> str:
        """The number of ranks; with several replicas, of replicas x shards."""
        return " x ".join(map(str, self.shape)) if min(self.shape) > 1 else f"{self.world_size}"

    @property
    def backend(self) -> str:
        """Name of the backend that the state's collectives use; empty for one rank."""
        return str(dist.get_backend(self.groups[0])) if self.groups else ""

    @property
    def rank(self) -> int:
        replica = 0 if self.replicas is None else self.replicas.rank()
        return replica * self.num_shards + self.shard_rank


def find_ranks(group: Any, model: nn.Module, device: torch.device | None = None) -> Ranks:
    """Returns the ranks of a process group, a 1-D DeviceMesh, or a 2-D mesh of replicas by shards.

    None means the default group. Under torchrun it is initialised if need be, with a backend for
    the device of the parameters; without torch.distributed it is one rank. Raises as `ranks_of`.
    """
    group = _default_group(model, device) if group is None else group
    return Ranks() if group is None else ranks_of(group, "group")


def ranks_of(group: Any, what: str) -> Ranks:
    """Returns the ranks of a process group or DeviceMesh; ``what`` names the argument in errors.
    Raises TypeError if it is neither, ValueError for a mesh of more than two dimensions."""
    if hasattr(group, "get_group") and group.ndim == 2:
        members = tuple(group.mesh.flatten().tolist())
        return Ranks(_unless_one(group.get_group(1)), _unless_one(group.get_group(0)), members)
    group = group_of(group, what, ", or a 2-D mesh of replicas by shards")
    return Ranks(_unless_one(group), None, tuple(dist.get_process_group_ranks(group)))


def group_of(group: Any, what: str, alternative: str = "") -> dist.ProcessGroup:
    """Returns a process group, or the one of a 1-D DeviceMesh. Raises TypeError if it is neither,
    ValueError for a mesh of several dimensions; this error also names the ``alternative``."""
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            expected = f"a 1-D DeviceMesh{alternative}"
            raise ValueError(f"{what}: expected {expected}, got {group.ndim} dimensions")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{what}: expected a ProcessGroup or DeviceMesh, got {type(group)}")
    return group


def members_of(group: dist.ProcessGroup | None) -> set[int]:
    """Returns the numbers of a group's ranks in the default group."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def make_near(ranks: Ranks, device: torch.device) -> Ranks:
    """Makes the group of this rank's near ranks, if ``num_near`` asks for it; collective. Models of
    the same ranks share the group. Raises ValueError if these ranks alone cannot make it."""
    shard = ranks.shard
    if ranks.num_near == 1 or ranks.near is not None or shard is None:
        return ranks
    first = ranks.shard_rank // ranks.num_near * ranks.num_near
    members = tuple(dist.get_process_group_ranks(shard)[first : first + ranks.num_near])
    if _needs_all(len(ranks.members)):
        raise ValueError(
            f"regather={ranks.num_near}: the default group is bound to a device, so all "
            "ranks must make a new group together; pass a dimension of a DeviceMesh"
        )
    return replace(ranks, near=sibling_of(shard, device, members, "zerocore_near"))


def make_levels(ranks: Ranks, device: torch.device) -> Ranks:
    """Makes the ranks of all replicas share the state; collective.

    Models of the same ranks share the group.
    """
    assert ranks.shard is not None and ranks.replicas is not None
    whole = dist.group.WORLD
    if whole is None or len(ranks.members) < whole.size():
        whole = sibling_of(ranks.shard, device, ranks.members, "zerocore_levels")
    return replace(ranks, shard=whole, replicas=None, levels=(ranks.shard, ranks.replicas))


def sibling_of(
    group: dist.ProcessGroup, device: torch.device, members: Sequence[int], what: str
) -> dist.ProcessGroup:
    """Makes a group of some ranks of ``group`` on the same backend; a collective of ``members``."""
    backend = group._get_backend(device)
    name = backend.name()
    return shared_group(
        (group.group_name, tuple(members)),
        members,
        what,
        backend=name,
        timeout=timeout_of(group),
        pg_options=_options_beside(backend),
    )


def _options_beside(backend: Any) -> Any:
    """Copies a backend's options for a second communicator, such as NCCL's thread blocks."""
    if backend.name() == "emulated":
        return backend  # both share its link
    if backend.name() != "nccl":
        return None
    original = backend.options  # has the group's name and the group that it was split from
    options = type(original)(is_high_priority_stream=original.is_high_priority_stream)
    options.config = original.config  # by value
    options._timeout = original._timeout
    return options


def control_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the gloo group over which a model's ranks exchange small messages; collective.

    Models of the same ranks share it. None for one rank, and if the other ranks are simulated. A
    rank connects to the 2 log2 N ranks that it exchanges messages with, not to all N. Raises
    RuntimeError, with advice, if this rank cannot connect.
    """
    if not ranks.groups or any(is_simulated(group) for group in ranks.groups):
        return None
    try:
        with _lazily_connected():
            group = shared_group(ranks.members, ranks.members, "zerocore_control", backend="gloo")
        connect_control(group.group_name)
    except RuntimeError as error:
        raise RuntimeError(_cannot_connect(error)) from error
    return group


@contextmanager
def _lazily_connected() -> Iterator[None]:
    """Makes new gloo groups connect two ranks only when one sends a message to the other."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def _cannot_connect(error: Exception) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    where = f"GLOO_SOCKET_IFNAME={interface}" if interface else "the interface of the host's name"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"rank {dist.get_rank()} cannot exchange control messages over {where}: "
        f"{str(error).splitlines()[0]}. Set GLOO_SOCKET_IFNAME to an interface that the other "
        f"ranks can reach. The limit of open files is {limit} (`ulimit -n`)."
    )


def with_reductions(ranks: Ranks, device: torch.device) -> Ranks:
    """Adds a second communicator for reductions if that helps; collective.

    NCCL runs the collectives of one communicator in the order of the host's calls. A reduction
    would wait for the gather before it, even on a stream of its own. Models that share a group
    share its second communicator.
    """
    shard = ranks.shard
    if shard is None or ranks.levels is not None or not _takes_turns(shard, device):
        return ranks
    members = dist.get_process_group_ranks(shard)
    return replace(ranks, reductions=sibling_of(shard, device, members, "zerocore_reductions"))


def _takes_turns(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether one communicator's collectives run in order and its ranks alone can make another.
    A new group has its ranks in ascending order."""
    if device.type in ("cpu", "meta") or group._get_backend(device).name() in ("gloo", "fake"):
        return False
    members = dist.get_process_group_ranks(group)
    return members == sorted(members) and not _needs_all(len(members))


def _needs_all(num_members: int) -> bool:
    """Whether some ranks alone cannot make a group. If the default group is bound to a device, NCCL
    splits its communicator for each new group, and all ranks must take part."""
    world = dist.group.WORLD
    is_bound = world is not None and world.bound_device_id is not None
    return is_bound and num_members != dist.get_world_size()


def _unless_one(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def local_gpu() -> torch.device:
    """Returns this rank's GPU; selects LOCAL_RANK's GPU unless the program has selected one."""
    local_rank = os.environ.get("LOCAL_RANK") or "0"
    if not local_rank.strip().lstrip("-").isdecimal():
        raise ValueError(f"LOCAL_RANK: expected a rank's number on its node, got '{local_rank}'")
    local = int(local_rank)
    if torch.cuda.current_device() == 0 and 0 < local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


def goes_to_gpu(model: nn.Module, device: torch.device | None) -> bool:
    """Whether parameters will be on a GPU: by ``device``, else by their own; meta ones will be."""
    if not torch.cuda.is_available():
        return False
    if device is not None:
        return torch.device(device).type == "cuda"
    placed = [param for param in model.parameters() if not param.is_meta]
    return not placed or any(param.is_cuda for param in placed)


def _default_group(model: nn.Module, device: torch.device | None) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        on_gpu = goes_to_gpu(model, device)
        backend = "nccl" if on_gpu else "gloo"
        index = None if device is None else torch.device(device).index
        if on_gpu and index is None:
            local_gpu()  # NCCL uses the current device
        elif on_gpu:
            torch.cuda.set_device(index)
        dist.init_process_group(backend)
        if dist.get_rank() == 0:
            _log.info(
                "no process group: initialised one of %d ranks with %s",
                dist.get_world_size(),
                backend,
            )
    return dist.group.WORLD
