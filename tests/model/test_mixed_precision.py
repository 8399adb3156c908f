"""Mixed precision: what is computed, moved, kept and saved in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named, micro_losses
from tests.zoo_case import Case
from zerocore._C import UpdatedUnit
from zerocore.model.casting import cast_floats
from zerocore.model.state import state_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Models that compute in one dtype throughout.
CASES = ("plain", "tied", "looped", "empty_shards", "frozen", "experts")
NUM_STEPS = 3
STAGES = (0, 1, 2, 3)


def policy(**options: Any) -> zerocore.MixedPrecision:
    return zerocore.MixedPrecision(**{"param_dtype": BF16, "output_dtype": FP32, **options})


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Steps as large as the gradient: Adam would turn the rounding of a tiny one into a step."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Reference:
    """One process that plays all ranks: fp32 main weights, and a model in the narrow dtype."""

    def __init__(self, case: Case, mixed: zerocore.MixedPrecision) -> None:
        self.case, self.mixed = case, mixed
        self.main = case.seeded_build()
        self.model = case.seeded_build().to(mixed.param_dtype)
        self.model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        self.model.register_forward_hook(lambda _, __, output: cast_floats(output, FP32))
        self.optimizer = sgd(self.main.parameters())

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, self.model_dtype), cast_floats(kwargs, self.model_dtype)

    @property
    def model_dtype(self) -> torch.dtype:
        assert self.mixed.param_dtype is not None
        return self.mixed.param_dtype

    def state_dict(self) -> dict[str, Tensor]:
        """Main weights; frozen parameters have none."""
        frozen = {name for name, p in self.main.named_parameters() if not p.requires_grad}
        narrow = self.model.state_dict()
        return {k: narrow[k] if k in frozen else v for k, v in self.main.state_dict().items()}

    def step(self, index: int, world_size: int) -> list[float]:
        pairs = list(zip(self.main.parameters(), self.model.parameters(), strict=True))
        with torch.no_grad():
            for main, weight in pairs:
                weight.copy_(main)
        losses = []
        for rank in range(world_size):
            total = 0.0
            for loss in micro_losses(self.model, self.case, index, rank):
                loss.backward()
                self._add_gradients(pairs, world_size)
                total += loss.item()
            losses.append(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def _add_gradients(self, pairs: Iterable[tuple[Tensor, Tensor]], world_size: int) -> None:
        for main, weight in pairs:
            if weight.grad is not None:
                travelled = weight.grad.to(self.mixed.reduce_dtype or self.model_dtype)
                share = travelled.float() / world_size
                main.grad = share if main.grad is None else main.grad + share
                weight.grad = None


def train(
    name: str, stage: int, mixed: zerocore.MixedPrecision, steps: int = NUM_STEPS, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    case = case_named(name)
    print(f"{name} at stage {stage} with {mixed}", flush=True)
    units = list(case.units) if case.units else None
    model = zerocore.shard(
        case.seeded_build(), stage=stage, units=units, mixed_precision=mixed, **options
    )
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        losses.append(accumulate(model, case, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, zerocore.full_state_dict(model)


def compare_with_reference(name: str) -> None:
    """Each policy at every other stage, the other one with one more rank."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for number, mixed in enumerate((policy(reduce_dtype=FP32), policy())):
        reference = Reference(case_named(name), mixed)
        num_steps = NUM_STEPS if rank == 0 else 0
        steps = [reference.step(step, world_size) for step in range(num_steps)] or [[]] * NUM_STEPS
        dist.broadcast_object_list(steps)
        expected = [losses[rank] for losses in steps]
        for stage in STAGES[(number + world_size + CASES.index(name)) % 2 :: 2]:
            # With two more ranks each has the other one. Stages 0 and 1 have one way only.
            mode = ("sharded", "full")[(world_size // 2 + number) % 2] if stage >= 2 else "full"
            losses, state = train(
                name, stage, mixed, communication=zerocore.Communication(accumulate=mode)
            )
            # Sums in another order round differently; a main weight on the edge of two model
            # weights then makes a difference of one bit of bfloat16 in one weight.
            torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)
            if rank == 0:
                torch.testing.assert_close(
                    state, reference.state_dict(), rtol=0.0, atol=5e-3, check_dtype=True
                )


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(name: str, world_size: int) -> None:
    run_ranks(compare_with_reference, world_size, name, timeout=200)


def compare_stages(name: str) -> None:
    """With gradients reduced in fp32 on two ranks every stage does the same additions."""
    mixed = policy(reduce_dtype=FP32)
    answers = [train(name, stage, mixed) for stage in STAGES]
    for losses, state in answers[1:]:
        assert losses == answers[0][0]
        for key, value in state.items():
            assert torch.equal(value, answers[0][1][key]), key


@pytest.mark.parametrize("name", ["plain", "tied", "experts"])
def test_stages_agree_to_the_bit(name: str) -> None:
    run_ranks(compare_stages, 2, name)


class Net(nn.Module):
    """Two blocks, a router that is kept in fp32 and a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen += [x.dtype]
        return self.norm(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 1)
        self.linear = nn.Linear(16, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        route = self.router(x)
        self.seen += [x.dtype, self.router.weight.dtype, route.dtype, self.linear.weight.dtype]
        return x + self.linear(x).relu() * route.sigmoid()


def sharded_net(stage: int, mixed: zerocore.MixedPrecision, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zerocore.shard(Net(), stage=stage, mixed_precision=mixed, **options)


def look_at_dtypes(stage: int) -> None:
    mixed = policy(reduce_dtype=FP32, keep_fp32=("router", "*norm"))
    model = sharded_net(stage, mixed)
    output = model(torch.randn(4, 16))
    assert output.dtype == FP32
    assert model.seen == [BF16]
    assert model.blocks[0].seen == [BF16, FP32, BF16, BF16]
    output.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == FP32 and parameter.grad is not None
        assert parameter.grad.dtype == FP32
    lines = str(zerocore.describe(model)).replace("│", " ")
    text = " ".join(lines.split())  # a cell goes over several lines
    assert "bfloat16 (main weights float32, gradients reduced in float32, kept" in text
    state = zerocore.full_state_dict(model)
    assert all(value.dtype == FP32 for value in state.values())


def test_what_is_computed_in_which_dtype(stage: int) -> None:
    run_ranks(look_at_dtypes, 2, stage)


def step_by_hand(model: nn.Module, grad_dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == grad_dtype
        parameter.data.sub_(parameter.grad, alpha=0.1)
    units = sorted({parameter.unit for parameter in model.parameters()})
    state_of(model).engine.end_update([UpdatedUnit(unit) for unit in units], casts=False)


def count_bytes(stage: int) -> list[tuple[str, str, int]]:
    for reduce_dtype, grad_dtype in ((None, None), (FP32, None), (None, BF16)):
        mixed = policy(reduce_dtype=reduce_dtype, grad_dtype=grad_dtype)
        model = sharded_net(stage, mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            with zerocore.reporting.record_events(model) as events:
                model(torch.randn(4, 16)).sum().backward()
                if grad_dtype is None:  # momentum of torch needs gradients of the weight's dtype
                    optimizer.step()
                else:
                    step_by_hand(model, grad_dtype)
            optimizer.zero_grad()
        moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
        assert moved == zerocore.planning.predict_events(model)
        width = 4 if reduce_dtype == FP32 else 2
        for region in (r for unit in model_regions(model) for r in unit):
            assert region.itemsize == 2
        gathered = sum(nbytes for op, _, nbytes in moved if op == "all_gather")
        reduced = sum(nbytes for op, _, nbytes in moved if op.startswith(("reduce", "all_r")))
        whole = sum(unit.buffer_nbytes for unit in zerocore.describe(model).units)
        assert reduced * 2 == whole * width
        assert gathered >= whole if stage else gathered == 0
        states = 0 if grad_dtype is not None else 1
        predicted = zerocore.planning.predict_memory(model, optimizer_states=states)
        assert zerocore.memory_usage(model, optimizer) == predicted
        assert predicted.main_weights > 0
    return moved


def model_regions(model: nn.Module) -> list[list[Any]]:
    state = state_of(model)
    return [state.engine.layout(unit.index).regions for unit in state.units]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_moved_and_kept_are_as_planned(stage: int, world_size: int) -> None:
    run_ranks(count_bytes, world_size, stage)


def save_and_load(stage: int) -> None:
    mixed = policy()
    model = sharded_net(stage, mixed)
    optimizer = sgd(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    saved = zerocore.full_state_dict(model, rank0_only=False)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in saved.values())
    other = zerocore.shard(Net(), stage=3 - stage, mixed_precision=mixed)
    zerocore.load_full_state_dict(other, saved if dist.get_rank() == 0 else None)
    loaded = zerocore.full_state_dict(other, rank0_only=False)
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())
    batch = torch.randn(4, 16)
    assert torch.equal(model(batch), other(batch))
    # Elements that are not touched keep every bit of their main weight.
    with zerocore.unsharded(model, write_back=True), torch.no_grad():
        model.norm.bias[3] = 0.5
        model.blocks[1].linear.weight[:2] *= 2
    changed = zerocore.full_state_dict(model, rank0_only=False)
    saved["norm.bias"][3] = 0.5
    saved["blocks.1.linear.weight"][:2] = saved["blocks.1.linear.weight"][:2].bfloat16() * 2
    assert all(torch.equal(changed[key], value) for key, value in saved.items())


def test_main_weights_are_saved_and_loaded(stage: int) -> None:
    run_ranks(save_and_load, 2, stage)


def freeze(stage: int) -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    model = zerocore.shard(net, stage=stage, mixed_precision=policy())
    for parameter in model.blocks[0].parameters():
        assert parameter.dtype == BF16 and parameter.model_weight is None
    model.blocks[1].requires_grad_(False)
    model(torch.randn(4, 16)).sum().backward()
    model.blocks[1].requires_grad_(True)  # was trainable: has its main weights
    model(torch.randn(4, 16)).sum().backward()
    assert all(p.grad is not None for p in model.blocks[1].parameters())
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'blocks.0.router.weight' was frozen when the model was"):
        model(torch.randn(4, 16))


def test_what_was_frozen_at_the_start_has_no_main_weights(stage: int) -> None:
    run_ranks(freeze, 2, stage)


def refuse_float64() -> None:
    net = Net().double()
    with pytest.raises(ValueError, match=r"'norm.weight' is torch.float64.*keep_fp32"):
        zerocore.shard(net, mixed_precision=policy(keep_fp32=("blocks",)))
    with pytest.raises(ValueError, match=r"keep_fp32: 'nrom' matches no parameter .*'blocks.0"):
        zerocore.shard(Net(), mixed_precision=policy(keep_fp32=("blocks", "nrom")))
    with pytest.raises(TypeError, match=r"mixed_precision must be a zerocore.MixedPrecision"):
        zerocore.shard(Net(), mixed_precision=BF16)


def test_what_cannot_be_cast_is_refused() -> None:
    run_ranks(refuse_float64, 2)


def train_with(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    stage: int,
    mixed: zerocore.MixedPrecision,
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = zerocore.shard(Net(), stage=stage, mixed_precision=mixed)
    optimizer = make(model.parameters())
    losses = []
    for step in range(4):
        for _ in range(2):
            loss = model(torch.randn(4, 16) + dist.get_rank() + step).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, zerocore.full_state_dict(model)


def compare_optimizers(stage: int) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    fused = partial(torch.optim.AdamW, fused=True, **options)
    ours = partial(zerocore.optim.AdamW, **options)
    expected = train_with(fused, stage, policy(keep_fp32=("router",)))
    actual = train_with(ours, stage, policy(keep_fp32=("router",)))
    # The last elements of a shard may differ in the last bit.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    # Gradients may be kept in a narrow dtype, which no optimizer of torch takes.
    narrow = train_with(ours, stage, policy(grad_dtype=BF16))
    torch.testing.assert_close(narrow[0], expected[0], rtol=5e-2, atol=1e-2)


def test_the_fused_optimizer_writes_model_weights(stage: int) -> None:
    run_ranks(compare_optimizers, 2, stage)


# -- errors that name the cause -----------------------------------------------------------------


def train_in_one_autocast_region(stage: int) -> None:
    model = zerocore.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match=r"autocast region, whose cache.*cache_enabled=False"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        for _ in range(2):
            model(torch.ones(2, 8)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            model(torch.ones(2, 8)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_one_autocast_region_around_two_steps(stage: int) -> None:
    run_ranks(train_in_one_autocast_region, 2, stage)


def shard_unlike_modules(stage: int) -> None:
    for lazy, name in ((nn.LazyLinear(8), "1.weight"), (nn.LazyBatchNorm1d(), "1.weight")):
        with pytest.raises(
            ValueError, match=f"'{name}' belongs to a lazy module and has no shape yet"
        ):
            zerocore.shard(nn.Sequential(nn.Linear(8, 8), lazy), stage=stage)
    for keep in ((), ("1",)):
        norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        mixed = zerocore.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=keep)
        model = zerocore.shard(norm, stage=stage, mixed_precision=mixed)
        if keep:
            model(torch.randn(4, 8)).float().sum().backward()
            continue
        told = r"parameter '1.weight' torch.bfloat16.*keep_fp32=\('1',\)"
        with pytest.raises(RuntimeError, match=told):
            model(torch.randn(4, 8))


def test_lazy_modules_and_batch_norms_are_named(stage: int) -> None:
    run_ranks(shard_unlike_modules, 2, stage)
