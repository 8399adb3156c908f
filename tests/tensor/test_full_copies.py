"""Copies in place of views: they write to their shard, and follow its changes, as views do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.tensor.test_gathered_calls import CELLS, KINDS, assert_same, batch, make, seeded
from zerocore.tensor.implicit_unshard import FullCopy

View = Callable[[Any], Any]

VIEWS: dict[str, View] = {
    "row": lambda t: t[0],
    "data": lambda t: t.data[1],
    "element": lambda t: t[0, 1],
    "column": lambda t: t[:, 2],
    "slices": lambda t: t[1:3, ::2],
    "flat": lambda t: t.view(-1),
    "transposed": lambda t: t.t(),
    "of a view": lambda t: t.view(-1)[3:9].view(2, 3),
    "of a transposed view": lambda t: t.t()[1:3].t()[0],
    "chunk": lambda t: t.chunk(2)[1],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "new dimension": lambda t: t[None],
    "strided": lambda t: t.as_strided((2, 2), (3, 1), 1),
}
WRITES: dict[str, View] = {
    "fill": lambda v: v.fill_(0.5),
    "clamp": lambda v: v.clamp_(-0.01, 0.01),
    "operator": lambda v: v.__imul__(3.0),
    "items": lambda v: v.__setitem__(..., 2.0),
    "mask": lambda v: v.masked_fill_(v > 0, 0.25),
    "mask of items": lambda v: v.__setitem__(v > 0, 0.75),
    "itself": lambda v: v.copy_(v * 2 + 1),
    "data": lambda v: v.data.add_(1.0),
    "view": lambda v: v.view(v.shape).flatten(0).mul_(2) if v.is_contiguous() else v.mul_(2),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
    "out": lambda v: torch.add(v, 1.0, out=v),
}


def write(stage: int, kind: str) -> None:
    model, plain = make(stage)
    for of, view in VIEWS.items():
        for name, function in WRITES.items():
            print(of, name, flush=True)  # shown if the rank fails
            for each in (model, plain):
                with torch.no_grad():
                    function(view(KINDS[kind](each[4].weight)))
            assert_same(model, plain, f"{name} of {of}")
    if kind != "gradient":
        for each in (model, plain):
            each.zero_grad()
            torch.optim.SGD(each.parameters(), 0.1).step()
            with torch.no_grad():
                for param in each.parameters():
                    param.clamp_(-1, 1)
            each(batch(1)).square().mean().backward()
        assert_same(model, plain)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), CELLS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_writes(kind: str, stage: int, world_size: int) -> None:
    run_ranks(write, world_size, stage, kind)


def follow(stage: int) -> None:
    """Views that are taken before a step, or before other writes, and used after it."""
    model, plain = make(stage)
    views: dict[Any, list[Any]] = {}
    optimizers = []
    for each in (model, plain):
        optimizers.append(torch.optim.AdamW(each.parameters(), lr=0.1))
        with torch.no_grad():
            weight = each[4].weight
            views[each] = [view(weight) for view in VIEWS.values()]
            views[each] += [weight.grad[0], weight.grad.t(), weight.detach()[1], each[2].bias[1:]]

    def same_views(when: str) -> None:
        for number, (one, other) in enumerate(zip(views[model], views[plain], strict=True)):
            print(when, number, flush=True)  # shown if the rank fails
            for function in (lambda v: v, torch.sum, lambda v: v.tolist(), lambda v: v + 1):
                found, expected = map(torch.as_tensor, (function(one), function(other)))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    with torch.no_grad():
        same_views("at first")
    for step in range(3):
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            same_views(f"after step {step}")
            for each in (model, plain):
                views[each][0].mul_(0.5)  # after a step, without a read in between
                views[each][5].add_(1.0)
                each[4].weight.mul_(0.9)
                each[4].weight.grad.mul_(0.9)
            same_views(f"after writes {step}")
        assert_same(model, plain)
        for each in (model, plain):
            each(batch(step)).square().mean().backward()  # adds to the gradients
        with torch.no_grad():
            same_views(f"after backward {step}")


@pytest.mark.one_by_day
@pytest.mark.parametrize(("stage", "world_size"), CELLS)
def test_views_follow_their_shards(stage: int, world_size: int) -> None:
    run_ranks(follow, world_size, stage)


def written_after_a_step(stage: int) -> None:
    for late in VIEWS.values():
        model, plain = make(stage)
        for each in (model, plain):
            with torch.no_grad():
                view = late(each[4].weight)
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            with torch.no_grad():
                view.add_(1.0)
        assert_same(model, plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_after_a_step_keeps_the_step(stage: int) -> None:
    run_ranks(written_after_a_step, 2, stage)


def with_grad(stage: int) -> None:
    """A view that autograd records is a view of a leaf."""
    model, plain = make(stage)
    for each in (model, plain):
        for view in (lambda w: w[0], lambda w: w.view(-1), lambda w: w.t()):
            recorded = view(each[4].weight)
            assert recorded.requires_grad
            with pytest.raises(RuntimeError, match="leaf"):
                recorded.mul_(2)
            with pytest.raises(RuntimeError, match="leaf"):
                recorded[0] = 1.0
            with torch.no_grad():
                recorded.mul_(2)
    assert_same(model, plain)
    for each in (model, plain):
        each.zero_grad()
        (each[4].weight[0].square().sum() + each[4].weight.t()[1].sum()).backward()
    assert_same(model, plain)
    recorded = model[4].weight[0]
    with torch.no_grad():
        model[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"'4\.weight' that autograd has recorded is read after"):
        recorded.sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_views_of_leaves_that_require_grad(stage: int) -> None:
    run_ranks(with_grad, 2, stage)


class Writer(nn.Module):
    """Writes to a row in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.view: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.view is not None:
            self.view.data.mul_(2)
        return self.linear(x)


def refuse(stage: int) -> None:
    """A copy cannot be written if its values are of another dtype, or if a call runs."""
    torch.manual_seed(0)
    precision = zerocore.MixedPrecision(torch.bfloat16)
    narrow = zerocore.shard(seeded(), stage=stage, mixed_precision=precision)
    before = zerocore.full_state_dict(narrow, rank0_only=False)
    with torch.no_grad():
        row = narrow[4].weight[0]
        for name, function in WRITES.items():
            print(name, flush=True)
            with pytest.raises(RuntimeError, match=r"copy of .*'4\.weight'.*unsharded"):
                function(narrow[4].weight[0])
        with pytest.raises(RuntimeError, match=r"'4\.weight'"):  # no TypeError, see the code
            row += 1
    found = zerocore.full_state_dict(narrow, rank0_only=False)
    torch.testing.assert_close(found, before, rtol=0, atol=0)
    model = zerocore.shard(Writer(), stage=stage)
    with torch.no_grad():
        model.view = model.linear.weight[0]
        with pytest.raises(RuntimeError, match=r"copy of .*'linear\.weight'"):
            model(torch.ones(1, 4))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_that_are_refused(stage: int) -> None:
    run_ranks(refuse, 2, stage)


def keep(stage: int) -> None:
    """A clone of a view, and one that is pickled or copied, are tensors of their own."""
    model, plain = make(stage)
    with torch.no_grad():
        row = model[4].weight[0]
        assert type(row) is FullCopy
        for other in (row.clone(), copy.deepcopy(row), row * 1, row + 0):
            before = other.clone()
            other.mul_(2)
            torch.testing.assert_close(other, before * 2)
    assert_same(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_clones_are_tensors_of_their_own(stage: int) -> None:
    run_ranks(keep, 2, stage)
