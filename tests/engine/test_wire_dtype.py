"""Gradients that travel in one dtype and are summed in another, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocore
import zerocore.fsdp
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of, own_of
from tests.sharding.experts import assert_follows_plan, loss_of_ones
from zerocore.model.state import state_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STAGES = (0, 1, 2, 3)
Gradients = dict[str, Tensor]


class Net(nn.Module):
    """Two linear layers of odd sizes and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype).relu())


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def backward(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(100 * dist.get_rank() + seed)
    model(torch.randn(4, 7).to(dtype)).float().pow(3).sum().backward()


def own_gradients(seed: int, dtype: torch.dtype) -> Gradients:
    """This rank's gradients, of a model that is not sharded."""
    model = make_net().to(dtype)
    backward(model, seed, dtype)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_all_ranks(own: Gradients) -> list[Gradients]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [part.float() for part in parts])


def mean_in_order(all_ranks: list[Gradients], num_shards: int, wire: torch.dtype) -> Gradients:
    """Sums over the ranks of each replica, then over replicas; scaled last, in float32."""
    replicas = [all_ranks[i : i + num_shards] for i in range(0, len(all_ranks), num_shards)]
    scale = torch.tensor(1.0 / len(all_ranks), dtype=FP32)
    return {
        name: scale
        * sum_in_order([sum_in_order([g[name].to(wire) for g in ranks]) for ranks in replicas])
        for name in all_ranks[0]
    }


def sharded_gradients(mixed: zerocore.MixedPrecision, stage: int, **options: Any) -> Gradients:
    model = zerocore.shard(make_net(), stage=stage, mixed_precision=mixed, **options)
    backward(model, 0, FP32)
    return {name: full_of(p.grad) for name, p in model.named_parameters()}


def policy(wire: torch.dtype, **options: Any) -> zerocore.MixedPrecision:
    return zerocore.MixedPrecision(wire_dtype=wire, **options)


def assert_equal(found: Gradients, expected: Gradients, what: object) -> None:
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), (what, name)


def sum_exactly(num_replicas: int) -> None:
    """Claim A: what is in bfloat16 already is summed as if it travelled in float32."""
    world = dist.get_world_size()
    group = None
    if num_replicas > 1:
        group = init_device_mesh("cpu", (num_replicas, world // num_replicas))
    expected = mean_in_order(of_all_ranks(own_gradients(0, BF16)), world // num_replicas, BF16)
    for stage in STAGES:
        for wire in (BF16, FP32):
            found = sharded_gradients(policy(wire, param_dtype=BF16), stage, group=group)
            assert_equal(found, expected, (stage, wire))


def sum_shared_states() -> None:
    """The same where replicas share the optimizer's states."""
    group = init_device_mesh("cpu", (2, 2))
    expected = mean_in_order(of_all_ranks(own_gradients(0, BF16)), 2, BF16)
    mixed = policy(BF16, param_dtype=BF16)
    for stage in STAGES[1:]:
        found = sharded_gradients(
            mixed,
            stage,
            group=group,
            communication=zerocore.Communication(replicas_share="optimizer"),
        )
        assert_equal(found, expected, stage)


def test_sums_over_shared_states_are_exact() -> None:
    run_ranks(sum_shared_states, 4)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("world", "num_replicas"), [(2, 1), (3, 1), (4, 2), (8, 1), (6, 3), (4, 4)]
)
def test_sums_of_narrow_gradients_are_exact(world: int, num_replicas: int) -> None:
    run_ranks(sum_exactly, world, num_replicas, timeout=120)


def stay_within_the_bound() -> None:
    """Claim B: rounding each gradient once, and float32's own sum; nothing else."""
    world = dist.get_world_size()
    all_ranks = of_all_ranks(own_gradients(0, FP32))
    for wire, unit in ((BF16, 2.0**-8), (FP16, 2.0**-11)):
        for stage in STAGES:
            found = sharded_gradients(policy(wire), stage)
            for name, gradient in found.items():
                parts = torch.stack([g[name].double() for g in all_ranks])
                bound = (unit + (world - 1) * 2.0**-24) * parts.abs().sum(0) / world
                error = (gradient.double() - parts.sum(0) / world).abs()
                assert bool((error <= bound + 2.0**-24).all()), (wire, stage, name)
                assert bool((error > 0).any()), (wire, stage, name)


@pytest.mark.one_by_day
@pytest.mark.parametrize("world", [2, 3, 4, *by_night(8)])
def test_errors_stay_within_the_bound(world: int) -> None:
    run_ranks(stay_within_the_bound, world)


def depend_on_gradients_alone() -> None:
    """Claim C: neither units nor prefetch nor regions change a bit."""
    expected = mean_in_order(of_all_ranks(own_gradients(0, FP32)), dist.get_world_size(), BF16)
    whole: list[Any] = ["down", "norm", "up"]
    for stage in STAGES:
        for units in (None, [], whole):
            options: dict[str, Any] = {} if units is None else {"units": units}
            for prefetch in (0, 2):
                found = sharded_gradients(
                    policy(BF16),
                    stage,
                    communication=zerocore.Communication(prefetch=prefetch),
                    **options,
                )
                assert_equal(found, expected, (stage, units, prefetch))
        found = sharded_gradients(policy(BF16, keep_fp32=("norm",)), stage)  # a second region
        rest = {name: grad for name, grad in expected.items() if "norm" not in name}
        assert_equal(found, rest, (stage, "regions"))


@pytest.mark.one_by_day
@pytest.mark.parametrize("world", [3, 4])
def test_sums_depend_on_gradients_alone(world: int) -> None:
    run_ranks(depend_on_gradients_alone, world)


def accumulate(stage: int) -> None:
    """Two backwards that communicate, and two of which one does not."""
    world = dist.get_world_size()
    means = [mean_in_order(of_all_ranks(own_gradients(seed, FP32)), world, FP32) for seed in (0, 1)]
    expected = {name: grad + means[1][name] for name, grad in means[0].items()}
    for wire in (FP32, BF16):
        for sync, mode in ((True, "sharded"), (False, "full"), (False, "sharded")):
            model = zerocore.shard(
                make_net(),
                stage=stage,
                mixed_precision=policy(wire),
                communication=zerocore.Communication(accumulate=mode),
            )
            for seed in (0, 1):
                if sync or seed == 1:
                    backward(model, seed, FP32)
                else:
                    with zerocore.no_sync(model):
                        backward(model, seed, FP32)
            found = {name: full_of(p.grad) for name, p in model.named_parameters()}
            tolerance = 1e-6 if wire == FP32 else 2.0**-7
            for name, gradient in expected.items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(
                    found[name], gradient, rtol=0, atol=tolerance * scale, msg=f"{wire} {name}"
                )


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_accumulate(stage: int) -> None:
    run_ranks(accumulate, 3, stage)


def count_bytes(num_replicas: int) -> None:
    """Bytes as planned; half of float32's for what is not a sum yet."""
    world = dist.get_world_size()
    group = None
    if num_replicas > 1:
        group = init_device_mesh("cpu", (num_replicas, world // num_replicas))
    for stage in STAGES:
        sent = {}
        for wire in (FP32, BF16):
            model = zerocore.shard(
                nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3))),
                stage=stage,
                units=["0", "1", "2"],
                group=group,
                mixed_precision=policy(wire),
            )
            optimizer = torch.optim.AdamW(model.parameters())
            own_loss = partial(loss_of_ones, model, 24)
            events = assert_follows_plan(model, optimizer, own_loss, since=1)
            assert zerocore.memory_usage(model, optimizer) == zerocore.planning.predict_memory(
                model
            )
            assert state_of(model).engine.pool_stats.in_use_nbytes == 0
            reductions = [e for e in events if e.op in ("reduce_scatter", "gather_sums")]
            assert not any(e.op == "all_reduce" for e in events)
            sent[wire] = [e.nbytes for e in reductions if e.op == "reduce_scatter"]
            sums = {e.nbytes for e in reductions if e.op == "gather_sums"}
            assert bool(sums) == (stage == 0 or num_replicas > 1)
        first = slice(0, None, 2 if num_replicas > 1 else 1)  # of each unit
        assert [2 * n for n in sent[BF16][first]] == sent[FP32][first]
        assert num_replicas == 1 or sent[BF16][1::2] == sent[FP32][1::2]


@pytest.mark.one_by_day
@pytest.mark.parametrize(("world", "num_replicas"), [(3, 1), (4, 2)])
def test_bytes_are_as_planned(world: int, num_replicas: int) -> None:
    run_ranks(count_bytes, world, num_replicas)


def sum_rows(num_replicas: int) -> None:
    world = dist.get_world_size()
    expected = mean_in_order(of_all_ranks(own_gradients(0, BF16)), world // num_replicas, BF16)
    shape = (world,) if num_replicas == 1 else (num_replicas, world // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    mixed = zerocore.fsdp.MixedPrecisionPolicy(param_dtype=BF16, wire_dtype=BF16)
    model: Any = make_net()
    for module in (model.up, model):
        zerocore.fsdp.fully_shard(module, mesh=mesh, mp_policy=mixed)
    backward(model, 0, FP32)
    found = {name: full_of(p.grad) for name, p in model.named_parameters()}
    assert_equal(found, expected, "rows")


@pytest.mark.one_by_day
@pytest.mark.parametrize(("world", "num_replicas"), [(3, 1), (4, 2)])
def test_sums_of_rows_are_exact(world: int, num_replicas: int) -> None:
    run_ranks(sum_rows, world, num_replicas)


@pytest.mark.parametrize("option", ["wire_dtype", "reduce_dtype"])
def test_small_gradients_survive_many_ranks_in_float16(option: str) -> None:
    """2**-16 by 1,024 ranks is nothing in float16; half of that is divided behind the sum."""
    mixed = zerocore.MixedPrecision(**{option: FP16})
    with zerocore.emulate(1024, "inf", 0):
        layer = nn.Linear(4, 64, bias=False)
        model = zerocore.shard(layer, stage=2, mixed_precision=mixed)
        (model(torch.ones(1, 4)).sum() * 2.0**-16).backward()
        gradient = own_of(model.weight.grad)  # type: ignore[union-attr]
        assert gradient.numel() > 0
        assert bool((gradient == 2.0**-16).all())


def compare_with_fsdp2() -> tuple[float, float]:
    """Errors of both over all gradients, relative to their norm; layers compute in bfloat16."""
    world = dist.get_world_size()
    all_ranks = of_all_ranks(own_gradients(0, BF16))
    exact = {k: sum(g[k].double() for g in all_ranks) / world for k in all_ranks[0]}
    theirs: Any = make_net()
    fully_shard(theirs, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    backward(theirs, 0, FP32)
    by_torch = {name: full_of(p.grad) for name, p in theirs.named_parameters()}
    ours = sharded_gradients(policy(BF16, param_dtype=BF16), 3)

    def error(found: Gradients) -> float:
        flat, true = (torch.cat([g[k].double().view(-1) for k in exact]) for g in (found, exact))
        return float((flat - true).norm() / true.norm())

    return error(ours), error(by_torch)


@pytest.mark.one_by_day
@pytest.mark.parametrize("world", [2, 3, *by_night(4, 8)])
def test_fsdp2_rounds_what_is_exact_here(world: int) -> None:
    for ours, theirs in run_ranks(compare_with_fsdp2, world):
        print(f"{world} ranks: error {ours:.1e} here, {theirs:.1e} with FSDP2")
        assert ours < 1e-7
        assert theirs > 5e-4


def refuse(make: Callable[[], zerocore.MixedPrecision], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zerocore.shard(make_net(), mixed_precision=make())


def of_first_rank() -> zerocore.MixedPrecision:
    return policy(BF16 if dist.get_rank() == 0 else FP32)


def refuse_all() -> None:
    refuse(of_first_rank, ValueError, "wire_dtype")
    double: Any = make_net().double()
    with pytest.raises(ValueError, match=r"'up.weight' is torch.float64"):
        zerocore.shard(double, mixed_precision=policy(BF16))
    mixed = zerocore.fsdp.MixedPrecisionPolicy(wire_dtype=BF16)
    model: Any = make_net()
    zerocore.fsdp.fully_shard(model.up, mp_policy=mixed)
    zerocore.fsdp.fully_shard(model)
    with pytest.raises(NotImplementedError, match="wire_dtype"):
        model(torch.ones(1, 7))


def test_mistakes_are_errors_on_all_ranks() -> None:
    run_ranks(refuse_all, 2)
    with pytest.raises(TypeError, match="wire_dtype must be a floating-point"):
        policy(torch.int8)
    with pytest.raises(ValueError, match="leave out reduce_dtype"):
        policy(BF16, reduce_dtype=FP32)
    with pytest.raises(ValueError, match="leave out reduce_dtype"):
        zerocore.fsdp.MixedPrecisionPolicy(wire_dtype=BF16, reduce_dtype=FP32)
