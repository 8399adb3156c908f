"""Plans agree with textbook figures, and with the bytes that the runtime then allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerocore
from tests.by_night import by_day
from tests.zoo import CASES
from tests.zoo_case import Case
from zerocore.common.quantities import format_seconds
from zerocore.model.casting import cast_floats
from zerocore.model.state import state_of
from zerocore.options.precision import MixedPrecision
from zerocore.planning import plan as estimate
from zerocore.planning.activations import Activations, record
from zerocore.planning.result import StagePlan

GB = 10**9
BF16 = torch.bfloat16
WORLD_SIZES = (1, 2, 3, 8, 64, 1024)
SAMPLES = 3
NUM_BATCHES = 8  # of different ranks; some cases have no more


def blocks(num_params: int, num_blocks: int = 32) -> nn.Module:
    """A model of equal blocks on the meta device; rounded to whole blocks."""
    with torch.device("meta"):
        return nn.ModuleList(
            nn.Linear(num_params // num_blocks, 1, bias=False) for _ in range(num_blocks)
        )


def states(plan: zerocore.planning.Plan) -> list[float]:
    """GB of model state by stage."""
    return [stage.model_state / GB for stage in plan.stages]


def test_seven_billion_parameters_with_fp32_adam_on_eight_ranks() -> None:
    plan = zerocore.plan(blocks(7 * GB), 8, machine=zerocore.Machine(memory="80GB"))
    assert states(plan) == pytest.approx([112, 63, 38.5, 14], rel=1e-6)
    assert [stage.fits for stage in plan.stages] == [False, True, True, True]


def test_four_billion_parameters_all_in_bf16_on_two_ranks() -> None:
    plan = zerocore.plan(blocks(4 * GB), 2, dtype=BF16, machine=zerocore.Machine(memory="24GB"))
    assert states(plan) == pytest.approx([32, 24, 20, 16], rel=1e-6)
    # Stage 1 is 24 GB to the byte, and leaves nothing for activations.
    assert [stage.fits for stage in plan.stages] == [False, True, True, True]
    assert abs(plan.stages[1].spare) < 0.001 * GB
    assert "little headroom; stage 3 leaves 7.25 GB" in plan.advice[0]  # 8, less the pool
    # Stage 2 fits, with 4 GB less the pool to spare: less than a fifth of the device.
    assert 0 < plan.stages[2].spare < 4 * GB
    verdicts = ["no", "little headroom", "little headroom", "yes"]
    assert [plan.verdict(stage) for stage in plan.stages] == verdicts
    assert ["fits, without activations", *verdicts] in plan.rows()
    assert plan.advice[0].startswith("stage 1 is the smallest that fits without activations")


@pytest.mark.parametrize("world_size", [1, 64])
def test_mixed_precision_takes_sixteen_bytes_a_parameter(world_size: int) -> None:
    mixed = MixedPrecision(param_dtype=BF16, grad_dtype=BF16)
    plan = zerocore.plan(blocks(70 * GB, 80), world_size, mixed_precision=mixed)
    assert states(plan)[0] == pytest.approx(1120, rel=1e-6)
    assert states(plan)[3] == pytest.approx(1120 / world_size, rel=1e-6)
    stage = plan.stages[0]
    held = (stage.parameters, stage.main_weights, stage.gradients, stage.optimizer)
    assert [nbytes / (70 * GB) for nbytes in held] == pytest.approx([2, 4, 2, 8], rel=1e-6)


def test_gradients_travel_in_one_dtype_and_stay_in_another() -> None:
    def stages(**options: Any) -> tuple[StagePlan, ...]:
        mixed = MixedPrecision(param_dtype=BF16, **options)
        return zerocore.plan(blocks(GB), 8, mixed_precision=mixed).stages

    default = stages()
    for stage, other in zip(stages(reduce_dtype=torch.float32), default, strict=True):
        assert stage.gradients == other.gradients
        assert stage.parameters == other.parameters
        assert stage.sent_nbytes > other.sent_nbytes
    assert stages(reduce_dtype=torch.float32)[0].sent_nbytes == 2 * default[0].sent_nbytes
    for stage, other in zip(stages(grad_dtype=BF16), default, strict=True):
        assert 2 * stage.gradients == other.gradients
        assert stage.sent_nbytes == other.sent_nbytes


def test_what_is_kept_in_fp32_has_no_second_copy() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(64), "linear": nn.Linear(64, 64, bias=False)})
    mixed = MixedPrecision(param_dtype=BF16, keep_fp32=("norm",))
    stage = zerocore.plan(model, 1, mixed_precision=mixed).stages[0]
    assert stage.main_weights == 4 * 64 * 64
    assert stage.parameters == 2 * 64 * 64 + 4 * 2 * 64
    assert stage.optimizer == 2 * 4 * (64 * 64 + 2 * 64)


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_stage_three_sends_half_as_much_again(world_size: int) -> None:
    """All but the last unit of the forward, which is kept for the backward."""
    num_blocks = 32
    plan = zerocore.plan(blocks(GB, num_blocks), world_size)
    sent = [stage.sent_nbytes for stage in plan.stages]
    assert sent[1] == sent[2] == pytest.approx(sent[0], rel=1e-5)  # padding
    assert sent[3] + sent[3] / (3 * num_blocks - 1) == pytest.approx(1.5 * sent[0], rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "tensors"), [("sgd", 0), ("momentum", 1), ("AdamW", 2), ("amsgrad", 3), (5, 5)]
)
def test_optimizer_states(optimizer: str | int, tensors: int) -> None:
    stage = zerocore.plan(
        nn.Linear(64, 64, bias=False), 1, workload=zerocore.Workload(optimizer=optimizer)
    ).stages[0]
    assert stage.optimizer == tensors * 4 * 64 * 64


@contextmanager
def fake_group(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocated(
    case: Case, stage: int, rank: int, micro_batches: int = 1, **options: Any
) -> tuple[int, ...]:
    """Bytes by kind that the runtime holds after two steps."""
    units = list(case.units) if case.units else None
    model = zerocore.shard(case.seeded_build(), stage=stage, units=units, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = case.seeded_batch(0, rank % NUM_BATCHES, SAMPLES)
    for _ in range(2):
        for index in range(micro_batches):
            with nullcontext() if index == micro_batches - 1 else zerocore.no_sync(model):
                case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    usage = zerocore.memory_usage(model, optimizer)
    reserved = state_of(model).engine.pool_stats.peak_reserved_nbytes
    return usage.parameters, usage.main_weights, usage.gradients, usage.optimizer, reserved


def planned(stage: StagePlan) -> tuple[int, ...]:
    return (
        stage.parameters,
        stage.main_weights,
        stage.gradients,
        stage.optimizer,
        stage.pool_reserved,
    )


@pytest.mark.parametrize("name", by_day(CASES, list(CASES)[::7]))
def test_the_runtime_allocates_what_was_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    runs: dict[tuple[str, bool], Activations] = {}

    def measure_once(*args: Any, checkpointing: bool, **options: Any) -> Activations:
        key = (str(args[2]), checkpointing)  # the batch; the model is the same
        if key not in runs:
            runs[key] = record(*args, checkpointing=checkpointing, **options)
        return runs[key]

    monkeypatch.setattr(estimate, "record", measure_once)
    units = list(case.units) if case.units else None
    for world_size in WORLD_SIZES:
        rank = world_size // 2
        batch = case.seeded_batch(0, rank % NUM_BATCHES, SAMPLES)
        workload = zerocore.Workload(rank=rank, inputs=batch, loss=case.loss)
        if name == "hf_mixtral":  # torch's grouped products of fake tensors are for bf16 alone
            workload = zerocore.Workload(rank=rank)
        plan = zerocore.plan(case.seeded_build(), world_size, units=units, workload=workload)
        with fake_group(world_size, rank):
            for stage in plan.stages:
                actual = allocated(case, stage.stage, rank)
                assert planned(stage) == actual, f"stage {stage.stage}, {world_size} ranks"


NAMES = ("plain", "experts", "frozen", "empty_shards")
MIXED = list(product(NAMES, (None, torch.float32), ("once", "sharded", "full")))


@pytest.mark.parametrize(
    ("name", "reduce_dtype", "accumulate"),
    by_day(MIXED, [each for n, each in enumerate(MIXED) if n % 5 == 0]),
)
def test_the_runtime_allocates_what_was_planned_in_mixed_precision(
    name: str, reduce_dtype: torch.dtype | None, accumulate: str
) -> None:
    case = CASES[name]
    mixed = MixedPrecision(BF16, reduce_dtype, output_dtype=torch.float32)
    prefetch = {"once": 1, "sharded": 0, "full": 2}[accumulate]
    micro_batches, accumulate = (1, "sharded") if accumulate == "once" else (2, accumulate)
    communication = zerocore.Communication(accumulate=accumulate, prefetch=prefetch)
    for world_size in WORLD_SIZES:
        rank = world_size - 1
        batch = case.seeded_batch(0, rank % NUM_BATCHES, SAMPLES)
        plan = zerocore.plan(
            case.seeded_build(),
            world_size,
            workload=zerocore.Workload(
                inputs=cast_floats(batch, BF16),
                loss=case.loss,
                rank=rank,
                micro_batches=micro_batches,
            ),
            mixed_precision=mixed,
            communication=communication,
        )
        assert plan.activations is not None, plan.note
        with fake_group(world_size, rank):
            for stage in plan.stages:
                options = {"mixed_precision": mixed, "communication": communication}
                actual = allocated(case, stage.stage, rank, micro_batches, **options)
                assert planned(stage) == actual, f"stage {stage.stage}, {world_size} ranks"


class WideBlock(nn.Linear):
    """Saves three tensors of a row of its width."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)).sin().exp()


class Wide(nn.Module):
    """Blocks whose activations outweigh their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_the_peak_is_the_sum_of_what_is_held() -> None:
    plan = zerocore.plan(
        Wide(),
        4,
        workload=zerocore.Workload(inputs=torch.randn(1000, 64)),
        machine=zerocore.Machine(memory="1GB"),
    )
    for stage in plan.stages:
        assert stage.peak.nbytes == stage.reserved + plan.activations.peak_nbytes
        assert stage.spare == GB - stage.peak.nbytes


def test_the_table_has_every_figure_of_every_stage() -> None:
    plan = zerocore.plan(
        Wide(),
        4,
        workload=zerocore.Workload(inputs=torch.randn(1000, 64)),
        machine=zerocore.Machine(links=["eth100", "nvlink4"]),
    )
    rows = plan.rows()
    shown = [{name: cells for name, *cells in part} for part in (rows[-8:-4], rows[-4:])]
    for index, timings in enumerate(shown):
        for column, stage in enumerate(plan.stages):
            timing = stage.timings[index]
            assert timings["  communication"][column] == format_seconds(timing.communication_s)
            assert timings["  no schedule beats"][column] == format_seconds(timing.bound_s)
    assert len(set(shown[0]["  communication"])) == 3  # stages 1 and 2 send the same
    assert all(f"peak of every stage: {stage.peak.when}" in plan.notes() for stage in plan.stages)
    full = zerocore.plan(
        Wide(),
        4,
        workload=zerocore.Workload(inputs=torch.randn(1000, 64)),
        machine=zerocore.Machine(memory=plan.stages[0].peak.nbytes),
    )
    assert full.stages[0].spare == 0
    assert full.verdict(full.stages[0]) == "little headroom"
    assert "fits: 0 B to spare, which is little headroom" in full.advice[0]


def test_advice_where_activations_are_the_bottleneck() -> None:
    plan = zerocore.plan(
        Wide(),
        4,
        workload=zerocore.Workload(inputs=torch.randn(1000, 64)),
        machine=zerocore.Machine(memory="4MB"),
    )
    assert plan.smallest_fit is None
    assert "activations are the bottleneck: checkpoint" in plan.advice[1]
    assert plan.advice[1].endswith("it fits then")
    checkpointed = zerocore.plan(
        Wide(),
        4,
        workload=zerocore.Workload(inputs=torch.randn(1000, 64), checkpointing=True),
        machine=zerocore.Machine(memory="4MB"),
    )
    assert checkpointed.smallest_fit is not None


def test_advice_where_one_layer_is_too_large() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()))
    plan = zerocore.plan(model, 1024, machine=zerocore.Machine(memory="50MB"), units=["1"])
    assert "one layer is too large" in plan.advice[1]


def test_advice_on_how_many_ranks_it_takes() -> None:
    model, machine = blocks(GB, 100), zerocore.Machine(memory="1GB")
    plan = zerocore.plan(model, 2, machine=machine)
    assert plan.advice[1].startswith("stage 3 fits from 32 ranks on")  # 16 need 1 GB and the pool
    assert zerocore.plan(model, 32, machine=machine).stages[3].fits
    assert not zerocore.plan(model, 16, machine=machine).stages[3].fits


def test_advice_on_a_slow_link() -> None:
    """Where one would look at stage 3: not where a lower stage leaves room enough."""
    inputs = torch.randn(1000, 64)

    def slow(memory: int) -> list[str]:
        plan = zerocore.plan(
            Wide(),
            8,
            workload=zerocore.Workload(inputs=inputs),
            machine=zerocore.Machine(memory=memory, links=["1MB/s", "1PB/s,0s"]),
        )
        return [line for line in plan.advice if "is slow for this" in line]

    stages = zerocore.plan(Wide(), 8, workload=zerocore.Workload(inputs=inputs)).stages
    assert slow(GB) == []
    (line,) = slow(stages[2].peak.nbytes)
    assert line.startswith("1MB/s is slow for this: stage 3 waits")
    assert "stage 2 fits and takes" in line
    assert slow(stages[3].peak.nbytes)[0].endswith("larger micro-batches hide more")


def test_a_model_that_needs_data_is_planned_without_activations() -> None:
    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x[:, 0].nonzero()[:, 0]])

    plan = zerocore.plan(Sparse(8, 8), 2, workload=zerocore.Workload(inputs=torch.randn(4, 8)))
    assert plan.activations is None
    assert "activations not measured: the forward or backward failed" in plan.note
    assert plan.stages[3].model_state == 16 * (64 + 8) // 2
    assert "?" in str(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": torch.randn(4, 65)}, "failed with the inputs= or loss= of the workload: Ru"),
        ({"inputs": 3}, "inputs must be one micro-batch of this Wide"),
        ({"inputs": torch.randn(4, 64), "loss": lambda *_: 1.0}, "return a scalar tensor"),
        ({"inputs": torch.randn(4, 64), "loss": nn.Module.__call__}, "return a scalar tensor"),
    ],
)
def test_inputs_and_losses_that_fail(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerocore.plan(Wide(), 2, workload=zerocore.Workload(**options))


def test_the_model_is_left_alone() -> None:
    model = Wide()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zerocore.plan(model, 4, workload=zerocore.Workload(inputs=torch.randn(10, 64)), dtype=BF16)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())
    assert not model.blocks[0]._forward_hooks and not model.blocks[0]._forward_pre_hooks


GROUPS: dict[str, Callable[..., Any]] = {
    "communication": zerocore.Communication,
    "machine": zerocore.Machine,
    "workload": zerocore.Workload,
}


def plan_of(options: dict[str, Any]) -> zerocore.planning.Plan:
    """The plan of options, those of a group as a dict."""
    made = {
        name: GROUPS[name](**value) if name in GROUPS and isinstance(value, dict) else value
        for name, value in options.items()
    }
    return zerocore.plan(Wide(), **{"world_size": 2, **made})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"machine": {"flops": 0}}, "flops must be positive, got 0"),
        ({"machine": {"flops": "0TFLOP/s"}}, "flops must be positive"),
        ({"machine": {"memory": float("inf")}}, "memory must be a number of bytes, got inf"),
        ({"workload": {"rank": 2}}, "rank must be 0 to 1, got 2"),
        ({"communication": {"prefetch": -1}}, "prefetch must be 0 or more"),
        ({"workload": {"seq_len": 0}}, "seq_len must be at least 1"),
        ({"workload": {"optimizer": "sgdd"}}, "optimizer must be one of sgd, momentum"),
        ({"machine": {"memory": "24 gigs"}}, "memory must be a number or text such as"),
        ({"machine": {"links": ["token ring"]}}, "link must be one of nvlink4"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": "2"}, "world_size must be an int, got '2'"),
        ({"machine": "8xH100"}, "machine must be a zerocore.Machine, got '8xH100'"),
        ({"workload": 4}, "workload must be a zerocore.Workload, got 4"),
        ({"communication": 4}, "communication must be a zerocore.Communication, got 4"),
        ({"prefetch": 2}, "unexpected keyword argument 'prefetch'"),
        ({"workload": {"rank": "0"}}, "rank must be an int, got '0'"),
        ({"mixed_precision": "bf16"}, r"a zerocore.MixedPrecision, such as .* got 'bf16'"),
        ({"dtype": "bf16"}, "dtype must be a floating-point torch.dtype such as .* got 'bf16'"),
        ({"dtype": torch.int64}, "dtype must be a floating-point torch.dtype"),
        (
            {"machine": {"links": [b"x"]}},
            "link must be a zerocore.planning.Link, one of nvlink4.* got b'x'",
        ),
        ({"machine": {"links": True}}, "link must be a zerocore.planning.Link"),
        (
            {"machine": {"replica_link": True}, "num_replicas": 2},
            "link must be a zerocore.planning.Link",
        ),
        ({"units": 3}, r"units must be a list such as \['Block'\].* got 3"),
        ({"units": "Block"}, "units must be a list"),
        ({"units": [3]}, "units: expected classes, class or module names, or modules .* got 3"),
        (
            {"workload": {"loss": "mse"}},
            "loss must be a function of the model and its inputs, got 'mse'",
        ),
    ],
)
def test_arguments_of_another_type_are_named(options: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plan_of(options)


def test_a_sharded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="plan it before zerocore"):
        zerocore.plan(zerocore.shard(Wide()), 2)
