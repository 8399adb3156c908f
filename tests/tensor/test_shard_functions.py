"""Torch functions give on shards the same as on the full tensor, or an error that names it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from zerocore.layout.place import Place
from zerocore.tensor.functions import LISTED, base_of, is_in_place, name_of

Function = Callable[..., Any]


class Awkward(nn.Module):
    """Empty shards, odd shapes, a scalar, and a parameter that is not C-contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.linear = nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3)) * self.scale * self.one
        return self.linear(torch.cat([y, y[:, :4]], 1))


def make(stage: int) -> tuple[nn.Module, nn.Module]:
    """The sharded model and a plain one, both with the gradients of one backward."""
    torch.manual_seed(0)
    plain = Awkward()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    x = torch.randn(2, 3, 6, 6)  # the same on all ranks
    for each in (plain, model):
        with torch.enable_grad():
            each(x).square().sum().backward()
    return model, plain


def pairs(model: nn.Module, plain: nn.Module) -> list[tuple[Any, Tensor]]:
    """Shards of each kind beside what they are shards of."""
    both = list(zip(model.parameters(), plain.parameters(), strict=True))
    found: list[tuple[Any, Tensor]] = []
    for param, full in both:
        assert param.grad is not None and full.grad is not None
        found += [(param.grad, full.grad), (param.detach(), full.detach())]
    return found + [(param, full.detach()) for param, full in both]


ELEMENTS: dict[str, Function] = {
    "arithmetic": lambda t: (2 * t + 1 - t / 3) ** 2 // 0.5,
    "reflected": lambda t: 1.0 / (1 - (t % 0.3)),
    "negation": lambda t: -abs(t),
    "comparison": lambda t: (t > 0) & ~(t >= 0.1) | (t == 0),
    "where": lambda t: torch.where(t > 0, t, 0.5),
    "clamp": lambda t: t.clamp(-0.1, 0.1),
    "lerp": lambda t: torch.lerp(t, t.sign(), 0.25),
    "addcmul": lambda t: torch.addcmul(t, t, t, value=0.5),
    "relu": lambda t: nn.functional.relu(t),
    "special": lambda t: torch.special.expit(t),
    "by_tag": lambda t: torch.special.entr(t) + torch.special.i0e(t) + torch.igamma(abs(t), abs(t)),
    "cast": lambda t: t.to(torch.float64).half(),
    "likes": lambda t: torch.zeros_like(t) + torch.ones_like(t) * torch.full_like(t, 2.0),
    "in_place": lambda t: t.clone().mul_(2).add_(t, alpha=3).neg_(),
    "zeroed": lambda t: t.clone().zero_().fill_(2.0),
    "masked": lambda t: t.clone().masked_fill_(t > 0, 5.0),
    "nan_to_num": lambda t: (t / 0.0).nan_to_num(),
    "max_of_two": lambda t: torch.max(t, -t),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "foreach_add": lambda t: torch._foreach_add([t], [t.sign()], alpha=2.0)[0],
    "contiguous": lambda t: t.contiguous().detach(),
    "view_as": lambda t: (t * 2).view_as(t),
}
REDUCTIONS: dict[str, Function] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "prod": lambda t: (t + 1).prod(),
    "max": torch.max,
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "any": lambda t: (t > 0.2).any(),
    "all": lambda t: (t > -10).all(),
    "isnan": lambda t: t.isnan().any(),
    "nan": lambda t: torch.where(t == t.max(), math.nan, t).max(),
    "nansum": lambda t: torch.where(t > 0, t, math.nan).nansum(),
    "nanmean": lambda t: torch.where(t > -10, t, math.nan).nanmean(),
    "count": lambda t: t.count_nonzero(),
    "bits": lambda t: (t > 0).sum(),
    "var": lambda t: (t * 3 + 7).var(correction=0),
    "std": lambda t: t.std(unbiased=False),
    "sum_double": lambda t: t.sum(dtype=torch.float64),
    "norm": lambda t: t.norm(),
    "norm1": lambda t: torch.norm(t, p=1),
    "linalg": lambda t: torch.linalg.vector_norm(t, math.inf),
    "frobenius": lambda t: torch.linalg.norm(t),
    "foreach_norm": lambda t: torch._foreach_norm([t, t], 2)[1],
    "equal": lambda t: torch.tensor(torch.equal(t, t.clone())),
    "unequal": lambda t: torch.tensor(torch.equal(t, torch.where(t == t.max(), 9.0, t))),
    "allclose": lambda t: torch.tensor(torch.allclose(t, t + 1e-12)),
}


def compute(stage: int) -> None:
    model, plain = make(stage)
    with torch.no_grad():
        for shard, full in pairs(model, plain):
            for name, function in (ELEMENTS | REDUCTIONS).items():
                print(name, shard, flush=True)  # shown if the rank fails
                result, expected = function(shard), function(full)
                if name in ELEMENTS:
                    assert hasattr(result, "place"), "it has lost its place"
                    assert result.shape == shard.shape == full.shape
                else:
                    assert type(result) is Tensor
                assert result.dtype == expected.dtype
                torch.testing.assert_close(full_of(result), expected, equal_nan=True)
            flat = full.flatten()
            if full.is_contiguous():
                found = torch.dot(shard.view(-1), shard.reshape(flat.shape))
                torch.testing.assert_close(found, flat.dot(flat))
            assert float(shard.abs().sum()) >= 0.0 and repr(shard).count("global_shape") == 1


def norms_of_half() -> None:
    model = zerocore.shard(nn.Linear(37, 7), stage=3)
    for seed, dtype in itertools.product(range(20), (torch.bfloat16, torch.float16)):
        full = torch.randn(7, 37, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            half = model.weight.copy_(full).to(dtype)
            assert half.norm() == full.to(dtype).norm()
            assert torch._foreach_norm([half, model.bias], 2)[0] == full.to(dtype).norm()


def test_norms_of_half_precision_are_rounded_once() -> None:
    run_ranks(norms_of_half, 3)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), [(1, 3), (2, 2), (3, 1), (3, 4)])
def test_elements_and_reductions(stage: int, world_size: int) -> None:
    run_ranks(compute, world_size, stage)


PRODUCTS: dict[str, Function] = {
    "dot": torch.dot,
    "vdot": torch.vdot,
    "inner": torch.inner,
    "matmul": torch.matmul,
    "operator": lambda a, b: a @ b,
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
    "allclose": lambda a, b: torch.tensor(torch.allclose(a, b)),
}


class Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.value * x).square().sum()


class Vectors(nn.Module):
    """Cut behind each four elements, so that some ranks own all of one, one element, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(Vector(size) for size in (3, 1, 5, 9, 13, 7))

    def forward(self, x: Tensor) -> Tensor:
        return sum(vector(x) for vector in self.all)  # type: ignore[return-value]


def multiply(stage: int) -> list[str]:
    """The outcome of each product; all ranks come to each of them."""
    torch.manual_seed(0)
    plain = Vectors()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, units=[Vector])
    for each in (plain, model):
        each(torch.tensor(0.5)).backward()
    outcomes = []
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        for name, function in PRODUCTS.items():
            for shard in (param.detach(), param.grad):
                full = shard.full_tensor()
                assert full.shape == whole.shape
                outcomes += [
                    f"{name} {kind} {outcome(function, shard, full, other)}"
                    for kind, other in (
                        ("full", full * 2),
                        ("own", full.clone()),
                        ("local", shard.local() * 2),
                        ("one", torch.ones(1)),
                        ("scalar", torch.tensor(1.0)),
                    )
                ]
                slices = [(t[:2], t[1:3]) for t in (shard, full)]
                if len(full) > 2:
                    torch.testing.assert_close(function(*slices[0]), function(*slices[1]))
    return outcomes


def outcome(function: Function, shard: Any, full: Tensor, other: Tensor) -> str:
    try:
        found = function(shard, other)
    except (RuntimeError, TypeError):
        return "refused"
    if other.shape == full.shape:
        torch.testing.assert_close(found, function(full, other))
    return "done"


@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (3, 3), (1, 4), (3, 4)])
def test_no_rank_multiplies_alone(stage: int, world_size: int) -> None:
    found = run_ranks(multiply, world_size, stage)
    assert all(each == found[0] for each in found)
    assert {each.rpartition(" ")[2] for each in found[0] if " full " in each} == {"done"}


EXACT: dict[str, Function] = {  # each needs all elements
    "matmul": lambda t: t @ t.mT,
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t]),
    "view": lambda t: t.sign().view(torch.int32),
    "other_view": lambda t: t.flatten().view(1, -1).sum(1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "einsum": lambda t: torch.einsum("i...,i...->", t, t),
    "sort": lambda t: list(t.sort()),
    "kthvalue": lambda t: list(t.flatten().kthvalue(3)),
    "mode": lambda t: list(t.mode()),
    "median": lambda t: t.median(),
    "argmax": lambda t: t.argmax(),
    "topk": lambda t: list(t.flatten().topk(2)),
    "histc": lambda t: t.histc(5),
    "cumprod": lambda t: t.cumprod(0),
    "cumsum": lambda t: t.cumsum(0),
    "var_mean": lambda t: list(torch.var_mean(t)),
    "std_mean": lambda t: list(torch.std_mean(t)),
    "normalize": lambda t: nn.functional.normalize(t, dim=0),
    "cosine": lambda t: nn.functional.cosine_similarity(t, t.sign(), dim=0),
    "mse_loss": lambda t: nn.functional.mse_loss(t, t + 1),
    "softmax": lambda t: t.softmax(0),
    "dist": lambda t: torch.dist(t, t * 2),
    "norm_0": lambda t: torch.linalg.vector_norm(t, 0),
    "norm_-1": lambda t: t.norm(p=-1),
    "foreach_norm_0": lambda t: torch._foreach_norm([t, t], 0)[1],
    "along": lambda t: t.sum(0),
    "norm_along": lambda t: t.norm(dim=0),
    "spectral": lambda t: torch.linalg.norm(t, 2),
    "numpy": lambda t: torch.as_tensor(t.numpy().copy()),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "index": lambda t: t[0],
    "slice": lambda t: t[1:3],
    "negative": lambda t: t[..., -1],
    "mask": lambda t: t[t > 0],
    "indices": lambda t: t[torch.tensor([1, 0])],
    "where_indices": lambda t: list(torch.where(t > 0)),
    "broadcast": lambda t: t * torch.ones(4, *[1] * t.dim()),
    "column": lambda t: t.reshape(-1, 1) * torch.arange(4.0),
    "row": lambda t: t * torch.arange(float(t.size(-1))),
    "multinomial": lambda t: torch.multinomial(t.abs().flatten(), 2, generator=seeded()),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid(), generator=seeded()),
    "script": lambda t: torch.jit.script(squares)(t),
}
REFUSED: dict[str, Function] = {
    "storage": lambda t: t.untyped_storage(),
    "data_ptr": lambda t: t.data_ptr(),
    "dlpack": lambda t: t.__dlpack__(),
    "share_memory": lambda t: t.share_memory_(),
    "class": lambda t: t.as_subclass(Tensor),
}


def squares(x: Tensor) -> Tensor:
    return x.square().sum()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def gather(stage: int) -> None:
    model, plain = make(stage)
    with torch.no_grad():
        for shard, full in pairs(model, plain):
            for name, function in EXACT.items():
                try:
                    expected = function(full)
                except (RuntimeError, IndexError, TypeError):
                    continue  # of a tensor of another number of dimensions
                print(name, shard, flush=True)
                found = function(shard)
                found = [*map(full_of, found)] if isinstance(found, list) else full_of(found)
                torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (2, 2), (3, 1), (3, 4)])
def test_functions_that_need_all_elements(stage: int, world_size: int) -> None:
    run_ranks(gather, world_size, stage)


class Reading(torch.optim.SGD):
    """Keeps its parameters by address."""

    def step(self, closure: Any = None) -> None:
        print([p.data_ptr() for group in self.param_groups for p in group["params"]])


def refuse(stage: int) -> None:
    model, _ = make(stage)
    weight = model.linear.weight
    with torch.no_grad():
        for shard in (weight.grad, weight.detach()):
            for name, function in REFUSED.items():
                print(name, flush=True)
                with pytest.raises(TypeError, match=r"linear\.weight.*full_tensor\(\)"):
                    function(shard)
            with pytest.raises(TypeError, match=r"If Reading calls it.*owned\(Reading, "):
                Reading([weight]).step()
            with pytest.raises(RuntimeError, match=r"changed the shape of .*'linear\.weight'"):
                shard.resize_(3)
            with pytest.raises(RuntimeError, match=r"size of tensor"):
                shard.add(model.conv.weight.grad)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_refused_by_name(stage: int) -> None:
    run_ranks(refuse, 2, stage)


def mix(stage: int) -> None:
    """Plain tensors of the full shape stand beside shards: for a part, or to be changed."""
    model, plain = make(stage)
    with torch.no_grad():
        for param, full in zip(model.parameters(), plain.parameters(), strict=True):
            value = full.detach().clone()
            assert isinstance(param * value, zerocore.tensor.LocalShard)
            torch.testing.assert_close(full_of(param * value), value * value)
            changed = torch.zeros_like(value)
            assert changed.copy_(param) is changed and torch.equal(changed, value)
            changed.lerp_(param.detach() * 3, 0.5)
            torch.testing.assert_close(changed, value * 2)
            torch._foreach_lerp_([changed], [param], 1.0)
            torch.testing.assert_close(changed, value)
            state = torch.zeros(param.shape)  # as an optimizer may make it
            state.mul_(0.9).add_(param.grad)
            torch.testing.assert_close(state, full.grad)
            param.add_(state)
            torch.testing.assert_close(full_of(param), value + full.grad)
            local = param.local().clone()
            if param.dim() < 2:
                param.copy_(local)
            vector = torch.zeros(full.numel() + 2)
            vector[1:-1].view(full.shape).copy_(param)
            torch.testing.assert_close(vector[1:-1].view(full.shape), value + full.grad)
            if full.is_contiguous():
                vector[2:] = param.grad.view(-1)
                torch.testing.assert_close(vector[2:].view(full.shape), full.grad)
            param.copy_(value + 1)
            torch.testing.assert_close(full_of(param), value + 1)
            param.detach()[:] = value
            torch.testing.assert_close(full_of(param), value)
            param.grad[param.grad > 0] = 0.0
            assert param.grad.max() <= 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_tensors_beside_shards(stage: int, world_size: int) -> None:
    run_ranks(mix, world_size, stage)


SHAPES: dict[str, Function] = {
    "shape": lambda t: tuple(t.shape),
    "size": lambda t: [t.size(), *(t.size(index) for index in range(t.dim()))],
    "dim": lambda t: (t.dim(), t.ndim, t.ndimension()),
    "numel": lambda t: (t.numel(), t.nelement(), torch.numel(t), t.nbytes),
    "stride": lambda t: (t.stride(), t.storage_offset()),
    "length": lambda t: len(t) if t.dim() else None,
    "contiguous": lambda t: t.is_contiguous(),
    "channels_last": lambda t: t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last),
    "zeros": lambda t: torch.zeros(t.shape).shape,
    "new": lambda t: t.new_ones(t.shape).sum(),
    "template": lambda t: torch.arange(t.numel()).view_as(t).shape,
    "views": lambda t: t.detach().contiguous().reshape(1, -1).reshape(t.shape).shape,
    "flat": lambda t: t.is_contiguous() and t.detach().view(-1).shape,
    "rows": lambda t: len(list(t)) if isinstance(t, nn.Parameter) and t.dim() else None,
}


def ask(stage: int) -> None:
    model, plain = make(stage)
    for shard, full in pairs(model, plain):
        full = nn.Parameter(full) if isinstance(shard, nn.Parameter) else full
        for name, function in SHAPES.items():
            print(name, shard, flush=True)
            if name == "views" and not full.is_contiguous():
                continue
            assert function(shard) == function(full)
        local = shard.local()
        assert local.dim() == 1 and local.numel() == shard.shard_range[1] - shard.shard_range[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shapes_are_those_of_the_full_tensor(stage: int) -> None:
    run_ranks(ask, 3, stage)


def average(stage: int) -> None:
    """A copy made before shard, and one more, are updated exactly."""
    torch.manual_seed(0)
    plain = Awkward()
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    expected = [torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=f) for f in (None, decay)]
    model = copy.deepcopy(plain)
    averages = [torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=f) for f in (None, decay)]
    zerocore.shard(model, stage=stage)
    for step in range(3):
        with torch.no_grad():
            torch._foreach_add_(list(plain.parameters()), float(step))
            torch._foreach_add_(list(model.parameters()), float(step))
        for own, other in zip(averages, expected, strict=True):
            own.update_parameters(model)
            other.update_parameters(plain)
            torch.testing.assert_close(own.state_dict(), other.state_dict())


def test_averaged_model_made_before_shard(stage: int) -> None:
    run_ranks(average, 2, stage)


def test_pointwise_functions_are_pointwise() -> None:
    """Functions that are listed by hand give for a part what they give for the whole, there."""
    full = torch.rand(12) * 0.8 + 0.1
    whole, part = full.clone(), full[3:7].clone()
    tried = 0
    for name in sorted(LISTED - {"cuda", "pin_memory"}):
        function = getattr(Tensor, name, getattr(torch, name, None))
        for args in ((), (2.0,), (0.5, 2.0)):
            try:
                expected, found = function(whole, *args), function(part, *args)
            except (TypeError, RuntimeError, ValueError, AttributeError, Warning):
                continue
            tried += 1
            if isinstance(expected, Tensor) and name != "empty_like":
                torch.testing.assert_close(found, expected[3:7], equal_nan=True, msg=name)
    assert tried > 35


def test_names() -> None:
    assert name_of(Tensor.grad.__get__) == "grad" and name_of(Tensor.grad.__set__) == "grad="
    assert name_of(torch.ops.aten.mul.Tensor) == "mul"
    assert not name_of(torch.ops.zerocore.cast).startswith("cast")
    assert base_of("_foreach_addcmul_") == "addcmul" and base_of("__rsub__") == "sub"
    assert base_of("special_expit") == "expit" and base_of("__iadd__") == "add"
    assert is_in_place("mul_") and is_in_place("__iadd__") and not is_in_place("__add__")


def test_parts_of_other_memory_orders() -> None:
    full = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    place = Place("w", full.shape, (10, 40), None, full.stride())
    assert torch.equal(place.part_of(full.contiguous()), full.permute(0, 2, 3, 1).flatten()[10:40])
