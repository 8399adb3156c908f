"""Control messages on real ranks: connections, and the error of a rank that cannot connect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.model.ranks import Ranks, control_group
from zerocore.model.state import state_of


def num_sockets() -> int:
    """Of this process."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()]
    return sum(link.startswith("socket:") for link in links)


def connect() -> int:
    """Sockets that the control group takes on this rank."""
    before = num_sockets()
    members = tuple(range(dist.get_world_size()))
    assert control_group(Ranks(shard=dist.group.WORLD, members=members)) is not None
    dist.barrier()
    return num_sockets() - before


def test_ranks_connect_with_their_peers_alone() -> None:
    # Of 7 ranks those at distances 1, 2 and 4 on either side are all of them; of 13 they are 8.
    assert max(run_ranks(connect, 13, fresh=True)) < 12


def reach_nobody() -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    with pytest.raises(RuntimeError) as caught:
        zerocore.shard(nn.Linear(4, 4), stage=3)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return str(caught.value)


def test_a_rank_that_cannot_connect_names_interface_and_limit() -> None:
    for text in run_ranks(reach_nobody, 2, fresh=True):
        assert "GLOO_SOCKET_IFNAME=nowhere" in text
        assert "ulimit -n" in text


def learn_and_evaluate() -> list[int]:
    """How many collectives were compared after each of the rounds of training and evaluation."""
    model = zerocore.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage=3)
    compared = []
    for _ in range(8):
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(2, 4))
        compared.append(state_of(model).engine.agreed["num_compared"])
    return compared


def test_evaluations_in_between_are_learned() -> None:
    for compared in run_ranks(learn_and_evaluate, 2):
        assert compared[-1] == compared[-3]
