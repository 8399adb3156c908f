"""torch.tensor(p), scripts and the like ignore tensor subclasses: shards become full, or a few
raise."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks

Function = Callable[..., Any]


def penalty(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def grow(x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x.sum()


def shares(plain: Tensor, shard: Any) -> Tensor:
    plain.data = shard
    return plain


class Own(Tensor):
    """A class of the program."""


def kept(tensor: Tensor, kind: type) -> Tensor:
    assert type(tensor) is kind
    return tensor.detach().as_subclass(Tensor)


CONVERSIONS: dict[str, Function] = {
    "script": lambda t: torch.jit.script(penalty)(t),
    "trace": lambda t: torch.jit.trace(penalty, torch.ones(3, 4))(t),
    "script_list": lambda t: torch.jit.script(first_of)([t, t]),
    "tensor": lambda t: torch.tensor(t),
    "Tensor": lambda t: torch.Tensor(t),
    "as_tensor": lambda t: torch.as_tensor(t),
    "as_tensor_double": lambda t: torch.as_tensor(t, dtype=torch.float64),
    "asarray_double": lambda t: torch.asarray(t, dtype=torch.float64),
    "asarray_copy": lambda t: torch.asarray(t, copy=True),
    "new_tensor": lambda t: t.new_tensor(t),
    "plain_new_tensor": lambda t: torch.ones(1).new_tensor(t),
    "plain_new": lambda t: torch.ones(1).new(t),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "plain_data": lambda t: shares(torch.zeros(t.shape), t),
    "plain_set_": lambda t: torch.zeros(t.shape).set_(t),
    "as_subclass": lambda t: t.as_subclass(Tensor),
    "as_subclass_own": lambda t: kept(t.as_subclass(Own), Own),
    "make_subclass": lambda t: torch.Tensor._make_subclass(Tensor, t),
    "make_subclass_own": lambda t: kept(torch.Tensor._make_subclass(Own, t), Own),
    "FloatTensor": lambda t: torch.FloatTensor(t),
    "DoubleTensor": lambda t: torch.DoubleTensor(t),
    "default_type": lambda t: torch.Tensor.__new__(torch.Tensor, t),
    "buffer": lambda t: nn.Buffer(t).as_subclass(Tensor),
    "list_tensor": lambda t: torch.tensor([t.flatten()[0], t.flatten()[-1]]),
    "variable": lambda t: torch.autograd.Variable(t),
    "numpy": lambda t: torch.as_tensor(np.array(t.detach().numpy())),
    "array": lambda t: torch.as_tensor(np.array(t)),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "vmap": lambda t: torch.vmap(penalty)(t),
    "func_grad": lambda t: torch.func.grad(lambda x: penalty(x).sum())(t),
    "func_vjp": lambda t: torch.func.vjp(penalty, t)[0],
    "functionalize": lambda t: torch.func.functionalize(penalty)(t),
    "vander": lambda t: torch.vander(t[0]),
    "normal": lambda t: torch.normal(t, 0.0),
    "as_strided": lambda t: torch.as_strided(t, (2, 2), (1, 1)),
    "fill": lambda t: torch.fill(t, 2.0),
    "nested": lambda t: torch.nested.nested_tensor([t])[0],
}


CLASSES = {"make_subclass", "make_subclass_own", "as_subclass", "as_subclass_own"}
REFUSED = CLASSES | {
    *("plain_set_", "to_dlpack", "from_dlpack", "buffer"),
    *("vmap", "func_grad", "func_vjp", "functionalize"),
}


def first_of(tensors: list[Tensor]) -> Tensor:
    return tensors[0] * 2 + tensors[1]


def make(stage: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 50))
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    for each in (plain, model):
        each(torch.ones(2, 4)).square().sum().backward()
    return model, plain


def whole(value: Any) -> Any:
    return value.full_tensor() if zerocore.is_sharded(value) else value


def convert(stage: int) -> list[str]:
    """Returns the conversions that raised."""
    model, plain = make(stage)
    refused = []
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        kinds = {"p": (param, other), "detached": (param.detach(), other.detach())}
        kinds["grad"] = (param.grad, other.grad)
        for kind, (shard, full) in kinds.items():
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    for name, function in CONVERSIONS.items():
                        refused += compare(f"{name} of {kind}", function, shard, full)
    assert torch.equal(whole(param.detach()), other.detach())
    return sorted(set(refused))


def compare(name: str, function: Function, shard: Any, full: Any) -> list[str]:
    try:
        expected = function(full)
    except (RuntimeError, TypeError, ValueError, BufferError):
        return []  # of a tensor of another number of dimensions
    try:
        found = whole(function(shard))
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        assert not isinstance(error, zerocore.optim.NonFiniteGradError)
        return [name]
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}")
    return []


@pytest.mark.parametrize("world_size", [2, 4])
def test_conversions(stage: int, world_size: int) -> None:
    names = run_ranks(convert, world_size, stage)
    assert all(each == names[0] for each in names)
    assert {name.partition(" of ")[0] for name in names[0]} <= REFUSED
    for name in CLASSES:
        assert f"{name} of p" not in names[0]
        assert (f"{name} of detached" in names[0]) == (f"{name} of grad" in names[0]) == (stage > 0)


def scripts_that_change(stage: int) -> None:
    model, plain = make(stage)
    script, x = torch.jit.script(grow), torch.ones(2, 4)
    with torch.no_grad():
        for part in (lambda m: m[0].weight.detach(), lambda m: m[1].weight.grad):
            torch.testing.assert_close(script(part(model)), script(part(plain)))
            torch.testing.assert_close(whole(part(model)), part(plain))
        torch.testing.assert_close(model(x), plain(x))
        if stage > 0:
            with pytest.raises(TypeError, match=r"a full copy of parameter '0.weight'"):
                script(model[0].weight)  # type: ignore[index]


def test_scripts_that_change_a_shard(stage: int) -> None:
    run_ranks(scripts_that_change, 2, stage)


def scalars() -> None:
    """Lists of tensors of one element, of which one rank has each."""
    torch.manual_seed(0)
    plain: Any = nn.ParameterList([torch.randn(()), torch.randn(1), torch.randn(())])
    model: Any = zerocore.shard(copy.deepcopy(plain), stage=3, sync_params=False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for function in (torch.tensor, torch.as_tensor, torch.FloatTensor, torch.Tensor):
                found = function([model[0], model[2], 2.0])
                torch.testing.assert_close(found, function([plain[0], plain[2], 2.0]))
            torch.testing.assert_close(torch.tensor([model[1]]), torch.tensor([plain[1]]))


def test_lists_of_scalars() -> None:
    run_ranks(scalars, 2)


def subclass_with_gradient() -> None:
    model, plain = make(3)
    for each in (model, plain):
        weight: Any = each[0].weight  # type: ignore[index]
        each.zero_grad()
        made = torch.Tensor._make_subclass(Own, weight, True)
        assert type(made) is Own and made.is_leaf and made.requires_grad
        (weight.as_subclass(Own) * torch.ones(1)).sum().backward()
        if each is plain:
            torch.testing.assert_close(whole(model[0].weight.grad), weight.grad)  # type: ignore[index]
    with pytest.raises(TypeError, match=r"_make_subclass\(\) of the gradient of '0.weight' would"):
        torch.Tensor._make_subclass(Own, model[0].weight.grad)  # type: ignore[index]


def test_subclasses_of_a_parameter() -> None:
    run_ranks(subclass_with_gradient, 2)


def test_conversions_of_plain_tensors_are_as_before() -> None:
    run_ranks(plain_tensors, 1)


def plain_tensors() -> None:
    make(3)
    assert torch.equal(torch.tensor([1, 2]), torch.as_tensor([1, 2]))
    assert torch.Tensor(2, 3).shape == (2, 3) and torch.Tensor([1.0]).item() == 1.0
    assert nn.Parameter(torch.ones(2)).data.sum() == 2
    tensor = torch.zeros(2)
    tensor.data = torch.ones(2)
    assert tensor.sum() == 2 and tensor.new([3.0]).item() == 3.0
    assert torch.FloatTensor(torch.ones(2)).sum() == 2 and torch.FloatTensor([1.0]).item() == 1.0
    assert torch.FloatTensor(torch.nn.Parameter(torch.ones(2))).sum() == 2
    with pytest.raises(TypeError, match="expected TensorOptions"):
        torch.DoubleTensor(torch.nn.Parameter(torch.ones(2)))
    assert inspect.isclass(torch.Tensor) and isinstance(torch.FloatTensor(2), Tensor)
    compiled = torch.compile(lambda x: x + torch.tensor([1.0, 2.0]), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.tensor([2.0, 3.0]))
