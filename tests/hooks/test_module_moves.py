"""Moves and casts of a sharded model: what changes nothing costs nothing, the rest is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, adamw, case_named
from tests.distributed.values import own_of

Move = Callable[[Any], Any]

SAME: dict[str, Move] = {
    "to index": lambda model: model.to("cpu:0"),
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "copy": lambda model: model._apply(lambda tensor: tensor.clone()),
    "share_memory": lambda model: model.share_memory(),
    "inner": lambda model: model.blocks[0].linear.to("cpu:0"),
    "inner copy": lambda model: model.blocks[0].linear._apply(lambda tensor: tensor.clone()),
    "container": lambda model: model.blocks.to_empty(device="cpu"),
    "wrapped": lambda model: nn.ModuleList([model]).to_empty(device="cpu"),
    "replacing": lambda model: with_flag("overwrite_module_params", model),
    "swapping": lambda model: with_flag("swap_module_params", model),
}


def with_flag(name: str, model: nn.Module) -> None:
    """torch's other two ways to give a module new memory."""
    switch = getattr(torch.__future__, f"set_{name}_on_conversion")
    switch(True)
    try:
        model._apply(lambda tensor: tensor.clone())
    finally:
        switch(False)


def address_of(param: Any) -> int:
    address: int = own_of(param).data_ptr()
    return address


def train(stage: int, move: Move) -> dict[str, Tensor]:
    case = case_named("plain")
    model = case.seeded_build()
    model.register_buffer("seen", torch.arange(3.0))
    zerocore.shard(model, stage=stage)
    optimizer = adamw(model.parameters())
    places = [(param, address_of(param)) for param in model.parameters()]
    for step in range(3):
        move(model)
        same = zip(places, model.parameters(), strict=True)
        assert all(now is param and address_of(now) == at for (param, at), now in same)
        accumulate(model, case, step)
        move(model)
        optimizer.step()
        with zerocore.unsharded(model):
            move(model)
        optimizer.zero_grad()
    return zerocore.full_state_dict(model, rank0_only=False)


def move_and_train(stages: tuple[int, ...]) -> None:
    for stage in stages:
        expected = train(stage, lambda model: None)
        for name, move in SAME.items():
            state = train(stage, move)
            for key, value in expected.items():
                assert torch.equal(value, state[key]), (stage, name, key)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [*by_night(((0, 1),)), (2, 3)])
def test_moves_that_change_nothing(stages: tuple[int, ...]) -> None:
    run_ranks(move_and_train, 2, stages, timeout=120.0)


def change_values() -> None:
    for stage in range(4):
        case = case_named("plain")
        model = zerocore.shard(case.seeded_build(), stage=stage)
        before = zerocore.full_state_dict(model, rank0_only=False)
        accumulate(model, case, 0)  # at stages 1 and 2 a forward gathers only what has changed
        model.zero_grad()
        weight = model.get_parameter("blocks.0.linear.weight")
        version = weight._version
        model.blocks[0].linear._apply(lambda tensor: tensor * 2)  # type: ignore[index]
        model.head._apply(lambda tensor: tensor.mul_(2))
        assert weight._version > version
        assert model.get_parameter("blocks.0.linear.weight") is weight
        changed = ("blocks.0.linear", "head")
        expected = {k: v * 2 if k.startswith(changed) else v for k, v in before.items()}
        after = zerocore.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(value, after[key]) for key, value in expected.items())
        plain = case.seeded_build()
        plain.load_state_dict(expected)
        batch = case.seeded_batch(0, dist.get_rank(), 2)
        torch.testing.assert_close(case.loss(model, batch), case.loss(plain, batch))


def test_moves_that_change_values() -> None:
    run_ranks(change_values, 2)


def change_main_weights() -> None:
    mixed = zerocore.MixedPrecision(param_dtype=torch.bfloat16)
    for stage in range(4):
        model = zerocore.shard(
            nn.Sequential(nn.Linear(4, 4, bias=False)), stage=stage, mixed_precision=mixed
        )
        x = torch.ones(1, 4)
        before = model(x).detach().clone()
        model.to("cpu:0").float()._apply(lambda tensor: tensor * 2)
        assert torch.equal(model(x), before * 2)
        with pytest.raises(TypeError, match=r"parameter '0\.weight'"):
            model.bfloat16()


def test_moves_under_mixed_precision() -> None:
    run_ranks(change_main_weights, 2)


REFUSED: dict[str, Move] = {
    "half": lambda model: model.half(),
    "double inner": lambda model: model.blocks[0].linear.double(),
    "meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "wrapped": lambda model: nn.ModuleList([nn.BatchNorm1d(2), model]).bfloat16(),
    "shape": lambda model: model._apply(lambda tensor: tensor[None]),
}


def refuse() -> None:
    expected = train(3, lambda model: None)
    for name, move in REFUSED.items():

        def refused(model: nn.Module, name: str = name, move: Move = move) -> None:
            with pytest.raises(TypeError, match=r"parameter '[\w.]+'.*before zerocore.shard"):
                move(model)
            assert all(buffer.dtype == torch.float32 for buffer in model.buffers()), name

        state = train(3, refused)
        assert all(torch.equal(value, state[key]) for key, value in expected.items()), name


def test_moves_that_are_refused() -> None:
    run_ranks(refuse, 2)


class Titan(nn.Module):
    """Initialises itself, as the models of torchtitan do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(3)})
        self.scale = nn.Parameter(torch.empty(4))

    def init_weights(self) -> None:
        for layer in self.layers.values():
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x * self.scale


def init_late() -> None:
    for stage in range(4):
        with torch.device("meta"):
            model = Titan()
        with pytest.raises(ValueError, match=r"'scale' is on the meta device(?s:.*)init_fn"):
            zerocore.shard(model, stage=stage)
        with torch.device("meta"):
            model = Titan()
        zerocore.shard(model, stage=stage, init_fn=lambda module: None)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with zerocore.unsharded(model, write_back=True):
            model.init_weights()
        torch.manual_seed(0)
        plain = Titan()
        torch.manual_seed(0)
        plain.init_weights()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for key, value in zerocore.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[key])


def test_meta_then_to_empty_then_init_weights() -> None:
    run_ranks(init_late, 2)


class Twice(nn.Module):
    """Runs slices of a Sequential, as models do that stop early."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.extra = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[2:](torch.tanh(self.blocks[:2](x)))
        for layer in self.extra[1:]:
            x = layer(x)
        return x


def build_from_type() -> None:
    for stage in range(4):
        torch.manual_seed(0)
        plain = Twice()
        torch.manual_seed(0)
        model = zerocore.shard(Twice(), stage=stage)
        made = type(model)(6)  # type: ignore[call-arg]
        assert type(made) is Twice
        assert made(torch.ones(1, 6)).shape == (1, 6)
        assert type(model.blocks[:2]) is nn.Sequential
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module.blocks[:1](module(x)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for key, value in zerocore.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[key])


def test_type_of_a_sharded_model_and_slices() -> None:
    run_ranks(build_from_type, 2)
