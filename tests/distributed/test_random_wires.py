"""Random combinations of ``wire_dtype`` with other options keep the promises of its page.

A: gradients that are in the wire's dtype already are summed as in float32; B: else errors have a
bound; C: bits depend on gradients alone. Each collective and its bytes are those of the plan.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.engine.test_wire_dtype import (
    BF16,
    FP16,
    FP32,
    Gradients,
    backward,
    make_net,
    mean_in_order,
    of_all_ranks,
    own_gradients,
)
from tests.fsdp.test_own_collectives import Reduce

UNITS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
CHOICES: dict[str, tuple[Any, ...]] = {
    "face": (0, 1, 2, 3, 3, "fsdp"),
    "wire": (BF16, BF16, FP16, FP32),
    "param": (None, BF16),
    "micro_batches": (1, 1, 2),
    "replicas": (1, 2),
    "near": (1, 2),
    "units": (None, [], ["down", "norm", "up"]),
    "prefetch": (0, 1, 2),
    "overlap_reductions": (True, False),
    "accumulate": ("sharded", "full"),
    "no_sync": (False, True),
    "offload": (None, None, ("states",), ("states", "gradients")),
    "replicas_share": (None, "optimizer"),
    "gather_dtype": (None, None, torch.int8),
    "own_sum": (False, False, True),
    "reductions_in_flight": (1, 2, 3),
    "registered": (False, True),
}  # fmt: skip
Case = dict[str, Any]


def case_of(seed: int, world: int) -> Case:
    """A combination that ``zerocore`` takes."""
    rng = random.Random(f"wires {seed}")
    case = {name: rng.choice(values) for name, values in CHOICES.items()}
    if world < 4:
        case["replicas"] = 1
    least = {"near": 3, "gather_dtype": 3, "replicas_share": 1}
    for name, stage in least.items():
        if case["face"] == "fsdp" or case["face"] < stage:
            case[name] = CHOICES[name][0]
    if case["replicas"] == 1:
        case["replicas_share"] = None
    if case["near"] > world // case["replicas"] or world // case["replicas"] % case["near"]:
        case["near"] = 1
    if case["replicas_share"] is not None:
        case |= {"near": 1, "offload": None, "gather_dtype": None}
    if case["face"] in (0, 1) and case["offload"] is not None:
        case["offload"] = ("states",) if case["face"] == 1 else None
    if case["face"] == "fsdp":
        case |= {"offload": None, "no_sync": False}
    else:
        case["own_sum"] = False
    return case


def sharded(case: Case) -> Any:
    world = dist.get_world_size()
    shape = (world,) if case["replicas"] == 1 else (case["replicas"], world // case["replicas"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if case["face"] == "fsdp":
        policy = zerocore.fsdp.MixedPrecisionPolicy(
            param_dtype=case["param"], wire_dtype=case["wire"]
        )
        model: Any = make_net()
        for module in (model.up, model):
            zerocore.fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
            if case["own_sum"]:
                module.set_custom_reduce_scatter(Reduce())
        return model
    offload = case["offload"]
    names = ("prefetch", "overlap_reductions", "accumulate", "replicas_share")
    options = {name: case[name] for name in (*names, "reductions_in_flight", "registered")}
    return zerocore.shard(
        make_net(),
        stage=case["face"],
        group=mesh,
        mixed_precision=zerocore.MixedPrecision(
            param_dtype=case["param"],
            wire_dtype=case["wire"],
            gather_dtype=case["gather_dtype"],
            gather_exact=("*",) if case["gather_dtype"] else None,  # layers compute the same
        ),
        offload=None if offload is None else zerocore.Offload(**dict.fromkeys(offload, "cpu")),
        communication=zerocore.Communication(
            regather=case["near"] if case["near"] > 1 else None, **options
        ),
        units=case["units"],
    )


def held(model: Any, case: Case, last: bool) -> AbstractContextManager[None]:
    return nullcontext() if last or not case["no_sync"] else zerocore.no_sync(model)


def gradients(model: Any, case: Case) -> Gradients:
    for micro in range(case["micro_batches"]):
        with held(model, case, micro == case["micro_batches"] - 1):
            backward(model, micro, FP32)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def expected_bits(case: Case, all_ranks: list[Gradients]) -> Gradients:
    return mean_in_order(all_ranks, len(all_ranks) // case["replicas"], case["wire"])


def bounds(case: Case, all_ranks: list[list[Gradients]], name: str) -> tuple[Tensor, Tensor]:
    """The exact mean, and how far from it a gradient may be."""
    world = dist.get_world_size()
    parts = torch.stack([g[name].double() for micro in all_ranks for g in micro])
    # Once on the wire, once in each sum, where the program's own sum is in the wire's dtype.
    own = (world - 1) * UNITS[case["wire"]] if case["own_sum"] else 0.0
    unit = UNITS[case["wire"]] + (2 * world + 2) * UNITS[FP32] + own
    smallest = 2.0**-24 if case["wire"] == FP16 else 2.0**-40  # of float16 in subnormal numbers
    return parts.sum(0) / world, unit * parts.abs().sum(0) / world + smallest


def check(seed: int) -> None:
    case = case_of(seed, dist.get_world_size())
    print(f"wires {seed}: {case}", flush=True)
    model = sharded(case)
    found = gradients(model, case)
    own = case["param"] or FP32
    all_ranks = [of_all_ranks(own_gradients(m, own)) for m in range(case["micro_batches"])]
    for name, gradient in found.items():
        exact, bound = bounds(case, all_ranks, name)
        assert bool(((gradient.double() - exact).abs() <= bound).all()), ("B", name)
    if case["micro_batches"] == 1 and case["wire"] != FP16 and not case["own_sum"]:
        for name, gradient in expected_bits(case, all_ranks[0]).items():
            assert torch.equal(found[name], gradient), ("A and C", name)
    follow_plan(model, case)


def follow_plan(model: Any, case: Case) -> None:
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        with zerocore.reporting.record_events(model) as events:
            for micro in range(case["micro_batches"]):
                with held(model, case, micro == case["micro_batches"] - 1):
                    backward(model, micro, FP32)
            if not case["offload"]:
                optimizer.step()  # and the gathers behind it
        if case["offload"]:
            optimizer.step()
        optimizer.zero_grad()
    moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    if case["micro_batches"] == 1 or case["no_sync"]:
        assert moved == zerocore.planning.predict_events(model, case["micro_batches"])


def run_cases(first: int, count: int) -> None:
    for seed in range(first, first + count):
        check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "first", "count"), [(2, 0, 68), (3, 300, 60), (4, 400, 108)])
def test_promises_hold_in_all_combinations(world: int, first: int, count: int) -> None:
    run_ranks(run_cases, world, first, count, timeout=60 + 6 * count)
