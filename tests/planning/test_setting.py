"""Options of a plan: its dataclasses, and those that shard takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.planning.test_plan import fake_group
from zerocore import Communication, Machine, Workload
from zerocore.model.state import state_of

WORLD_SIZE = 8
COMMUNICATION = Communication(prefetch=2, accumulate="full", regather=2)
NUMBERS: dict[str, Any] = {
    "micro_batches": 2,
    "micro_batch": 3,
    "seq_len": 16,
    "checkpointing": True,
    "zero_bubble": False,
    "compiled": False,
    "optimizer": "adamw",
    "rank": 1,
}
MACHINE = Machine(
    "8xA100-ib200",
    memory="80GB",
    links=["nvlink4", "eth100"],
    replica_link="ib400",
    near_link="1TB/s,1us",
    flops="1PFLOP/s",
    host_memory="512GiB",
    host_bandwidth="100GB/s",
)


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def make_plan(machine: Machine, **options: Any) -> zerocore.planning.Plan:
    workload = Workload(inputs=torch.ones(8, 64), **NUMBERS)
    return zerocore.plan(
        make(),
        WORLD_SIZE,
        num_replicas=2,
        workload=workload,
        machine=machine,
        units=[nn.Linear],
        **options,
    )


def test_workloads_with_tensors_are_compared() -> None:
    first, second = (Workload(inputs=torch.ones(2)) for _ in range(2))
    assert first == first and first != second


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (Communication, {"prefetch": -1}, ValueError),
        (Communication, {"accumulate": "half"}, ValueError),
        (Communication, {"gradient_divide_factor": 0.0}, ValueError),
        (Workload, {"micro_batches": 0}, ValueError),
        (Workload, {"seq_len": 1.5}, TypeError),
        (Machine, {"memory": "much"}, ValueError),
        (Machine, {"replica_link": "token ring"}, ValueError),
        (Machine, {"host_bandwidth": 0}, ValueError),
    ],
)
def test_mistakes_are_errors_when_they_are_made(
    kind: Callable[..., Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        kind(**options)


def test_json_has_the_figures_of_the_setting() -> None:
    """And neither the inputs nor the loss, which are no figures."""
    plan = make_plan(MACHINE, communication=COMMUNICATION)
    found = json.loads(json.dumps(plan.to_dict()))["setting"]
    assert found["communication"]["regather"] == 2
    assert found["workload"] == NUMBERS
    machine = found["machine"]
    assert machine["memory_nbytes"] == 80 * 10**9
    assert [link["name"] for link in machine["links"]] == ["nvlink4", "eth100"]
    assert machine["near_link"]["bandwidth_bytes_per_s"] == 10**12


def test_a_machine_is_named() -> None:
    """GPUs and links of a node; what is said beside it goes before."""
    named = make_plan(Machine("8xa100-ib200"))
    assert make_plan(Machine("A100")).to_dict() == named.to_dict()
    setting = named.setting
    assert setting.memory_nbytes == 80 * 10**9
    assert [link.name for link in setting.links] == ["nvlink3"]
    timing = named.stages[3].timings[0]
    assert named.activations is not None and setting.gpu is not None
    seconds = sum(map(setting.gpu.seconds, named.activations.work))
    assert timing.compute_s == pytest.approx(seconds)
    share = named.mfu(timing)
    assert share == named.activations.model_flops / timing.step_s / 312e12
    assert f"{share:.1%}" in str(named)
    other = make_plan(Machine("8xA100-ib200", memory="1GB", flops="1TFLOP/s", links="eth100"))
    assert other.setting.memory_nbytes == 10**9
    assert other.activations is not None
    seconds = other.activations.total_flops / 1e12
    assert other.stages[3].timings[0].compute_s == pytest.approx(seconds)
    assert other.stages[3].timings[0].link == "eth100"
    assert other.mfu(timing) is None


def test_a_plan_takes_what_shard_takes() -> None:
    """The same object, with a mesh of near ranks; the plan predicts the bytes of the run."""
    with fake_group(WORLD_SIZE, 0):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("far", "near"))
        communication = Communication(prefetch=2, accumulate="full", regather=mesh["near"])
        model = zerocore.shard(make(), units=[nn.Linear], communication=communication)
        plan = zerocore.plan(
            make(),
            WORLD_SIZE,
            units=[nn.Linear],
            communication=communication,
            workload=zerocore.Workload(micro_batches=2),
        )
        known = state_of(model).config.communication
        assert known == plan.setting.communication == replace(communication, regather=2)
        found, stage = zerocore.planning.predict_memory(model, micro_batches=2), plan.stages[3]
        held = ("parameters", "gradients", "optimizer", "pool")
        assert [getattr(stage, name) for name in held] == [getattr(found, name) for name in held]
