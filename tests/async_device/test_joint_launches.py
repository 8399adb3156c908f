"""One launch gathers the regions of a unit, and one reduces them."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.async_device.device import DEVICE
from tests.async_device.training import WIDTH, start, train
from tests.distributed.harness import run_ranks

GATHER, SCATTER, SUM = "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLREDUCE"


class Adapted(nn.Module):
    """A unit of three regions: frozen, trained, and trained in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x) + self.adapter(x)
        return x + (hidden * self.scale.float()).tanh()


class Mesh:
    """Stands for a DeviceMesh of two dimensions: two replicas of two shards each."""

    ndim = 2
    mesh = torch.tensor([[0, 1], [2, 3]])

    def __init__(self, backend: str) -> None:
        rank = dist.get_rank()
        pairs = [([0, 2], [1, 3]), ([0, 1], [2, 3])]
        groups = [[dist.new_group(pair, backend=backend) for pair in each] for each in pairs]
        self.groups = (groups[0][rank % 2], groups[1][rank // 2])

    def get_group(self, dimension: int) -> dist.ProcessGroup:
        return self.groups[dimension]


def train_adapted(
    on_device: bool, hybrid: bool, **options: str
) -> list[tuple[list[float], Counter[str], Counter[str]]]:
    """Returns for each stage the losses, launches and counted events of two steps."""
    device, extension = start(on_device)
    mesh = Mesh(f"cpu:gloo,{DEVICE}:{DEVICE}" if on_device else "gloo") if hybrid else None
    found = []
    for stage in (3, 2) if hybrid else (0, 1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(Adapted() for _ in range(3))).to(device)
        zerocore.shard(model, stage=stage, units=[Adapted], group=mesh, **options)
        losses = train(model, device, steps=2)
        if on_device:
            extension.set_delays(stage, 0.3, 300)
            extension.synchronize()
            extension.begin_launches()
        with zerocore.reporting.record_events(model) as events:
            losses += train(model, device, steps=2)
        counted = Counter(event.op for event in events)
        launched: Counter[str] = Counter()
        if on_device:
            extension.synchronize()
            launched.update(what for _, what in extension.issued_launches())
        found.append((torch.stack(losses).tolist(), launched, counted))
    return found


TWO_SUMS, TWO_SCATTERS = f"{SUM} + {SUM}", f"{SCATTER} + {SCATTER}"
THREE_GATHERS, TWO_GATHERS = " + ".join([GATHER] * 3), f"{GATHER} + {GATHER}"


def test_a_unit_is_one_launch() -> None:
    """Three units, two steps; at stage 3 the last unit stays gathered for the backward."""
    on_device = run_ranks(train_adapted, 2, True, False, launch="torchrun", timeout=100)
    on_cpu = run_ranks(train_adapted, 2, False, False, launch="torchrun", timeout=100)
    for found, expected in zip(on_device, on_cpu, strict=True):
        assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
        assert [counted for _, _, counted in found] == [counted for _, _, counted in expected]
        assert [launched for _, launched, _ in found] == [
            {TWO_SUMS: 6},
            {TWO_GATHERS: 6, TWO_SCATTERS: 6},
            {THREE_GATHERS: 10, TWO_SCATTERS: 6},
        ]


def test_a_unit_of_replicas_is_two_launches() -> None:
    """The sums over the replicas follow both reductions, on their own communicator."""
    on_device = run_ranks(train_adapted, 4, True, True, launch="torchrun", timeout=150)
    on_cpu = run_ranks(train_adapted, 4, False, True, launch="torchrun", timeout=150)
    for found, expected in zip(on_device, on_cpu, strict=True):
        assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
        assert [launched for _, launched, _ in found] == [
            {THREE_GATHERS: 10, TWO_SCATTERS: 6, TWO_SUMS: 6},
            {TWO_GATHERS: 6, TWO_SCATTERS: 6, TWO_SUMS: 6},
        ]


def train_shared() -> list[tuple[list[float], Counter[str], Counter[str]]]:
    return train_adapted(
        True, True, communication=zerocore.Communication(replicas_share="optimizer")
    )


def test_replicas_that_share_states_scatter_and_gather_behind_each_other() -> None:
    """Only streams wait; the losses equal hybrid sharding's on the CPU."""
    on_device = run_ranks(train_shared, 4, launch="torchrun", timeout=150)
    on_cpu = run_ranks(train_adapted, 4, False, True, launch="torchrun", timeout=150)
    for found, expected in zip(on_device, on_cpu, strict=True):
        assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
        assert [launched for _, launched, _ in found] == [
            {THREE_GATHERS: 16, TWO_SCATTERS: 12},
            {TWO_GATHERS: 12, TWO_SCATTERS: 12},
        ]
