"""Casts in nested containers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerocore
from zerocore.model.casting import cast_floats

BF16 = torch.bfloat16


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass
class Batch:
    tokens: Tensor
    mask: Tensor
    more: dict[str, Any]


def test_tensors_in_nested_containers_are_cast() -> None:
    floats, ints = torch.ones(2), torch.ones(2, dtype=torch.long)
    batch = Batch(ints, floats, {"a": [floats, (floats, None)], "b": "text"})
    value = (Pair(floats, 3), batch, OrderedDict(x=floats, y=ints))
    pair, cast, mapping = cast_floats(value, BF16)
    assert isinstance(pair, Pair) and pair.first.dtype == BF16 and pair.second == 3
    assert isinstance(cast, Batch) and cast.mask.dtype == BF16 and cast.tokens is ints
    assert cast.more["a"][0].dtype == cast.more["a"][1][0].dtype == BF16
    assert cast.more["b"] == "text" and cast.more["a"][1][1] is None
    assert type(mapping) is OrderedDict and mapping["x"].dtype == BF16 and mapping["y"] is ints
    # The arguments are as they were.
    assert batch.mask is floats and value[2]["x"] is floats


@dataclass(frozen=True)
class Scaled:
    """Computes fields from others when it is made."""

    values: Tensor
    factor: InitVar[float]
    twice: Tensor = field(init=False)

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "values", self.values * factor)
        object.__setattr__(self, "twice", self.values * 2)


def test_a_dataclass_is_not_made_anew() -> None:
    given = Scaled(torch.ones(2), 3.0)
    cast = cast_floats([given], BF16)[0]
    assert cast.values.tolist() == [3, 3] and cast.twice.tolist() == [6, 6]
    assert cast.values.dtype == cast.twice.dtype == BF16 and given.twice.dtype == torch.float32


def test_what_needs_no_cast_is_the_same_object() -> None:
    ints, narrow = torch.ones(2, dtype=torch.long), torch.ones(2, dtype=BF16)
    for value in (ints, narrow, (ints, [narrow]), {"a": narrow}, Batch(ints, narrow, {}), None, 3):
        assert cast_floats(value, BF16) is value


def test_outputs_of_hugging_face() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, dtype=BF16))
    cast = cast_floats(output, torch.float32)
    assert type(cast) is type(output)
    assert cast.logits.dtype == cast["logits"].dtype == torch.float32
    assert cast.loss is output.loss and cast.hidden_states is None


def test_gradients_flow_through_casts() -> None:
    model = zerocore.shard(
        nn.Linear(3, 2),
        mixed_precision=zerocore.MixedPrecision(BF16, output_dtype=torch.float32),
    )
    x = torch.ones(4, 3, requires_grad=True)
    output = model(x)
    assert output.dtype == torch.float32
    output.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32


def test_a_kept_module_in_a_narrow_model_with_wide_main_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    mixed = zerocore.MixedPrecision(main_dtype=torch.float32, keep_fp32=("1",))
    zerocore.shard(model, mixed_precision=mixed)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    output = model(torch.randn(2, 4).bfloat16())
    assert output.dtype == BF16 and seen == [BF16]
    output.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    first, kept, _ = (unit.regions[0] for unit in zerocore.describe(model).units)
    assert first.startswith("bfloat16 (main weights float32") and kept == "float32 trainable"
