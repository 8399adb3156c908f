"""A rank of a replica group of torchft: ``python -m tests.integrations.replica_groups``.

Arguments: the lighthouse's address, the number of the group and of the rank in it, the port of the
group's store, and the step in which the rank ends its life (0: in none).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import OrderedDict
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn

import zerocore
import zerocore.fsdp

NUM_STEPS, RANKS_OF_A_GROUP = 10, 2  # and more, until there are two groups
_SHORT = timedelta(seconds=10)


def make_model() -> nn.Module:
    layers = [("first", nn.Linear(6, 9)), ("drop", nn.Dropout(0.2)), ("last", nn.Linear(9, 1))]
    model = nn.Sequential(OrderedDict(layers))
    for module in (*layers[::2], ("", model)):
        zerocore.fsdp.fully_shard(module[1])
    return model


def join_groups(model: nn.Module, manager: torchft.Manager) -> None:
    """Gradients, which the group has averaged, become means over all groups."""

    def hook(gradients: Tensor) -> None:
        manager.allreduce(gradients).wait()

    for module in (model.first, model.last, model):
        module.set_all_reduce_hook(hook)  # type: ignore[operator]


def batch(step: int, group: int, rank: int) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + 10 * group + rank)
    return torch.randn(4, 6, generator=data)


def train(lighthouse: str, group: int, rank: int, port: int, last: int) -> None:
    store = dist.TCPStore("localhost", port, RANKS_OF_A_GROUP, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS_OF_A_GROUP, timeout=_SHORT
    )
    torch.manual_seed(group)  # init_sync sends the first group's weights to the others
    model = make_model()
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    snapshot = zerocore.snapshot(model, optimizer, schedule=schedule)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_SHORT), min_replica_size=1, timeout=_SHORT,
        state_dict=snapshot.state_dict, load_state_dict=snapshot.load_state_dict,
        lighthouse_addr=lighthouse, replica_id=f"group{group}", hostname="localhost",
        rank=rank, world_size=RANKS_OF_A_GROUP, store_addr="localhost", store_port=port,
    )  # fmt: skip
    join_groups(model, manager)
    began = None
    while (step := manager.current_step()) < NUM_STEPS or manager.num_participants() < 2:
        manager.start_quorum()
        model(batch(step, group, rank)).square().mean().backward()
        if last and step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        if manager.should_commit():
            began = manager.current_step() if began is None else began
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
        time.sleep(0.1)
    tail = snapshot.state_dict()
    values = [value.double().sum().item() for value in tail["weights"].values()]
    moments = [v["exp_avg_sq"].double().sum().item() for v in tail["states"][0].values()]
    print("began", began, "of", manager.num_participants(), "groups, ended at", *values, *moments)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
