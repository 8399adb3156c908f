"""Reductions have their own communicator: they do not wait for gathers issued before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocore
import zerocore.fsdp
from tests.async_device.device import DEVICE
from tests.async_device.test_joint_launches import Mesh
from tests.async_device.training import Block, make_model, start, train
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

Launches = list[tuple[int, str]]  # the communicator's number, and the collective's name
GATHER, SCATTER = "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"


class Gate:
    """Holds the stream of gathers in a backward, from block 1's gather on."""

    def __init__(self, extension: Any, model: nn.Sequential, waits: bool) -> None:
        self.extension, self.waits = extension, waits
        handle = state_of(model).engine.stream_handle
        self.gathers, self.reductions = (
            extension.id_of_handle(handle(role)) for role in ("all_gather", "reduce_scatter")
        )
        self.hooks = [
            model[3].up.register_full_backward_hook(lambda *_: self.close()),
            model[1].down.register_full_backward_hook(lambda *_: self.open()),
        ]
        self.gate: Any = None
        self.issued: Launches = []
        self.finished: Launches = []

    def close(self) -> None:
        self.gate = self.extension.hold(self.gathers)

    def open(self) -> None:
        """Notes the launches, while blocks 3 and 2 are being reduced, and frees the gathers."""
        if self.waits:
            self.issued = self.extension.issued_launches()
            self.extension.wait_for_stream(self.reductions)
            self.finished = self.extension.finished_launches()
        self.gate.open()


@dataclass(frozen=True)
class Step:
    """A step's launches, issued and finished: at the end, and `before`, with gathers held."""

    issued: Launches
    finished: Launches
    issued_before: Launches
    finished_before: Launches
    losses: list[float]


def launches_of_a_step(overlap: bool) -> Step:
    """Trains with gathers held in the last step, and returns that step's launches."""
    device, extension = start(on_device=True)
    model = make_model(device)
    zerocore.shard(
        model,
        stage=3,
        units=[Block],
        communication=zerocore.Communication(overlap_reductions=overlap),
    )
    losses = train(model, device, steps=2)
    gate = Gate(extension, model, waits=overlap)
    extension.synchronize()
    extension.begin_launches()
    losses += train(model, device, steps=1)
    extension.synchronize()
    return Step(
        extension.issued_launches(),
        extension.finished_launches(),
        gate.issued,
        gate.finished,
        torch.stack(losses).tolist(),
    )


def test_a_reduction_waits_for_no_gather() -> None:
    """On one communicator it does: launches end in the order of issue."""
    shared, separate = (
        run_ranks(launches_of_a_step, 2, overlap, launch="torchrun", timeout=100)
        for overlap in (False, True)
    )
    for one, two in zip(shared, separate, strict=True):
        assert {number for number, _ in one.issued} == {0} and one.finished == one.issued
        assert [what for _, what in two.issued] == [what for _, what in one.issued]
        assert set(two.issued) == {(0, GATHER), (1, SCATTER)}
        # All reductions are over, although a gather that was issued before has not begun.
        reductions = [launch for launch in two.issued_before if launch == (1, SCATTER)]
        assert two.finished_before.count((1, SCATTER)) == len(reductions) > 0
        last = len(two.issued_before) - two.issued_before[::-1].index((1, SCATTER))
        before = two.issued_before[:last]
        assert two.finished_before.count((0, GATHER)) < before.count((0, GATHER))
        assert two.losses == one.losses


def hold_replicas() -> list[str]:
    """Returns the launches that ended while the stream of sums over replicas was held."""
    device, extension = start(on_device=True)
    model = make_model(device)
    communication = zerocore.Communication(reductions_in_flight=4)
    mesh = Mesh(f"cpu:gloo,{DEVICE}:{DEVICE}")
    zerocore.shard(model, units=[Block], group=mesh, communication=communication)
    train(model, device, steps=2)
    handle = state_of(model).engine.stream_handle
    roles = {role: extension.id_of_handle(handle(role)) for role in ("replicas", "reduce_scatter")}
    extension.synchronize()
    extension.begin_launches()
    gate = extension.hold(roles["replicas"])
    finished: Launches = []

    def look(*_: Any) -> None:
        """Notes finished launches, while blocks 3, 2 and 1 are being reduced."""
        extension.wait_for_stream(roles["reduce_scatter"])
        finished.extend(extension.finished_launches())
        gate.open()

    model[0].up.register_full_backward_hook(look)
    train(model, device, steps=1)
    extension.synchronize()
    return [what for _, what in finished]


def test_a_reduction_waits_for_no_sum_over_replicas() -> None:
    """The shards of three blocks are reduced before the first sum over the replicas begins."""
    for ended in run_ranks(hold_replicas, 4, launch="torchrun", timeout=150):
        assert ended.count(SCATTER) >= 2 and "ALLREDUCE" not in ended, ended


def share_communicators() -> list[int]:
    """Returns the communicators that reduce: of stages 3, 3 and 2, and of rows twice."""
    device, extension = start(on_device=True)
    models = [
        zerocore.shard(make_model(device, 2), stage=stage, units=[Block]) for stage in (3, 3, 2)
    ]
    rows = make_model(device, 2)
    mesh = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, DEVICE)
    for block in rows:
        zerocore.fsdp.fully_shard(block, mesh=mesh)
    zerocore.fsdp.fully_shard(rows, mesh=mesh)
    numbers = []
    for model in (*models, rows):
        extension.begin_launches()
        train(model, device, steps=1)
        extension.synchronize()
        numbers.append({number for number, what in extension.issued_launches() if SCATTER in what})
    rows.set_separate_reduce_scatter_group(False)
    extension.begin_launches()
    train(rows, device, steps=1)
    extension.synchronize()
    numbers.append({number for number, what in extension.issued_launches() if SCATTER in what})
    return [number for found in numbers for number in found]


def test_models_of_the_same_ranks_share_it() -> None:
    assert run_ranks(share_communicators, 2, launch="torchrun") == [[1, 1, 0, 1, 0]] * 2
