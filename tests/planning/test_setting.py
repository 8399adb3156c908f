"""Options of a plan: the dataclasses that stand for its keywords, and those that shard takes."""

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
KEYWORDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "communication": (
        Communication,
        {"prefetch": 2, "accumulate": "full", "regather": 2},
    ),
    "workload": (
        Workload,
        {
            "micro_batches": 2,
            "micro_batch": 3,
            "seq_len": 16,
            "checkpointing": True,
            "zero_bubble": False,
            "compiled": False,
        },
    ),
    "machine": (
        Machine,
        {
            "memory": "80GB",
            "links": ["nvlink4", "eth100"],
            "replica_link": "ib400",
            "near_link": "1TB/s,1us",
            "flops": "1PFLOP/s",
            "host_memory": "512GiB",
            "host_bandwidth": "100GB/s",
            "node": "8xA100-ib200",
        },
    ),
}


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def make_plan(**options: Any) -> zerocore.Plan:
    return zerocore.plan(
        make(), WORLD_SIZE, num_replicas=2, inputs=torch.ones(8, 64), units=[nn.Linear], **options
    )


def figures(**options: Any) -> dict[str, Any]:
    """All that a plan says, with its setting."""
    return make_plan(**options).to_dict()


def test_both_spellings_are_the_same_plan() -> None:
    keywords = {name: value for _, each in KEYWORDS.values() for name, value in each.items()}
    grouped = {name: make(**options) for name, (make, options) in KEYWORDS.items()}
    found = figures(**keywords)
    assert found == figures(**grouped)
    for name in KEYWORDS:  # one as a dataclass, the others by keyword
        rest = {key: value for key, value in keywords.items() if key not in KEYWORDS[name][1]}
        assert found == figures(**rest, **{name: grouped[name]})


@pytest.mark.parametrize(
    ("group", "option"), [(group, name) for group in KEYWORDS for name in KEYWORDS[group][1]]
)
def test_an_option_is_given_once(group: str, option: str) -> None:
    kind, options = KEYWORDS[group]
    with pytest.raises(ValueError, match=f"{option}= is given twice: {group}= holds it, too"):
        make_plan(**{option: options[option], group: kind()})


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
    options = {name: make(**options) for name, (make, options) in KEYWORDS.items()}
    found = json.loads(json.dumps(make_plan(**options).to_dict()))["setting"]
    assert found["communication"]["regather"] == 2
    assert found["workload"] == KEYWORDS["workload"][1]
    machine = found["machine"]
    assert machine["memory_nbytes"] == 80 * 10**9
    assert [link["name"] for link in machine["links"]] == ["nvlink4", "eth100"]
    assert machine["near_link"]["bandwidth_bytes_per_s"] == 10**12


def test_a_machine_is_named() -> None:
    """GPUs and links of a node; what is said beside it goes before."""
    named = make_plan(machine="8xa100-ib200")
    assert figures(machine=Machine(node="A100")) == figures(node="8xA100-ib200") == named.to_dict()
    machine = named.setting.machine
    assert machine.memory_nbytes == 80 * 10**9
    assert [link.name for link in machine.links] == ["nvlink3"]
    timing = named.stages[3].timings[0]
    assert named.activations is not None and machine.gpu is not None
    seconds = sum(map(machine.gpu.seconds, named.activations.work))
    assert timing.compute_s == pytest.approx(seconds)
    share = named.mfu(timing)
    assert share == named.activations.model_flops / timing.step_s / 312e12
    assert f"{share:.1%}" in str(named)
    other = make_plan(machine="8xA100-ib200", memory="1GB", flops="1TFLOP/s", links="eth100")
    assert other.setting.machine.memory_nbytes == 10**9
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
            make(), WORLD_SIZE, units=[nn.Linear], communication=communication, micro_batches=2
        )
        known = state_of(model).config.communication
        assert known == plan.setting.communication == replace(communication, regather=2)
        by_keyword = zerocore.shard(
            make(), units=[nn.Linear], prefetch=2, accumulate="full", regather=mesh["near"]
        )
        assert state_of(by_keyword).config == state_of(model).config
        found, stage = zerocore.predict_memory(model, micro_batches=2), plan.stages[3]
        held = ("parameters", "gradients", "optimizer", "pool")
        assert [getattr(stage, name) for name in held] == [getattr(found, name) for name in held]
