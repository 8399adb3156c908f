"""Exports of sharded models: values, memory, collectives, and mistakes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, adamw, case_named
from tests.engine.offloading import ALL, ALL_ON_DISK, BF16, STATES
from tests.sharding import tensor_parallel
from tests.sharding.experts import whole_model
from tests.sharding.tensor_parallel import cut_model
from tests.sharding.test_experts import LAYOUTS
from tests.sharding.test_experts import sharded as sharded_experts
from zerocore.model.state import state_of

SIZES = (1, 3000, "1GiB")


def trained(case_name: str, **options: Any) -> nn.Module:
    case = case_named(case_name)
    model = zerocore.shard(case.seeded_build(), **options)
    make = zerocore.optim.AdamW if "offload" in options else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(2):
        accumulate(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
    return model


def exported(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Copies of all tensors; none may come twice."""
    found: dict[str, Tensor] = {}
    for bucket in zerocore.export(model, **options):
        assert not set(bucket) & set(found)
        found |= {name: tensor.clone() for name, tensor in bucket.items()}
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) <= set(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def compare(case_name: str) -> None:
    for stage in range(4):
        model = trained(case_name, stage=stage)
        expected = zerocore.full_state_dict(model, rank0_only=False)
        missing = {id(value) for value in expected.values()}
        info = zerocore.weights.export_info(model)
        for size in SIZES:
            found = exported(model, max_bytes=size)
            assert_same(found, expected)
            assert {id(expected[name]) for name in found} == missing  # tied ones once
            assert list(found) == [tensor.name for tensor in info.tensors]
            assert all(found[t.name].shape == t.shape for t in info.tensors)
        accumulate(model, case_named(case_name), 0)  # the model goes on


@pytest.mark.parametrize("case_name", ["plain", "tied", "channels_last", "frozen"])
def test_values(case_name: str) -> None:
    run_ranks(compare, 2, case_name)


def compare_options(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    model = trained("plain", **options)
    expected = zerocore.full_state_dict(model, rank0_only=False)
    if dtype is not None:
        expected = {name: value.to(dtype) for name, value in expected.items()}
    for size in SIZES:
        assert_same(exported(model, max_bytes=size), expected)
        assert_same(
            exported(model, max_bytes=size, dtype=torch.float16),
            {name: value.half() for name, value in expected.items()},
        )


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"stage": 3, "mixed_precision": BF16}, torch.bfloat16),
        ({"stage": 1, "mixed_precision": BF16}, torch.bfloat16),
        ({"stage": 3, "offload": STATES}, None),
        ({"stage": 3, "offload": ALL}, None),
        ({"stage": 3, "offload": ALL, "mixed_precision": BF16}, torch.bfloat16),
        ({"stage": 3, "offload": ALL_ON_DISK}, None),
        ({"stage": 3, "communication": zerocore.Communication(regather=1)}, None),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    run_ranks(compare_options, 2, options, dtype)


def compare_hybrid(replicas_share: str | None) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = trained(
        "plain",
        stage=3,
        group=mesh,
        communication=zerocore.Communication(replicas_share=replicas_share),
    )
    expected = zerocore.full_state_dict(model, rank0_only=False)
    assert_same(exported(model), expected)
    wanted = "blocks.0.linear.bias"  # a small part: an all-reduce
    some = exported(model, names=lambda name: name if name == wanted else None)
    assert_same(some, expected)
    assert list(some) == [wanted]


@pytest.mark.parametrize("replicas_share", [None, "optimizer"])
def test_hybrid(replicas_share: str | None) -> None:
    run_ranks(compare_hybrid, 4, replicas_share)


class Stack(nn.Sequential):
    """Blocks of equal sizes."""

    def __init__(self, width: int = 64, depth: int = 5) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(width, width) for _ in range(depth)))


def measure() -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    state = state_of(model)
    model(torch.ones(1, 64)).sum().backward()
    info = zerocore.weights.export_info(model)
    unit = state.engine.layout(0).nbytes
    for max_bytes in (1, 10_000, unit, 2 * unit + 7, 10 * unit):
        peaks = []
        state.engine.forget_recent_peak()
        state.engine.start_trace()
        for bucket in zerocore.export(model, info=info, max_bytes=max_bytes):
            assert len(bucket) == 1 or bucket.nbytes <= max_bytes
            peaks.append(state.engine.pool_stats.in_use_nbytes)
        records = state.engine.stop_trace()
        peak = state.engine.pool_stats.recent_peak_nbytes
        assert peak == info.peak_nbytes(max_bytes) <= max(max_bytes, unit) + unit
        gathers = [record.unit for record in records if record.op == "all_gather"]
        assert gathers == list(range(5))  # one collective a unit
        assert (max(peaks) > unit) == (max_bytes >= unit)  # the next one was on its way
        assert state.engine.pool_stats.in_use_nbytes == 0
    halves = zerocore.weights.export_info(model, dtype=torch.bfloat16)
    assert halves.nbytes == info.nbytes // 2
    state.engine.forget_recent_peak()
    held = [b.nbytes for b in zerocore.export(model, info=halves, max_bytes=unit)]
    assert max(held) <= unit
    assert state.engine.pool_stats.recent_peak_nbytes < halves.peak_nbytes(unit) <= 2 * unit


def test_memory_and_collectives() -> None:
    run_ranks(measure, 2)


def leave() -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    expected = zerocore.full_state_dict(model, rank0_only=False)
    state = state_of(model)
    unit = state.engine.layout(0).nbytes
    kept: dict[str, Tensor] = {}
    for bucket in zerocore.export(model, max_bytes=unit):
        kept = dict(bucket)
        break
    assert state.engine.pool_stats.in_use_nbytes == 0
    if torch.__version__ >= "2.13":  # before, what nobody may read is a null pointer
        with pytest.raises(RuntimeError, match="unit '0'"):
            next(iter(kept.values())).sum()
    open_one = zerocore.export(model, max_bytes=unit)
    next(open_one)
    assert_same(exported(model), expected)  # closes the other one
    assert list(open_one) == []
    for bucket in zerocore.export(model, max_bytes=unit):
        before = state.engine.pool_stats.in_use_nbytes
        bucket.release()
        assert state.engine.pool_stats.in_use_nbytes == before - unit and not bucket
    # One rank takes them and stops, or goes on.
    for stops in (True, False):
        found: dict[str, Tensor] = {}
        for bucket in zerocore.export(model, max_bytes=unit, to=1):
            found |= {name: value.clone() for name, value in bucket.items()}
            if stops:
                break
        assert len(found) == (dist.get_rank() == 1) * (2 if stops else 10)
        assert_same(found, expected)
    model(torch.ones(1, 64))


def test_left_half_way() -> None:
    run_ranks(leave, 2)


def since() -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    optimizer = adamw(model.parameters())
    first = zerocore.export(model)
    assert len([name for bucket in first for name in bucket]) == 10
    assert list(zerocore.export(model, since=first.token)) == []
    model[0].requires_grad_(False)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    changed = exported(model, since=first.token)
    assert sorted(changed) == sorted(f"{i}.{n}" for i in range(1, 5) for n in ("weight", "bias"))
    assert_same(changed, zerocore.full_state_dict(model, rank0_only=False))


def test_only_what_has_changed() -> None:
    run_ranks(since, 2)


def make_mistakes() -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' both become 'weight'"):
        zerocore.export(model, names=lambda name: name.split(".")[-1])
    odd = "x" if dist.get_rank() == 1 else "y"
    with pytest.raises(ValueError, match=r"rank 0 has y \(64,\)"):
        zerocore.export(model, names={"0.bias": odd})
    with pytest.raises(ValueError, match="to must be"):
        zerocore.export(model, to=2)
    with pytest.raises(ValueError, match="no active LoRA"):
        zerocore.export(model, merge="lora")
    with pytest.raises(ValueError, match=r"'0.bias' and '1.bias' both become 'all'"):
        zerocore.weights.export_info(
            model, names=lambda n: ("all", int(n[0])) if "bias" in n else n
        )
    with pytest.raises(ValueError, match="numbered from 0"):
        zerocore.weights.export_info(model, names=lambda name: (name, 1))
    with pytest.raises(ValueError, match="not sharded"):
        zerocore.export(Stack())
    with pytest.raises(ValueError, match="max_bytes"):
        zerocore.export(model, max_bytes="many")
    info = zerocore.weights.export_info(model)
    assert len(exported(model, info=info)) == 10
    with pytest.raises(ValueError, match="to must be"):  # on each rank, also where all agreed
        zerocore.export(model, info=info, to=2)
    with pytest.raises(ValueError, match="to another model"):
        zerocore.export(zerocore.shard(Stack(), stage=3), info=info)
    with pytest.raises(ValueError, match="info=, or names="):
        zerocore.export(model, info=info, dtype=torch.bfloat16)
    assert len(exported(model)) == 10


def test_mistakes() -> None:
    run_ranks(make_mistakes, 2)


class Attention(nn.Module):
    """A block as Llama's, whose layers inference engines fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 4)
        self.v_proj, self.o_proj = nn.Linear(8, 4), nn.Linear(8, 8)


def fuse() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Attention(), "other": nn.Linear(8, 8)})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    zerocore.shard(model, stage=3, units=[Attention])
    names = zerocore.weights.fused(
        {"qkv_proj": ("q_proj", "k_proj", "v_proj")}, lambda n: f"model.{n}"
    )
    found = exported(model, names=names, max_bytes=100)
    for kind in ("weight", "bias"):
        parts = [expected[f"attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(found[f"model.attn.qkv_proj.{kind}"], torch.cat(parts))
    assert torch.equal(found["model.attn.o_proj.weight"], expected["attn.o_proj.weight"])
    assert len(found) == 6


def test_fused_names() -> None:
    run_ranks(fuse, 2)


def merge_adapters(stage: int) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        torch.manual_seed(0)
        base = nn.ModuleDict({"a": Attention(), "b": nn.Linear(8, 8)})
        config = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(base, config)

    expected = build().merge_and_unload().state_dict()
    model = zerocore.shard(build(), stage=stage, units=[Attention])
    assert_same(exported(model, merge="lora"), expected)
    assert len(exported(model, merge="lora")) == len(expected)
    apart = exported(model, names=lambda name: name if "lora_" in name else None)
    full = zerocore.full_state_dict(model, rank0_only=False)
    assert_same(apart, full)
    assert len(apart) == 4


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters(stage: int) -> None:
    run_ranks(merge_adapters, 2, stage)


class Tagger(nn.Module):
    """A model whose head PEFT trains as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.q_proj = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))

    def forward(self, tokens: Tensor) -> Tensor:
        head: Tensor = self.head(self.q_proj(self.embed(tokens)))
        return head


def adapt(peft: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
    model = peft.get_peft_model(Tagger(), config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.rand_like(param))  # the copies are trained
    return model


def merge_with_trained_modules() -> None:
    peft = pytest.importorskip("peft")
    build = lambda: adapt(peft, modules_to_save=["head"])  # noqa: E731
    expected = build().merge_and_unload().state_dict()
    model = zerocore.shard(build(), stage=3)
    assert_same(exported(model, merge="lora"), expected)
    assert exported(model, merge="lora").keys() == expected.keys()
    tokens = zerocore.shard(adapt(peft, trainable_token_indices={"embed": [1, 2]}), stage=3)
    with pytest.raises(ValueError, match=r"'.*embed.token_adapter' is a TrainableTokensLayer"):
        zerocore.export(tokens, merge="lora")


def test_modules_that_adapters_train() -> None:
    run_ranks(merge_with_trained_modules, 2)


def repeat() -> None:
    model = zerocore.shard(Stack(8, 3), stage=3, units=["Linear"])
    info = zerocore.weights.export_info(model)
    counts = []
    for number in range(500):
        for bucket in zerocore.export(model, info=info, max_bytes=300):
            bucket.release()
        if number in (20, 499):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 100
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


def test_many_rounds() -> None:
    run_ranks(repeat, 2)


def compare_parts() -> None:
    expected = {name: value.clone() for name, value in whole_model().state_dict().items()}
    model = sharded_experts(*LAYOUTS["2x2"], 3)
    found = exported(model)
    assert set(found) == set(expected)
    assert_same(found, expected)
    assert_same(exported(model, to=2), expected)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut = zerocore.shard(cut_model(mesh["tp"]), stage=3, group=mesh["dp"])
    assert_same(exported(cut), tensor_parallel.whole_model().state_dict())


def test_parts_of_larger_tensors() -> None:
    run_ranks(compare_parts, 4)


def join_shards() -> None:
    for stage in (1, 3):
        model = trained("plain", stage=stage)
        expected = zerocore.full_state_dict(model, rank0_only=False)
        own = [
            (each.name, each.global_shape, each.strides, each.shard_range, each.tensor.clone())
            for each in zerocore.weights.shards(model)
        ]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        for parts in zip(*gathered, strict=True):
            name, shape, strides = parts[0][:3]
            assert strides is None
            flat = torch.empty(shape.numel())
            for *_, (begin, end), tensor in parts:
                flat[begin:end] = tensor
            assert torch.equal(flat.view(shape), expected[name]), name


def test_shards_make_the_whole() -> None:
    run_ranks(join_shards, 3)
