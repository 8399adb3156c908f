"""Operators that change their arguments, whatever they are called, given shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import handle_torch_function, has_torch_function

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

STAGES = (0, 1, 2, 3)
NAME = "zerocore_test"


@contextmanager
def operators() -> Iterator[Any]:
    """Some that change their arguments, as libraries of kernels define them."""
    with torch.library._scoped_library(NAME, "DEF") as library:
        update = "(Tensor(a!) p, Tensor(b!) s, Tensor g, float lr) -> ()"
        for name, kernel in (("update", update_kernel), ("undeclared", update_kernel)):
            library.define(name + update)
            library.impl(name, kernel, "CPU")
        library.define("apply(Tensor x, float a) -> Tensor")
        library.define("apply.out(Tensor x, float a, *, Tensor(a!) out) -> Tensor(a!)")
        library.define("apply.stepped(Tensor(a!) x, int a, Tensor(b!) count) -> ()")
        library.impl("apply", lambda x, a: x * a, "CPU")
        library.impl("apply.out", lambda x, a, out: out.copy_(x * a), "CPU")
        library.impl("apply.stepped", lambda x, a, count: (x.add_(count.add_(a)), None)[1], "CPU")
        library.define("lists(Tensor(a!)[] ps, Tensor[] gs) -> ()")
        library.impl("lists", lambda ps, gs: torch._foreach_sub_(ps, gs) and None, "CPU")
        yield torch.ops.zerocore_test


def update_kernel(p: Tensor, s: Tensor, g: Tensor, lr: float) -> None:
    """Changes memory, as a kernel does, and counts no version."""
    for tensor in (p, s, g):
        assert tensor.numel() > 0  # many kernels cannot be launched for none
    state, param = s.numpy(), p.detach().numpy()
    state *= 0.9
    state += g.numpy()
    param -= lr * state


class Momentum(Optimizer):
    """By an operator, as optimizers of libraries are."""

    def __init__(self, params: Iterable[nn.Parameter], operator: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.operator = operator

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            self.operator(param, state["momentum"], param.grad, self.param_groups[0]["lr"])


def seeded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 1))


def train(model: Any, optimizer: Any, num_steps: int = 4) -> list[float]:
    x = torch.linspace(-1, 1, 36).view(4, 9)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(model: Any) -> dict[str, Tensor]:
    return zerocore.full_state_dict(model, rank0_only=False)


def train_by_operators(stages: tuple[int, ...]) -> None:
    with operators() as ops:
        zerocore.register_elementwise(ops.update)
        for operator in (ops.update, ops.update.default):
            plain = seeded()
            expected = train(plain, Momentum(plain.parameters(), operator))
            for stage in stages:
                model = zerocore.shard(seeded(), stage=stage)
                losses = train(model, Momentum(model.parameters(), operator))
                assert losses == pytest.approx(expected, rel=1e-5), stage
                torch.testing.assert_close(full(model), dict(plain.state_dict()))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_registered_operators_train_as_plain(world_size: int) -> None:
    run_ranks(train_by_operators, world_size, STAGES)


def handled(p: Tensor, s: Tensor) -> Tensor:
    """A function of a library that has no operator."""
    if has_torch_function((p, s)):
        return handle_torch_function(handled, (p, s), p, s)
    p.mul_(2)
    return p


def add(p: Tensor) -> Tensor:
    """Has the name of a function of torch, and another meaning."""
    return handle_torch_function(add, (p,), p) if has_torch_function((p,)) else p.flip(0)


def call_by_hand(stages: tuple[int, ...]) -> None:
    """Outside of an optimizer what is changed counts in the next forward."""
    with operators() as ops:
        zerocore.register_elementwise(f"{NAME}::apply")
        zerocore.register_elementwise(f"{NAME}::lists")
        zerocore.register_elementwise(ops.update)
        zerocore.register_elementwise(custom_scale)
        x = torch.ones(2, 9)
        changes: list[Callable[[Any], Any]] = [
            lambda m: ops.apply(m[0].weight, 3.0, out=m[0].weight),
            lambda m: ops.apply.out(m[0].weight, 3.0, out=m[0].weight),
            lambda m: torch.mul(m[0].weight, 3.0, out=m[0].weight),
            lambda m: m[0].weight.copy_(ops.apply(m[0].weight.detach(), 3.0)),
            lambda m: ops.update(m[0].weight, m[0].weight.detach().clone(), m[0].weight.clone(), 1),
            lambda m: ops.lists([*m.parameters()], [p.detach() * 0.5 for p in m.parameters()]),
            lambda m: custom_scale(m[0].weight, 3.0),
        ]
        for number, change in enumerate(changes):
            plain = seeded()
            with torch.no_grad():
                change(plain)
                expected = plain(x)
            for stage in stages:
                model = zerocore.shard(seeded(), stage=stage)
                with torch.no_grad():
                    model(x)
                    change(model)
                    torch.testing.assert_close(model(x), expected, msg=f"{number}, stage {stage}")


@torch.library.custom_op("zerocore_test_custom::scale", mutates_args=("x",))
def custom_scale(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("zerocore_test_custom::rows", mutates_args=("x",))
def custom_rows(x: Tensor) -> None:
    x.sub_(x.mean(-1, keepdim=True))


def custom_call(p: Any) -> None:
    custom_rows(p)
    custom_rows(p.grad)


def local_states(stage: int) -> None:
    """A state of this rank's elements beside a full parameter would be written out of bounds."""
    with operators() as ops:
        zerocore.register_elementwise(ops.update)
        weight: Any = zerocore.shard(seeded(), stage=stage)[0].weight
        for state in (torch.zeros_like(weight.local()), torch.zeros(len(weight.local()), 1)):
            for call in (ops.update, ops.undeclared):
                with torch.no_grad(), pytest.raises(TypeError, match=r"'0\.weight'.*zeros_like"):
                    call(weight, state, weight.detach(), 1.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_local_size_are_refused(stage: int) -> None:
    run_ranks(local_states, 2, stage)


def gather(stages: tuple[int, ...]) -> None:
    """Operators that are not declared, or whose arguments do not fit, get full values."""
    with operators() as ops:
        zerocore.register_elementwise(f"{NAME}::apply")
        zerocore.register_elementwise(ops.update)
        calls: list[Callable[[Any], Any]] = [
            lambda p: ops.undeclared(p, p.detach().clone(), p.detach() * 2, 0.5),
            lambda p: ops.undeclared.default(p, p.grad, p.detach() * 2, 0.5),
            lambda p: ops.undeclared(torch.zeros(33, 9), p.detach(), p.grad, 1.0),
            lambda p: ops.update(p, torch.zeros(33, 9), p.grad, 1.0),
            lambda p: ops.apply(p.detach(), 1, torch.ones(())),
            lambda p: ops.lists([p, p.grad], [p.grad.clone(), p.detach() * 1]),
            custom_call,
            lambda p: torch.mm(p.t(), p.grad, out=torch.zeros(9, 9)),
            lambda p: torch.mm(p.detach().clone(), torch.ones(9, 9), out=p),
            lambda p: torch.ops.aten.mm.out(p.grad, torch.ones(9, 9), out=p.detach()),
            lambda p: handled(p.grad, p.grad),
            lambda p: handled(p.detach(), p.grad),
            lambda p: p.grad.numpy().sum(),
            lambda p: add(p),
        ]
        x = torch.ones(2, 9)
        for number, call in enumerate(calls):
            plain = seeded()
            plain(x).square().sum().backward()
            with torch.no_grad():
                result = call(plain[0].weight)
            for stage in stages:
                print(number, stage, flush=True)
                model = zerocore.shard(seeded(), stage=stage)
                model(x).square().sum().backward()
                weight = model[0].weight
                with torch.no_grad():
                    found = call(weight)
                    if isinstance(result, Tensor):
                        torch.testing.assert_close(full_of(found), result.detach())
                    torch.testing.assert_close(full_of(weight.grad), plain[0].weight.grad)
                    torch.testing.assert_close(full(model), dict(plain.state_dict()))
                    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("world_size", [2, 3])
def test_others_get_full_values(world_size: int) -> None:
    run_ranks(gather, world_size, STAGES)


def gather_in_steps(stages: tuple[int, ...]) -> None:
    with operators() as ops:
        plain = seeded()
        expected = train(plain, Momentum(plain.parameters(), ops.undeclared))
        for stage in stages:
            model = zerocore.shard(seeded(), stage=stage)
            losses = train(model, Momentum(model.parameters(), ops.undeclared))
            assert losses == pytest.approx(expected, rel=1e-5), stage
            torch.testing.assert_close(full(model), dict(plain.state_dict()))


def test_steps_of_undeclared_operators() -> None:
    run_ranks(gather_in_steps, 2, STAGES)


def refuse(stages: tuple[int, ...]) -> None:
    for stage in stages:
        model = zerocore.shard(seeded(), stage=stage)
        weight, before = model[0].weight, full(model)
        calls: list[tuple[Callable[[Any], Any], str]] = [
            (lambda p: torch._foreach_add([p], 1.0, out=[p]), "out"),
            (lambda p: p.data_ptr(), "data_ptr.*'0.weight'"),
            (lambda p: p.__dlpack__(), "__dlpack__.*'0.weight'"),
        ]
        for call, message in calls:
            with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=message):
                call(weight)
        torch.testing.assert_close(full(model), before, rtol=0, atol=0)
        with torch.no_grad(), pytest.raises(TypeError, match=r"handled.*changed.*'0\.weight'"):
            handled(weight, weight)


def test_others_are_refused_by_name() -> None:
    run_ranks(refuse, 2, STAGES[1:])  # at stage 0 a rank has all elements


def test_registered_operators_by_hand() -> None:
    run_ranks(call_by_hand, 3, STAGES)


def test_what_is_no_operator_is_refused() -> None:
    for value in (3, "update", None):
        with pytest.raises(TypeError, match="register_elementwise"):
            zerocore.register_elementwise(value)  # type: ignore[arg-type]


def read_as_array(stages: tuple[int, ...]) -> None:
    """An array of a parameter keeps its values when the full value's memory is used again."""
    for stage in stages:
        model = zerocore.shard(seeded().requires_grad_(False), stage=stage)
        expected = full(model)["0.weight"]
        array = model[0].weight.numpy()
        for _ in range(3):
            model(torch.ones(2, 9))
        assert torch.equal(torch.from_numpy(array), expected), stage
        array += 1  # at stage 0 it is the parameter's own memory, as of a plain tensor
        torch.testing.assert_close(full(model)["0.weight"], expected + (stage == 0))


def test_arrays() -> None:
    run_ranks(read_as_array, 2, STAGES)


def train_fused(stages: tuple[int, ...]) -> None:
    """torch._fused_adamw_ by hand, given what torch.optim gives it."""

    def step(model: Any, states: list[Any]) -> None:
        grads = [p.grad for p in model.parameters()]
        params = list(model.parameters())
        if not states:
            zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
            states += [*zeros, [], [torch.zeros(()) for _ in params]]
        torch._foreach_add_(states[3], 1)
        torch._fused_adamw_(
            params, grads, *states, amsgrad=False, lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.1, eps=1e-5, maximize=False,
        )  # fmt: skip

    class ByHand:
        def __init__(self, model: Any) -> None:
            self.model, self.states = model, []  # type: ignore[var-annotated]

        def zero_grad(self) -> None:
            self.model.zero_grad()

        def step(self) -> None:
            with torch.no_grad():
                step(self.model, self.states)

    plain = seeded()
    expected = train(plain, ByHand(plain))
    for stage in stages:
        model = zerocore.shard(seeded(), stage=stage)
        assert train(model, ByHand(model)) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(full(model), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def test_fused_steps_by_hand() -> None:
    run_ranks(train_fused, 2, STAGES)


@pytest.mark.parametrize("name", ["_c10d_functional::all_reduce", "c10d::allreduce_"])
def test_a_collective_is_not_elementwise(name: str) -> None:
    with pytest.raises(ValueError, match=r"is a collective.*dist.all_reduce\(parameter.data\)"):
        zerocore.register_elementwise(name)
