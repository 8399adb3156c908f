"""owned: any torch optimizer, bit for bit as in one process; states at the owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.matrices.whole_matrices import (
    assert_equal,
    full_parameters,
    in_small_rounds,
    seeded_model,
    take_steps,
    train_sharded,
)

STAGES = (0, 1, 2, 3)
Make = Callable[[Any], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """Shampoo (arXiv:1802.09568) as its public implementations are: states of other shapes than
    the parameter, and a counter in the group."""

    def __init__(self, params: Any, lr: float = 0.1, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param, self.state[param])

    def _update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        update: Tensor = param.grad  # type: ignore[assignment]
        for dim, size in enumerate(update.shape):
            moved = update.movedim(dim, 0).reshape(size, -1)
            name = f"precondition_{dim}"
            if name not in state:
                state[name] = group["eps"] * torch.eye(size)
            state[name] += moved @ moved.T
            values, vectors = torch.linalg.eigh(state[name])
            root = vectors @ torch.diag(values ** (-1 / (2 * param.dim()))) @ vectors.T
            update = (root @ moved).reshape(update.movedim(dim, 0).shape).movedim(0, dim)
        param.sub_(update, alpha=group["lr"] / group["count"])


def matrices(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, param) for name, param in named if param.ndim == 2]


def groups(named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    listed = [param for _, param in named]
    return [{"params": listed[::2], "lr": 0.02}, {"params": listed[1::2]}]


# Class, its options, what it is given.
Kind = tuple[type[torch.optim.Optimizer], dict[str, Any], Any]
OPTIMIZERS: list[Kind] = [
    (torch.optim.Muon, {"lr": 0.02}, matrices),
    (torch.optim.Adafactor, {"lr": 0.02}, groups),
    (Shampoo, {"lr": 0.05}, groups),
]


def train_alone(kind: Kind, steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = seeded_model()
    cls, options, select = kind
    optimizer = cls(select(model.named_parameters()), **options)
    take_steps(model, optimizer, range(steps))
    return {name: p.detach() for name, p in model.named_parameters()}, optimizer.state_dict()


def make_owned(kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    cls, options, select = kind
    return zerocore.matrices.owned(cls, select(model.named_parameters()), **options)


@in_small_rounds
def train_all(stages: tuple[int, ...]) -> None:
    for kind in OPTIMIZERS:
        train_kind(kind, stages)


def train_kind(kind: Kind, stages: tuple[int, ...]) -> None:
    expected, states = train_alone(kind, 3)
    for stage in stages:
        print(kind[0].__name__, stage, flush=True)
        model, optimizer = train_sharded(partial(make_owned, kind), 3, stage=stage)
        assert_equal(full_parameters(model), expected)
        assert_same_states(optimizer.state_dict(), states)
        assert_each_is_owned_once(model, optimizer)


def assert_same_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    assert sorted(actual["state"]) == sorted(expected["state"])
    for number, state in expected["state"].items():
        torch.testing.assert_close(dict(actual["state"][number]), dict(state), rtol=0, atol=0)


def assert_each_is_owned_once(model: nn.Module, optimizer: Any) -> None:
    """Each parameter's state is on one rank; between steps no full parameter has memory."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(optimizer._whole))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert sorted(number for numbers in held for number in numbers) == list(range(len(params)))
    assert len(optimizer.inner.state) <= len(held[dist.get_rank()])
    for whole in optimizer.inner.state:
        assert whole.untyped_storage().nbytes() <= whole.element_size() and whole.grad is None


def test_steps_and_states_are_those_of_one_process(world_size: int) -> None:
    run_ranks(train_all, world_size, STAGES if world_size == 2 else (3,))


@in_small_rounds
def train_packaged() -> None:
    import pytorch_optimizer

    for cls, options in (
        (pytorch_optimizer.SOAP, {"lr": 0.02, "precondition_frequency": 1}),
        (pytorch_optimizer.Shampoo, {"lr": 0.02}),
    ):
        train_kind((cls, options, matrices), (0, 3))


def test_soap_and_shampoo_of_a_package() -> None:
    """As people have them: from `pip install pytorch_optimizer`."""
    pytest.importorskip("pytorch_optimizer")
    run_ranks(train_packaged, 2)
