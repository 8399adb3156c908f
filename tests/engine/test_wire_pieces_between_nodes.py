"""Two ranks on gloo send each other pieces by turns where a network lies between them."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

import zerocore
from tests.distributed.nodes import Nodes, can_make_nodes

MIB = 2**20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # Two shards of 2.5 MiB and a little more: pieces of 1 MiB, and a shorter last one.
    return nn.Sequential(nn.Linear(640, 2048), nn.Tanh(), nn.Linear(2048, 7))


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    inputs = torch.randn(4, 640, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def count_broadcasts(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Those that the profiler has seen: on a busy machine it may miss what other threads do."""
    model(torch.zeros(1, 640)).sum().backward()
    with profile() as profiled:
        optimizer.step()
        model(torch.zeros(1, 640)).sum()
    return [event.name for event in profiled.events() or []].count("gloo:broadcast")


def train(rank: int, stage: int, nodes: Nodes | None, store: Path, found: Any) -> None:
    """The losses, and how many broadcasts bring the weights of a step into the next forward."""
    torch.set_num_threads(1)
    if nodes is not None:
        nodes.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    model = zerocore.shard(make_model(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = losses_of(model, optimizer)
    found.put((losses, max(count_broadcasts(model, optimizer) for _ in range(3))))
    dist.destroy_process_group()


def on_two_ranks(stage: int, nodes: Nodes | None, store: Path) -> list[tuple[list[float], int]]:
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    ranks = [fork.Process(target=train, args=(r, stage, nodes, store, found)) for r in range(2)]
    for rank in ranks:
        rank.start()
    results = [found.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    return results


@pytest.mark.parametrize("stage", [2, 3])
def test_pieces_are_sent_over_a_network_and_not_over_loopback(stage: int, tmp_path: Path) -> None:
    if not can_make_nodes():
        pytest.skip("network namespaces need root")
    with Nodes(2) as nodes:
        between_nodes = on_two_ranks(stage, nodes, tmp_path / "network")
    on_one_machine = on_two_ranks(stage, None, tmp_path / "loopback")
    plain = make_model()
    expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for losses, _ in (*between_nodes, *on_one_machine):
        assert losses == pytest.approx(expected, rel=1e-5)
    num_pieces = -(-(640 * 2048 * 4 // 2) // MIB)
    assert {more for _, more in between_nodes} == {
        whole + 2 * (num_pieces - 1) for _, whole in on_one_machine
    }
