"""``zerocore.unsharded`` as people use it: nested, in a forward, with exceptions, to save."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, adamw, assert_gradients, case_named


def save() -> None:
    for stage in range(4):
        case = case_named("plain")
        plain = case.seeded_build()
        model = zerocore.shard(case.seeded_build(), stage=stage)
        with zerocore.unsharded(model):
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            values = [param.clone() for param in model.parameters()]
            batch = case.seeded_batch(0, dist.get_rank(), 2)
            with torch.no_grad():
                same = torch.equal(case.loss(model.eval(), batch), case.loss(plain.eval(), batch))
            assert same
        file.seek(0)
        loaded = torch.load(file)
        assert all(type(value) is Tensor for value in loaded.values())
        case.seeded_build(seed=1).load_state_dict(loaded)
        for key, value in plain.state_dict().items():
            assert torch.equal(loaded[key], value), (stage, key)
        assert all(map(torch.equal, values, plain.parameters()))


def test_saving_full_parameters() -> None:
    run_ranks(save, 2)


def is_sharded(block: nn.Module) -> bool:
    return isinstance(block.get_parameter("linear.weight"), zerocore.ShardedParameter)


def nest() -> None:
    for stage in range(4):
        case = case_named("plain")
        model = zerocore.shard(case.seeded_build(), stage=stage)
        optimizer = adamw(model.parameters())
        block = model.get_submodule("blocks.1")
        before = zerocore.full_state_dict(model, rank0_only=False)
        with zerocore.unsharded(model), zerocore.unsharded(model):
            with zerocore.unsharded(block):
                assert not is_sharded(block)
            assert not is_sharded(block)
            with zerocore.unsharded(block, write_back=True), torch.no_grad():
                block.get_parameter("linear.weight").mul_(2)
        assert is_sharded(block) == (stage > 0)
        after = zerocore.full_state_dict(model, rank0_only=False)
        for key, value in before.items():
            assert torch.equal(after[key], value * (1 + (key == "blocks.1.linear.weight"))), key
        zerocore.load_full_state_dict(model, before)
        with zerocore.unsharded(model):  # a step inside, as far as there is no update
            accumulate(model, case, 0)
        assert_gradients(model, case, 0)
        optimizer.step()


def test_nested() -> None:
    run_ranks(nest, 2)


class Reading(nn.Module):
    """Reads a layer's weight in a forward, as a regulariser does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, sharded: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if sharded:
                with zerocore.unsharded(layer):
                    scale = layer.get_parameter("weight").detach().norm()
            else:
                scale = layer.get_parameter("weight").detach().norm()
            x = x / scale
        return x


def read_in_forward() -> None:
    for stage in range(4):
        torch.manual_seed(0)
        plain = Reading()
        torch.manual_seed(0)
        model = zerocore.shard(Reading(), stage=stage)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module(x, module is model).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for key, value in zerocore.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[key], msg=f"{stage} {key}")


def test_in_a_forward() -> None:
    run_ranks(read_in_forward, 2)


def raise_inside() -> None:
    for stage in (1, 2, 3):
        case = case_named("plain")
        model = zerocore.shard(case.seeded_build(), stage=stage)
        before = zerocore.full_state_dict(model, rank0_only=False)
        for write_back in (False, True):
            with (
                pytest.raises(KeyError, match="mine"),
                zerocore.unsharded(model, write_back=write_back),
            ):
                raise KeyError("mine")
        refused = pytest.raises(RuntimeError, match=r"'embed.weight' was changed")
        with refused, zerocore.unsharded(model), torch.no_grad():
            model.get_parameter("embed.weight").zero_()
        zerocore.load_full_state_dict(model, before)  # what was replicated has changed in place
        accumulate(model, case, 0)
        assert_gradients(model, case, 0)


def test_exceptions_inside() -> None:
    run_ranks(raise_inside, 2)
