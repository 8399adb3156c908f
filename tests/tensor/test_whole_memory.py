"""Parameters of stage 0 are saved and copied alone, as those of a plain model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

import zerocore


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64).requires_grad_(False),
        nn.Linear(4, 3).bfloat16(),
        nn.Linear(4, 3),
        nn.Linear(4, 3),
        nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
    )
    model[3].weight = model[2].weight
    return model


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    return make(), zerocore.shard(make(), stage=0, units=[nn.Sequential])


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(value: Any) -> Any:
    return torch.load(io.BytesIO(saved(value)))


def test_a_file_is_as_large_as_a_plain_models() -> None:
    plain, model = pair()
    for each in (lambda m: m.state_dict(), lambda m: m[1].state_dict(), lambda m: m[2].weight):
        assert abs(len(saved(each(model))) - len(saved(each(plain)))) < 300


def test_values_and_ties_are_loaded() -> None:
    plain, model = pair()
    for load in (loaded, lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy):
        found, right = load(model.state_dict()), plain.state_dict()
        for name, value in right.items():
            assert torch.equal(found[name], value)
            assert found[name].stride() == value.stride()
        found = load(right)
        is_shared = found["2.weight"].data_ptr() == found["3.weight"].data_ptr()
        found = load(model.state_dict())
        assert (found["2.weight"].data_ptr() == found["3.weight"].data_ptr()) == is_shared
        assert found["2.weight"].data_ptr() != model[2].weight.data_ptr()


def test_a_copy_has_its_own_memory() -> None:
    _, model = pair()
    model[2].weight.grad = torch.ones(3, 4)
    for value in (model[2].weight, model[2].weight.detach(), model[2].weight.data):
        copied = copy.deepcopy(value)
        assert copied.untyped_storage().nbytes() == 48
        assert copied.requires_grad == value.requires_grad
        assert type(copied) is type(value)
        with torch.no_grad():
            copied.zero_()
        assert value.detach().abs().sum() > 0


def test_a_later_file_has_later_values() -> None:
    _, model = pair()
    before = loaded(model.state_dict())
    with torch.no_grad():
        model[2].weight.add_(1)
    after = loaded(model.state_dict())
    assert torch.equal(after["2.weight"], before["2.weight"] + 1)


def test_other_tensors_are_saved_as_ever() -> None:
    _, model = pair()
    plain = torch.arange(6.0)
    first, second = loaded([plain[:2], plain[2:]])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del model
    assert torch.equal(copy.deepcopy(plain[1:]), plain[1:])
    assert isinstance(loaded(nn.Parameter(plain)), nn.Parameter)


def test_gradients_are_saved_alone() -> None:
    torch.manual_seed(0)
    model = zerocore.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), stage=0)
    model(torch.ones(1, 64)).sum().backward()
    grad: Tensor = model[1].bias.grad  # type: ignore[assignment]
    assert len(saved(grad)) < 2000
    assert torch.equal(loaded(grad), grad)
