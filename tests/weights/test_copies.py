"""copy.deepcopy of a sharded model is a sharded model that computes and trains as a plain copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.inp.weight  # tied
        self.listed = [self.blocks[0].up.weight]
        self.inp.bias.requires_grad_(False)
        self.out.register_forward_hook(lambda module, args, output: output * 2)
        self.blocks[0].up.weight.decays = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(model: nn.Module, optimizer: Any, first: int, plain: bool) -> None:
    """Two steps; a plain model sees the batches of all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, first + 2):
        ranks = range(size) if plain else (rank,)
        loss = torch.stack([model(batch(step, r)).square().mean() for r in ranks]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(model: nn.Module, plain: nn.Module) -> None:
    found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(full_of(found[name]), value, msg=lambda text, n=name: n + text)
        assert found[name].requires_grad == value.requires_grad


def trained(stage: int) -> None:
    plain: Any = Net()
    model: Any = zerocore.shard(Net(), stage=stage, units=[Block])
    zerocore.register_forward_method(model.blocks[0], "encode")
    for each in (model, plain):
        steps(each, torch.optim.AdamW(each.parameters(), lr=0.1), 0, each is plain)
    copies = [copy.deepcopy(each) for each in (model, plain)]
    assert zerocore.is_sharded(copies[0])
    assert copies[0].out.weight is copies[0].inp.weight
    assert copies[0].listed[0] is copies[0].blocks[0].up.weight
    assert copies[0].blocks[0].up.weight.decays is False
    x = batch(9, 0)
    torch.testing.assert_close(copies[0].blocks[0].encode(x), copies[1].blocks[0].encode(x))
    for each, other in zip((model, plain), copies, strict=True):
        steps(each, torch.optim.AdamW(each.parameters(), lr=0.1), 2, each is plain)
        steps(other, torch.optim.SGD(other.parameters(), lr=0.3), 4, each is plain)
    same(model, plain)
    same(*copies)
    torch.testing.assert_close(copies[0](x), copies[1](x))
    again = copy.deepcopy(copies[0])
    del copies[0]
    torch.testing.assert_close(again(x), copies[0](x))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_copy_trains_apart_from_its_model(stage: int, world_size: int) -> None:
    run_ranks(trained, world_size, stage)


def part(stage: int) -> None:
    """Copies of modules in the model, also of ones that are no unit, and of a wrapper around it."""
    plain: Any = Net()
    model: Any = zerocore.shard(Net(), stage=stage, units=[Block])
    x = batch(0, 0)
    for name in ("blocks.0", "blocks.1.up", "out"):
        inner, twin = (copy.deepcopy(m.get_submodule(name)) for m in (model, plain))
        torch.testing.assert_close(inner(x), twin(x))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (inner, twin)]
        for each, optimizer in zip((inner, twin), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
        same(inner, twin)
    blocks = copy.deepcopy(model.blocks)
    torch.testing.assert_close(blocks[1](x), plain.blocks[1](x))
    around: Any = copy.deepcopy(nn.Sequential(model, nn.Identity()))
    torch.testing.assert_close(around(x), plain(x))
    assert zerocore.is_sharded(around[0].inp.weight) == zerocore.is_sharded(model.inp.weight)


def test_parts_and_wrappers(stage: int) -> None:
    run_ranks(part, 2, stage)


def together(stage: int) -> None:
    """An optimizer that is copied before its model, and several parts in one copy."""
    made = []
    for each in (Net(), zerocore.shard(Net(), stage=stage, units=[Block])):
        is_plain = not zerocore.is_sharded(each)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        steps(each, optimizer, 0, is_plain)
        second, copied = copy.deepcopy((optimizer, each))
        assert second.param_groups[0]["params"][0] is copied.inp.weight
        steps(copied, second, 2, is_plain)
        blocks = copy.deepcopy(list(each.blocks))
        made.append((copied, each, *blocks, *copy.deepcopy(each.blocks[:2])))
    for plain, model in zip(*made, strict=True):
        same(model, plain)
    model = made[1][1]
    with pytest.raises(TypeError, match=r"'inp\.weight' is in two of the copied modules"):
        copy.deepcopy([model.inp, model.out])


def test_objects_that_are_copied_together(stage: int) -> None:
    run_ranks(together, 2, stage)


def averaged(options: dict[str, Any]) -> None:
    plain, model = Net(), zerocore.shard(Net(), units=[Block], **options)
    averages = [
        torch.optim.swa_utils.AveragedModel(
            each, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
        )
        for each in (model, plain)
    ]
    for each, average in zip((model, plain), averages, strict=True):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.2)
        for first in (0, 2):
            steps(each, optimizer, first, each is plain)
            average.update_parameters(each)
    if "mixed_precision" not in options:
        same(*averages)
    x = batch(8, 0)
    rest = {"rtol": 0.05, "atol": 0.05} if "mixed_precision" in options else {}
    torch.testing.assert_close(averages[0](x).float(), averages[1](x), **rest)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "offload": zerocore.Offload()},
        {"stage": 0, "offload": zerocore.Offload()},
        {"stage": 3, "mixed_precision": zerocore.MixedPrecision(torch.bfloat16)},
        {"stage": 2, "mixed_precision": zerocore.MixedPrecision(torch.bfloat16)},
        {"stage": 3, "communication": zerocore.Communication(regather=2)},
    ],
    ids=str,
)
def test_averaged_models(options: dict[str, Any]) -> None:
    run_ranks(averaged, 4 if "communication" in options else 2, options)


def pickled() -> None:
    import pickle

    model = zerocore.shard(Net())
    with pytest.raises(TypeError, match="this Net is sharded and cannot be pickled"):
        pickle.dumps(model)


def test_a_model_is_not_pickled() -> None:
    run_ranks(pickled, 1)
