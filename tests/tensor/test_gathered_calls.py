"""Functions that need all elements of gradients, states and shards: exact, and named in one
warning."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerocore
from tests.distributed.harness import RanksFailed, run_ranks
from tests.distributed.values import full_of
from zerocore.common.alarm import STALL_SECONDS
from zerocore.tensor import gathered_calls

STAGES = (0, 1, 2, 3)
CELLS = [(1, 2), (2, 3), (3, 1), (3, 4)]  # stage and number of ranks
Change = Callable[[Any], Any]


def seeded(format: Any = torch.channels_last) -> nn.Sequential:
    """A matrix whose rows lie on two ranks, vectors that one rank owns, and a convolution."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=format)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 7))


def batch(step: int = 0, rank: int = 0) -> Tensor:
    return torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(10 * step + rank))


def make(stage: int) -> tuple[Any, Any]:
    plain = seeded()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    for each in (plain, model):
        each(batch()).square().sum().backward()
    return model, plain


def assert_same(model: Any, plain: Any, name: str = "") -> None:
    def text(message: str) -> str:
        return f"{name}: {message}"

    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_of(one), other.detach(), rtol=1e-4, atol=1e-5, msg=text)
        if other.grad is not None:
            grad = full_of(one.grad)
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-5, msg=text)


def set_item(index: Any, value: Any = 0.5) -> Change:
    def change(t: Any) -> None:
        t[index] = value(t) if callable(value) else value

    return change


def keep_largest(t: Any) -> None:
    flat = t.abs().flatten()
    t.mul_(t.abs() >= flat.topk(3).values[-1])


def clip_rows(t: Any) -> None:
    norms = t.norm(dim=-1, keepdim=True)
    t.copy_(torch.where(norms > 0.1, t * (0.1 / norms), t))


CHANGES: dict[str, Change] = {
    "row": set_item(0),
    "element": set_item((0, 1)),
    "last": set_item((..., -1)),
    "slices": set_item((slice(1, 3), slice(None, None, 2))),
    "indices": set_item(torch.tensor([2, 0])),
    "mask": set_item(torch.tensor([True, False, True] + 4 * [False])),
    "mask of rows": lambda t: t.__setitem__(t.sum(-1) > 0, 0.0),
    "row of values": set_item(1, lambda t: torch.arange(float(t.size(-1)))),
    "row of itself": set_item(0, lambda t: t[1] * 2),
    "column of itself": set_item((slice(None), 0), lambda t: t[:, 1]),
    "row in place": lambda t: t[0].mul_(2),
    "rows of a loop": lambda t: [row.add_(i) for i, row in enumerate(t)],
    "view of a view": lambda t: t.view(-1)[3:9].view(2, 3)[1].zero_(),
    "transposed": lambda t: t.t().mul_(torch.arange(float(t.size(0)))),
    "diagonal": lambda t: t.diagonal().add_(1.0),
    "centred": lambda t: t.sub_(t.mean(1, keepdim=True)),
    "broadcast": lambda t: t.mul_(torch.arange(float(t.size(-1)))),
    "clipped by rows": clip_rows,
    "largest": keep_largest,
    "index_fill": lambda t: t.index_fill_(1, torch.tensor([0, 2]), 1.5),
    "scatter": lambda t: t.scatter_(1, torch.tensor([[1], [2]]), 3.0),
    "cumulative": lambda t: t.cumsum_(0),
    "lower": lambda t: t.tril_(),
    "out": lambda t: torch.mm(t.clone(), torch.eye(t.size(1)) * 2, out=t),
    "operator": lambda t: t.__iadd__(torch.ones(t.size(-1))),
    "script": lambda t: torch.jit.script(doubled)(t.detach()),
}


def doubled(x: Tensor) -> Tensor:
    return x[0].mul_(2.0)


def of_grad(param: Any) -> Any:
    return param.grad


KINDS: dict[str, Change] = {
    "parameter": lambda p: p,
    "detached": lambda p: p.detach(),
    "gradient": of_grad,
}


def change(stage: int, kind: str) -> None:
    for name, function in CHANGES.items():
        print(name, flush=True)  # shown if the rank fails
        model, plain = make(stage)
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for number in (2, 4):
                with torch.no_grad():
                    function(KINDS[kind](each[number].weight))
            optimizer.step()
        assert_same(model, plain, name)
        for each in (model, plain):
            each.zero_grad()
            each(batch(1)).square().mean().backward()
        assert_same(model, plain, name)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), CELLS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_changes(kind: str, stage: int, world_size: int) -> None:
    run_ranks(change, world_size, stage, kind)


class Shampoo(Optimizer):
    """Factors of each matrix, kept in the states, with a root every second step."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            grad, state = p.grad, self.state[p]
            if not state:
                state["step"] = 0
                state["momentum"] = torch.zeros_like(p)
                state["factors"] = [torch.eye(size) * 1e-3 for size in p.shape]
            state["step"] += 1
            for factor in state["factors"]:  # each turns the dimensions by one
                rows = grad.reshape(len(grad), -1)
                factor.add_(rows @ rows.t())
                grad = torch.tensordot(grad, root_of(factor), dims=[[0], [0]])
            state["momentum"].lerp_(grad, 0.5)
            p.add_(state["momentum"], alpha=-self.param_groups[0]["lr"])


def root_of(factor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    return vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.t()


class Signs(Optimizer):
    """By the gradients of all parameters, in one flat vector."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        flat = torch.cat([p.grad.flatten() for p in params])
        limit = flat.abs().median()
        for p in params:
            p.sub_(p.grad.clamp(-limit, limit).sign(), alpha=0.01)


def with_muon(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.05)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "LBFGS with a line search": lambda params: torch.optim.LBFGS(
        params, max_iter=4, line_search_fn="strong_wolfe"
    ),
    "Muon": with_muon,
    "Shampoo": Shampoo,
    "Signs": Signs,
}


def optimize(stage: int, offload: bool, name: str) -> None:
    make_optimizer, options = OPTIMIZERS[name], {"offload": zerocore.Offload()} if offload else {}
    # LBFGS of torch takes no gradients in another order.
    plain = seeded(torch.contiguous_format)
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, **options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for each in (plain, model):
        optimizer = make_optimizer(each.parameters())
        for step in range(3):

            def closure(each: Any = each, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                ranks = range(world_size) if each is plain else [rank]
                losses = [each(batch(step, r)).square().mean() for r in ranks]
                loss = torch.stack(losses).mean()
                loss.backward()
                total = loss.detach().clone()
                if each is model:
                    dist.all_reduce(total)
                    total /= world_size
                return total

            optimizer.step(closure) if name.startswith("LBFGS") else (closure(), optimizer.step())
    limit = 5e-3 if name == "Muon" else 1e-4  # Muon computes in bfloat16
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_of(one), other.detach(), rtol=1e-3, atol=limit)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("stage", "world_size", "offload"),
    [(0, 2, False), (1, 3, False), (2, 2, False), (3, 3, True), (3, 3, False)],
)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers(name: str, stage: int, world_size: int, offload: bool) -> None:
    run_ranks(optimize, world_size, stage, offload, name)


def average(stage: int) -> None:
    """Averaged gradients stay as they are, if a program averages them once more."""
    model, plain = seeded(), seeded()
    zerocore.shard(model, stage=stage)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model(batch(0, rank)).square().mean().backward()
    losses = [plain(batch(0, r)).square().mean() for r in range(world_size)]
    torch.stack(losses).mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    assert_same(model, plain)
    for param in model.parameters():
        dist.broadcast(param.grad, src=world_size - 1)
        dist.all_reduce(param.grad.data, dist.ReduceOp.MAX, async_op=True).wait()
    assert_same(model, plain)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world_size
    torch.testing.assert_close(flat, torch.cat([p.grad.flatten() for p in plain.parameters()]))


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), *CELLS])
def test_averages_of_gradients(stage: int, world_size: int) -> None:
    run_ranks(average, world_size, stage)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def warn(stage: int) -> list[str]:
    model, _ = make(stage)
    found = Lines()
    logging.getLogger("zerocore").addHandler(found)
    gathered_calls._told.clear()
    try:
        weight = model[2].weight
        for _ in range(2):
            weight.grad.histc(4)
            model[4].weight.grad.histc(4)
        weight.grad[0] = 1.0  # no communication
        weight.grad.mul_(2).norm()
        Shampoo([weight]).step()
    finally:
        logging.getLogger("zerocore").removeHandler(found)
    return found.lines


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_warning_for_each_function(stage: int) -> None:
    lines, others = run_ranks(warn, 2, stage)
    assert others == []
    assert len({line.partition("(")[0] for line in lines}) == len(lines)
    first, *rest = lines
    assert first.startswith("histc() of the gradient of '2.weight' (test_gathered_calls.py:")
    assert f"gather them at each call, here {4 * 12 * 7} bytes" in first
    assert "Shampoo" not in first
    assert rest and all("owned(Shampoo, params, ...)" in line for line in rest)


def sets_alone(stage: int) -> None:
    """One rank sets elements of its own part; the others do not call."""
    model, _ = make(stage)
    grad = model[2].weight.grad
    before = grad.full_tensor()
    with torch.no_grad():
        for number in range(12 * 7):
            if grad.shard_range[0] <= number < grad.shard_range[1]:
                grad[number // 12, number % 12] = number
    found = grad.full_tensor()
    assert not torch.equal(found, before)
    assert torch.equal(found.flatten(), torch.arange(84.0))


@pytest.mark.parametrize("stage", [1, 3])
def test_setting_elements_sends_nothing(stage: int) -> None:
    run_ranks(sets_alone, 2, stage)


def gathers_alone() -> None:
    os.environ[STALL_SECONDS] = "3"
    model, _ = make(2)
    if dist.get_rank() == 1:
        model[2].weight.grad.tolist()
    model(batch(0)).sum().backward()


def test_a_rank_that_gathers_alone_is_named_with_its_line() -> None:
    call = (
        r"rank 1 waits in tolist\(\) of the gradient of '2\.weight' \(test_gathered_calls\.py:\d+"
    )
    with pytest.raises(RanksFailed, match=call):
        run_ranks(gathers_alone, 2, fresh=True)
