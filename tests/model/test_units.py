"""shard() works in place and finds units; describe() shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, case_named
from tests.zoo import CASES
from tests.zoo_awkward import Net, TiedTokens
from tests.zoo_blocks import Block, OuterBlock


def shard_in_place(stage: int) -> None:
    for case in CASES.values():
        print(case.name, flush=True)
        if case.name.startswith("hf_"):
            continue
        plain, model = case.seeded_build(), case.seeded_build()
        modules = {name: (module, type(module)) for name, module in model.named_modules()}
        units = list(case.units) if case.units else None
        assert zerocore.shard(model, stage=stage, units=units) is model
        assert repr(model).splitlines()[0] == repr(plain).splitlines()[0]
        if case.name != "containers":  # which print the shapes of what they hold
            assert repr(model) == repr(plain)
        for name, (module, cls) in modules.items():
            assert model.get_submodule(name) is module and isinstance(module, cls)
            assert type(module).__name__ == cls.__name__
            assert type(module).__module__ == cls.__module__
        for kind in ("named_parameters", "named_buffers"):
            names = [name for name, _ in getattr(model, kind)()]
            assert names == [name for name, _ in getattr(plain, kind)()]
        assert list(model.state_dict()) == list(plain.state_dict())
        for name, parameter in plain.named_parameters():
            assert model.get_parameter(name).requires_grad == parameter.requires_grad


def test_in_place(stage: int) -> None:
    run_ranks(shard_in_place, 2, stage)


def unit_names(build: Any, units: Any = None) -> list[str]:
    return [unit.name for unit in zerocore.describe(zerocore.shard(build(), units=units)).units]


def find_units() -> None:
    blocks = {f"blocks.{index}" for index in range(3)}
    by_list = unit_names(Net)
    assert blocks < set(by_list) and len(by_list) > 4, "embedding and head are units of their own"
    model = Net()
    choices: list[list[Any]] = [[Block], ["Block"], sorted(blocks), list(model.blocks)]
    for units in choices[:3]:
        assert unit_names(Net, units) == by_list
    assert unit_names(lambda: model, choices[3]) == by_list
    inner = {f"blocks.{outer}.inner.{index}" for outer in range(3) for index in range(2)}
    nested = set(unit_names(lambda: Net(OuterBlock), ["OuterBlock", "Block"]))
    assert blocks | inner < nested
    assert sum("embed" in name and "head" in name for name in unit_names(TiedTokens)) == 1
    assert unit_names(lambda: nn.Linear(3, 3))
    for case in CASES.values():
        print(case.name, flush=True)
        if not case.name.startswith("hf_"):
            continue
        model = case.seeded_build()
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        repeated = {n for n, m in model.named_modules() if any(m in inner for inner in lists)}
        found = set(unit_names(lambda model=model: model))
        outermost = {n for n in repeated if not any(n.startswith(f"{o}.") for o in repeated)}
        assert outermost <= found, case.name


def test_repeated_blocks_are_found() -> None:
    pytest.importorskip("transformers")
    run_ranks(find_units, 1)


def describe_model(stage: int) -> None:
    for name in ("mixed_dtypes", "frozen", "tied", "scalars"):
        case = case_named(name)
        plain = case.seeded_build()
        description = zerocore.describe(zerocore.shard(case.seeded_build(), stage=stage))
        parameters = list(plain.parameters())
        assert sum(unit.num_params for unit in description.units) == len(parameters)
        nbytes = sum(parameter.nbytes for parameter in parameters)
        assert sum(unit.param_nbytes for unit in description.units) == nbytes
        assert description.stage == stage
        printed = str(description)
        for unit in description.units:
            assert unit.name in printed and unit.padding_nbytes >= 0
            assert all(region in printed for region in unit.regions)
        if name == "mixed_dtypes":
            assert "float64" in printed and "float32" in printed
        if name == "frozen":
            assert "frozen" in printed


def test_describe(stage: int) -> None:
    run_ranks(describe_model, 3, stage)


def measure_memory(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        accumulate(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
    measured = zerocore.memory_usage(model, optimizer)
    predicted = zerocore.planning.predict_memory(model, optimizer_states=2)
    assert measured == predicted


def test_measured_memory_is_what_was_predicted(stage: int, world_size: int) -> None:
    run_ranks(measure_memory, world_size, stage)


class HandsOn(nn.Module):
    """Returns what it was given beside what it computed, as T5 does with its position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + bias, bias


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(HandsOn() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def count_gathers() -> dict[str, int]:
    model = zerocore.shard(Handing(), stage=3, units=[HandsOn])
    for _ in range(2):
        with zerocore.reporting.record_events(model) as events:
            model(torch.ones(2, 4)).sum().backward()
        for param in model.parameters():
            param.grad = None
    return Counter(event.unit for event in events if event.op == "all_gather")


def test_a_tensor_that_is_handed_on_gathers_nothing_again() -> None:
    expected = {"bias": 2, **{f"blocks.{i}": 2 for i in range(3)}, "blocks.3": 1}
    assert run_ranks(count_gathers, 2) == [expected] * 2


def choose_layers(stage: int) -> None:
    case = case_named("hf_llama")
    layers = [f"model.layers.{index}" for index in range(3)]
    for units in (["LlamaDecoderLayer"], layers):
        model = zerocore.shard(case.seeded_build(), stage=stage, units=units)
        assert set(layers) < {unit.name for unit in zerocore.describe(model).units}
        accumulate(model, case, 0)
        assert_gradients(model, case, 0)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(case.seeded_build(), config)
    zerocore.shard(adapted, stage=stage, units=["LlamaDecoderLayer"])
    names = {unit.name for unit in zerocore.describe(adapted).units}
    assert {f"base_model.model.{layer}" for layer in layers} < names


def test_chosen_layers_of_an_inner_module_without_parameters(stage: int) -> None:
    run_ranks(choose_layers, 2, stage)
