"""The ranks that a model is sharded over, and those that hold the same shards."""

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

    shard: dist.ProcessGroup | None = None  # share the state between them; None for one
    replicas: dist.ProcessGroup | None = None  # hold the same shards; None for one
    members: tuple[int, ...] = ()  # numbers of all of them in the default group
    # Another communicator of ``shard``, for its reductions; None where these go by ``shard``.
    reductions: dist.ProcessGroup | None = None
    # Those of ``shard`` that gather again from each other; None for none, and before `make_near`.
    near: dist.ProcessGroup | None = None
    num_near: int = 1  # how many these are to be
    # Where ``shard`` has replicas that share the optimizer's states, the ranks of one replica and
    # those with the same part of each.
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of more than one rank; one after the other they reach all ranks."""
        return tuple(group for group in (self.shard, self.replicas) if group is not None)

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.size()

    @property
    def shape(self) -> tuple[int, int]:
        """Replicas, also such as share the optimizer's states, by ranks of one."""
        if self.levels is None:
            return self.num_replicas, self.num_shards
        return self.levels[1].size(), self.levels[0].size()

    @property
    def shard_rank(self) -> int:
        """Which shard this rank has."""
        return 0 if self.shard is None else self.shard.rank()

    @property
    def world_size(self) -> int:
        return self.num_shards * self.num_replicas

    @property
    def text(self) -> str:
        """How many, and of several replicas the mesh."""
        return " x ".join(map(str, self.shape)) if min(self.shape) > 1 else f"{self.world_size}"

    @property
    def backend(self) -> str:
        """Name of the backend whose collectives share the state; empty for one rank."""
        return str(dist.get_backend(self.groups[0])) if self.groups else ""

    @property
    def rank(self) -> int:
        replica = 0 if self.replicas is None else self.replicas.rank()
        return replica * self.num_shards + self.shard_rank


def find_ranks(group: Any, model: nn.Module, device: torch.device | None = None) -> Ranks:
    """The ranks of a process group, of a 1-D DeviceMesh, or of a 2-D one of replicas by shards.

    None is the default group, which is made under torchrun if there is none, with a backend for the
    device where parameters go; without torch.distributed it is one rank. Errors are as of
    `ranks_of`.
    """
    group = _default_group(model, device) if group is None else group
    return Ranks() if group is None else ranks_of(group, "group")


_SEQUENCE = {"cp", "sp", "context", "sequence"}
_MODEL = {"tp", "pp", "ep", "tensor", "pipeline", "expert"}


def note_names(group: Any, divides: bool) -> None:
    """Logs on the first rank where a mesh's names say that it is not what it is taken for;
    ``divides``: gradients are divided by a number that was given."""
    names: tuple[str, ...] = getattr(group, "mesh_dim_names", None) or ()
    words = {name: set(name.lower().split("_")) for name in names}
    if not names or group.get_rank() != int(group.mesh.flatten()[0]):
        return
    for name in names:
        if words[name] & _MODEL:
            _log.warning(
                "group: dimension '%s' looks like ranks that hold other parts of the model; pass "
                "the dimensions of data parallelism",
                name,
            )
    of_sequence = [name for name in names if words[name] & _SEQUENCE]
    if of_sequence and len(names) == 2:
        _log.warning(
            "group: the 2-D mesh %s is taken as %d replicas of %d shards (hybrid sharding). To "
            "divide the state over all ranks, pass mesh[%s]._flatten('%s')",
            names,
            *group.mesh.shape,
            ", ".join(f"'{name}'" for name in names),
            "_".join(names),
        )
    elif of_sequence and not divides:
        _log.warning(
            "group: gradients are averaged over '%s'. Where a rank's loss is a share of that of "
            "all tokens, pass communication=zerocore.Communication(gradient_divide_factor=1), "
            "which sums them",
            of_sequence[0],
        )


def ranks_of(group: Any, what: str) -> Ranks:
    """The ranks of a process group or DeviceMesh; ``what`` names the argument in errors: a
    TypeError if it is neither, a ValueError for a mesh of more than two dimensions."""
    if hasattr(group, "get_group") and group.ndim == 2:
        members = tuple(group.mesh.flatten().tolist())
        return Ranks(_unless_one(group.get_group(1)), _unless_one(group.get_group(0)), members)
    group = group_of(group, what, ", or a 2-D one of replicas by shards")
    return Ranks(_unless_one(group), None, tuple(dist.get_process_group_ranks(group)))


def group_of(group: Any, what: str, others: str = "") -> dist.ProcessGroup:
    """The process group of a 1-D DeviceMesh, or the one that was given; raises TypeError if it is
    neither, ValueError for a mesh of several dimensions; ``others`` are taken, too."""
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            expected = f"a 1-D DeviceMesh{others}"
            raise ValueError(f"{what}: expected {expected}, got {group.ndim} dimensions")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{what}: expected a ProcessGroup or DeviceMesh, got {type(group)}")
    return group


def with_near(ranks: Ranks, regather: Any) -> Ranks:
    """The ranks with those of them that gather again from each other; communicates nothing.

    ``regather`` is a process group or 1-D DeviceMesh of some of the ranks that share the state, a
    number of them that follow each other, or None. Raises TypeError for anything else, ValueError
    for other ranks, or a number that does not divide theirs.
    """
    if regather is None:
        return ranks
    is_number = isinstance(regather, int) and not isinstance(regather, bool)
    group = None if is_number else group_of(regather, "regather")
    num = regather if group is None else group.size()
    if num < 1 or ranks.num_shards % num != 0:
        raise ValueError(
            f"regather: {num} ranks do not divide the {ranks.num_shards} that share the state"
        )
    if num in (1, ranks.num_shards):
        return ranks  # all ranks are alike
    strangers = set() if group is None else members_of(group) - members_of(ranks.shard)
    if strangers:
        raise ValueError(
            f"regather: ranks {sorted(strangers)} of its group do not share the state with this "
            "one; pass a part of group="
        )
    return replace(ranks, near=group, num_near=num)


def members_of(group: dist.ProcessGroup | None) -> set[int]:
    """Numbers of its ranks in the default group."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def make_near(ranks: Ranks, device: torch.device) -> Ranks:
    """The ranks with the group of those near this one, if they are to have one; collective. Models
    of the same ranks share it. Raises ValueError if these ranks alone cannot make it."""
    shard = ranks.shard
    if ranks.num_near == 1 or ranks.near is not None or shard is None:
        return ranks
    first = ranks.shard_rank // ranks.num_near * ranks.num_near
    members = tuple(dist.get_process_group_ranks(shard)[first : first + ranks.num_near])
    if _needs_all(len(ranks.members)):
        raise ValueError(
            f"regather={ranks.num_near}: the default group is bound to a device, so that all "
            "ranks make a group together; pass a dimension of a DeviceMesh"
        )
    return replace(ranks, near=sibling_of(shard, device, members, "zerocore_near"))


def check_levels(ranks: Ranks, stage: int) -> None:
    """Raises ValueError unless replicas of these ranks can share the optimizer's states."""
    if ranks.shard is None or ranks.replicas is None or stage == 0:
        raise ValueError(
            f"replicas_share='optimizer': at stage {stage} on {ranks.text} ranks there are no "
            "replicas whose ranks share states; pass group= a 2-D DeviceMesh of replicas by shards "
            "and stage= 1 to 3, or leave replicas_share out"
        )
    if list(ranks.members) != sorted(ranks.members):
        raise ValueError(
            f"replicas_share='optimizer': the mesh has ranks {list(ranks.members)}; pass one in "
            "ascending order"
        )


def make_levels(ranks: Ranks, device: torch.device) -> Ranks:
    """The ranks of all replicas as those that share the state; collective.

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
    """Another group, of some of its ranks, on the same backend; collective of these."""
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
    """Options of another communicator: NCCL's thread blocks, network and traffic class, too."""
    if backend.name() == "emulated":
        return backend  # it shares the link
    if backend.name() != "nccl":
        return None
    given = backend.options  # the group's own, with its name and what it was split from
    options = type(given)(is_high_priority_stream=given.is_high_priority_stream)
    options.config = given.config  # by value
    options._timeout = given._timeout
    return options


def control_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """The group over which all ranks of a model exchange small messages, on the CPU; collective.

    A group of gloo, which models of the same ranks share; None for one rank and where the others
    are simulated. A rank is connected with the 2 log2 N others that it sends messages to or hears,
    not with all N. Raises RuntimeError, with advice, if this rank cannot connect.
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
    """Groups of gloo that are made in it connect two ranks when one sends the other something."""
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
    """The ranks with a communicator of its own for reductions, where that helps; collective.

    Collectives of one communicator go one after the other in the order of the host (NCCL), so a
    reduction would wait for the gather before it although it has a stream of its own. Models that
    share a group share the second one.
    """
    shard = ranks.shard
    if shard is None or ranks.levels is not None or not _takes_turns(shard, device):
        return ranks
    members = dist.get_process_group_ranks(shard)
    return replace(ranks, reductions=sibling_of(shard, device, members, "zerocore_reductions"))


def _takes_turns(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of one communicator do, and another one can be made by its ranks alone.
    A new group has its ranks in ascending order."""
    if device.type in ("cpu", "meta") or group._get_backend(device).name() in ("gloo", "fake"):
        return False
    members = dist.get_process_group_ranks(group)
    return members == sorted(members) and not _needs_all(len(members))


def _needs_all(num_members: int) -> bool:
    """Whether these ranks alone cannot make a group: where the default group is bound to a device,
    NCCL splits its communicator for each other group, which all ranks would have to join."""
    world = dist.group.WORLD
    is_bound = world is not None and world.bound_device_id is not None
    return is_bound and num_members != dist.get_world_size()


def _unless_one(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def local_gpu() -> torch.device:
    """The GPU of this rank. Sets LOCAL_RANK's GPU unless the program has set one."""
    given = os.environ.get("LOCAL_RANK") or "0"
    if not given.strip().lstrip("-").isdecimal():
        raise ValueError(f"LOCAL_RANK: expected a rank's number on its node, got '{given}'")
    local = int(given)
    if torch.cuda.current_device() == 0 and 0 < local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


def goes_to_gpu(model: nn.Module, device: torch.device | None) -> bool:
    """Whether parameters will be on a GPU: by ``device``, else by theirs; meta ones will be."""
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
            local_gpu()  # NCCL takes the current device
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
