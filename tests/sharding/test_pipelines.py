"""Stages of a pipeline that are sharded train as one process does, under every schedule."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import zerocore
import zerocore.fsdp
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from zerocore.common.events import COLLECTIVES
from zerocore.common.links import traffic_nbytes

FSDP = -1  # zerocore.fsdp in the place of a stage
WIDTH, NUM_LAYERS, NUM_MICRO, NUM_SAMPLES, NUM_STEPS = 8, 8, 4, 8, 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers)


class Affine(nn.Module):
    """Elementwise: its gradients do not depend on how memory lies, as those of matrices do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight[0] + self.weight[1])


def build_elementwise() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Affine() for _ in range(NUM_LAYERS)])


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return tuple(torch.randn(2, NUM_SAMPLES, WIDTH, generator=generator).unbind())  # type: ignore[return-value]


def reference(num_replicas: int) -> dict[str, Tensor]:
    """One process with the whole model and all replicas' batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(NUM_STEPS):
        for replica in range(num_replicas):
            x, target = batch(step, replica)
            (nn.functional.mse_loss(model(x), target) / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def make_stages(
    mesh: Any,
    stage: int,
    num_stages: int,
    is_v: bool,
    fully_shard: Any = zerocore.fsdp.fully_shard,
    make: Any = build,
    **options: Any,
) -> list[Any]:
    """This rank's stages, sharded over the ranks that hold the same ones."""
    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    layers = NUM_LAYERS // num_stages
    data = mesh["replicas", "dp"] if mesh.ndim == 3 else mesh["dp"]
    stages = []
    mine = [rank, num_stages - 1 - rank] if is_v else range(rank, num_stages, size)
    for index in mine:
        part = make()[index * layers : (index + 1) * layers]
        if stage == FSDP:
            for layer in part:
                fully_shard(layer, mesh=data, **options)
            fully_shard(part, mesh=data, **options)
        else:
            zerocore.shard(part, stage=stage, group=data)
        stages.append(
            pipelining.PipelineStage(
                part, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp")
            )
        )
    return stages


def run(mesh: Any, stage: int, kind: str, **options: Any) -> list[dict[str, Tensor]]:
    """Trains with a schedule; the states of this rank's stages, keys as in the whole model."""
    schedule_class: Any = getattr(pipelining, kind)
    multi = any(word in kind for word in ("Interleaved", "ZBV", "Looped", "DualPipeV"))
    num_stages = mesh["pp"].size() * (2 if multi else 1)
    stages = make_stages(mesh, stage, num_stages, "V" in kind, **options)
    loss: Any = nn.functional.mse_loss
    schedule = schedule_class(stages if multi else stages[0], NUM_MICRO, loss_fn=loss)
    optimizers = [torch.optim.SGD(s.submod.parameters(), lr=0.5) for s in stages]
    for step in range(NUM_STEPS):
        x, target = batch(step, dist.get_rank() % (mesh.size() // mesh["pp"].size()))
        first = (x,) if any(s.is_first for s in stages) else ()
        last = {"target": target} if any(s.is_last for s in stages) else {}
        schedule.step(*first, **last)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if stage == FSDP:
        return [{k: v.full_tensor() for k, v in s.submod.state_dict().items()} for s in stages]
    return [zerocore.full_state_dict(s.submod, rank0_only=False) for s in stages]


def train_right(kind: str, shape: tuple[int, ...]) -> None:
    """``shape``: of the ranks that hold one stage, in replicas by shards if there are two."""
    names = ("pp", "replicas", "dp") if len(shape) == 2 else ("pp", "dp")
    mesh = init_device_mesh("cpu", (2, *shape), mesh_dim_names=names)
    expected = reference(math.prod(shape))
    for stage in (0, 1, 2, 3, FSDP):
        for state in run(mesh, stage, kind):
            for key, value in state.items():
                torch.testing.assert_close(value, expected[key], msg=f"stage {stage}: {key}")


# Older pipelines greet neighbours on their own rank by messages, which gloo does not carry.
greets_itself = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="pipelines of this torch send to their own rank"
)
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
KINDS = (
    *(pytest.param(kind, marks=greets_itself) for kind in V_SHAPED),
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
)


@pytest.mark.one_by_day
@pytest.mark.parametrize("shape", [*by_night(((1,),), ((2, 2),)), (2,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_trains_right(kind: str, shape: tuple[int, ...]) -> None:
    run_ranks(train_right, 2 * math.prod(shape), kind, shape, timeout=120.0)


def count_reductions(kind: str) -> list[int]:
    """Reductions of a step, which has several micro-batches, by stage of the pipeline."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    counts = []
    for stage in (0, 3, FSDP):
        stages = make_stages(mesh, stage, 2, "V" in kind)
        schedule = getattr(pipelining, kind)(stages, NUM_MICRO, loss_fn=nn.functional.mse_loss)
        x, target = batch(0, mesh["dp"].get_local_rank())
        schedule.step(x, target=target)
        with zerocore.reporting.record_events(stages[0].submod) as events:
            schedule.step(x, target=target)
        counts.append(sum(event.op in ("reduce_scatter", "all_reduce") for event in events))
        gathers = sum(event.op == "all_gather" for event in events)
        if stage != FSDP:  # whose units torch tells what to do
            assert gathers == (0 if stage == 0 else NUM_LAYERS // 2), gathers
            assert_planned(stages[0].submod, stage, events)
    return counts


def assert_planned(part: nn.Module, stage: int, events: Any) -> None:
    """The price of a schedule without bubbles, as ``plan`` has it."""
    plan = zerocore.plan(
        build()[: NUM_LAYERS // 2], 2, workload=zerocore.Workload(zero_bubble=True)
    ).stages[stage]
    collectives = [event for event in events if event.op in COLLECTIVES]
    assert plan.num_collectives == len(collectives)
    assert plan.sent_nbytes == round(sum(traffic_nbytes(e.op, e.nbytes, 2) for e in collectives))
    buckets = plan.deferred_gradients - sum(param.numel() * 4 for param in part.parameters())
    assert zerocore.memory_usage(part).pool_reserved == plan.pool_reserved + buckets


@greets_itself
@pytest.mark.parametrize("kind", ["ScheduleInterleavedZeroBubble", *by_night(V_SHAPED[0])])
def test_zero_bubble_gathers_and_reduces_once_a_step(kind: str) -> None:
    assert run_ranks(count_reductions, 2, kind) == [[NUM_LAYERS // 2] * 3] * 2


def last_dimension(param: nn.Parameter) -> Shard:
    """Modules then see views of full parameters."""
    return Shard(param.dim() - 1)


def gradients(mesh: Any, kind: str, fully_shard: Any, **options: Any) -> list[list[Tensor]]:
    """This rank's gradients in each of several steps from the same state."""
    num_stages = 2 * mesh["pp"].size()
    stages = make_stages(
        mesh, FSDP, num_stages, "V" in kind, fully_shard, build_elementwise, **options
    )
    for module in chain.from_iterable(stage.submod.modules() for stage in stages):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # FSDP2's average is none of gloo's

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    schedule = getattr(pipelining, kind)(stages, NUM_MICRO, loss_fn=loss, scale_grads=False)
    x, target = batch(0, mesh["dp"].get_local_rank())
    first = (x,) if any(stage.is_first for stage in stages) else ()
    last = {"target": target} if any(stage.is_last for stage in stages) else {}
    found = []
    for _ in range(NUM_STEPS):
        schedule.step(*first, **last)
        params = [param for stage in stages for param in stage.submod.parameters()]
        found.append([param.grad.to_local().clone() for param in params])
        for param in params:
            param.grad = None
    return found


def sum_as_fsdp2(kind: str, num_pipelined: int) -> None:
    mesh = init_device_mesh("cpu", (num_pipelined, 2), mesh_dim_names=("pp", "dp"))
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for place in (None, last_dimension):
            options: Any = {"mp_policy": policy, "shard_placement_fn": place}
            options["reshard_after_forward"] = False  # otherwise FSDP2 loses gradients
            expected = gradients(mesh, kind, fully_shard, **options)
            found = gradients(mesh, kind, zerocore.fsdp.fully_shard, **options)
            for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(one, other), (dtype, place, step)


SPLIT = (("ScheduleInterleavedZeroBubble", 1), *by_night((V_SHAPED[0], 2)))


@greets_itself
@pytest.mark.parametrize(("kind", "num_pipelined"), SPLIT)
def test_zero_bubble_sums_as_fsdp2_from_the_first_step_on(kind: str, num_pipelined: int) -> None:
    run_ranks(sum_as_fsdp2, 2 * num_pipelined, kind, num_pipelined, timeout=120.0)


def fail_in_a_step() -> None:
    """The loss of one micro-batch raises; the next step is as if there had been none before."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    for stage in (1, 3):
        found = []
        for fails in (False, True):
            calls = [0]

            def loss(output: Tensor, target: Tensor, calls: Any = calls, fails: Any = fails) -> Any:
                calls[0] += 1
                if fails and calls[0] == 3:
                    raise ArithmeticError("no more")
                return nn.functional.mse_loss(output, target)

            stages = make_stages(mesh, stage, 2, is_v=False)
            schedule = pipelining.ScheduleInterleavedZeroBubble(stages, NUM_MICRO, loss_fn=loss)
            x, target = batch(0, mesh["dp"].get_local_rank())
            if fails:
                with pytest.raises((ArithmeticError, RuntimeError)):
                    schedule.step(x, target=target)
                stages = [_again(part) for part in stages]
                schedule = pipelining.ScheduleInterleavedZeroBubble(stages, NUM_MICRO, loss_fn=loss)
            for part in stages:
                part.submod.zero_grad()
            schedule.step(x, target=target)
            grads = [param.grad for part in stages for param in part.submod.parameters()]
            found.append([grad.full_tensor() for grad in grads])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def _again(part: Any) -> Any:
    return pipelining.PipelineStage(
        part.submod, part.stage_index, part.num_stages, part.device, group=part.group
    )


@greets_itself
def test_a_step_that_raises_leaves_the_stages_usable() -> None:
    run_ranks(fail_in_a_step, 2)


def split_by_hand() -> None:
    model = zerocore.shard(build())
    x = torch.ones(1, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="zero-bubble"):
        pipelining.stage.stage_backward_input([model(x).sum()], None, [x], model.parameters())
    plain = build()
    pipelining.stage.stage_backward_input([plain(x).sum()], None, [x], plain.parameters())
    assert x.grad is not None


def test_a_split_backward_of_another_schedule() -> None:
    run_ranks(split_by_hand, 1)
