"""Parameters read, changed and initialised outside of the model's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from zerocore.model.state import state_of

F = nn.functional


class Net(nn.Module):
    """Two units and a head, with a bias that only one rank may own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + self.conv(x.reshape(-1, 2, 3, 1)).mean()


def make(stage: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net()
    return zerocore.shard(copy.deepcopy(plain), stage=stage), plain


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "l2": lambda m, x: m(x).square().mean() + sum(p.pow(2).sum() for p in m.parameters()) * 0.1,
    "l2_first": lambda m, x: sum((p * p).sum() for p in m.parameters()) + m(x).square().mean(),
    "norm": lambda m, x: m(x).square().mean() + torch.norm(m.head.weight),
    "gram": lambda m, x: m(x).mean() + (m.head.weight @ m.head.weight.t()).square().sum(),
    "orthogonal": lambda m, x: m(x).mean() + (m.blocks[0].weight.T * m.blocks[1].weight).sum(),
    "tied_head": lambda m, x: F.linear(m(x), m.head.weight).square().mean(),
    "view": lambda m, x: m(x).mean() + m.conv.weight.flatten()[3:20].square().sum(),
    "row": lambda m, x: m(x).mean() + m.blocks[1].bias[2] * m.blocks[0].weight[1].sum(),
    "cat": lambda m, x: m(x).mean() + torch.cat([p.flatten() for p in m.parameters()]).norm(),
    "vector": lambda m, x: (
        m(x).mean() + nn.utils.parameters_to_vector(m.blocks.parameters()).norm()
    ),
    "full": lambda m, x: m(x).mean() + read_full(m.head.weight).square().sum(),
    "proximal": lambda m, x: m(x).square().mean() + proximal(m),
    "alone": lambda m, x: sum(p.square().sum() for p in m.parameters()) + 0 * x.sum(),
}


def proximal(model: Any) -> Tensor:
    """With copies that were made of shards."""
    if not hasattr(model, "start"):
        model.start = [p.detach().clone() for p in model.parameters()]
    return torch.stack(
        [(p - 0.5 * s).square().sum() for p, s in zip(model.parameters(), model.start, strict=True)]
    ).sum()


def read_full(param: Any) -> Tensor:
    return param.full_tensor() if isinstance(param, zerocore.ShardedParameter) else param


def train(stage: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, loss in LOSSES.items():
        print(name, flush=True)  # shown if the rank fails
        model, plain = make(stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            xs = [torch.randn(4, 6, generator=seeded(step, r)) for r in range(world_size)]
            plain.zero_grad()
            for x in xs:
                (loss(plain, x) / world_size).backward()
            optimizer.zero_grad()
            found = loss(model, xs[rank])
            torch.testing.assert_close(found, loss(plain, xs[rank]))
            found.backward()
            expected = {
                key: torch.zeros_like(p) if p.grad is None else p.grad
                for key, p in plain.named_parameters()
            }
            for key, gradient in full_gradients_of(model).items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)
            optimizer.step()
            with torch.no_grad():
                for param, gradient in zip(plain.parameters(), expected.values(), strict=True):
                    param -= 0.1 * gradient


def full_gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: full_of(p) * 0 if p.grad is None else full_of(p.grad)
        for key, p in model.named_parameters()
    }


def seeded(*numbers: int) -> torch.Generator:
    seed = sum(number * 100**index for index, number in enumerate(numbers))
    return torch.Generator().manual_seed(seed)


def test_parameters_in_a_loss(stage: int) -> None:
    run_ranks(train, 2, stage)


READS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda m: m.head.weight @ m.head.weight.t(),
    "linear": lambda m: F.linear(torch.ones(2, 6), m.head.weight),
    "view": lambda m: m.head.weight.view(3, -1).sum(0),
    "transpose": lambda m: m.head.weight.t(),
    "row": lambda m: m.blocks[0].weight[1],
    "outer": lambda m: m.blocks[0].bias * m.blocks[0].weight,
    "along": lambda m: m.conv.weight.sum((1, 2)),
    "spectral": lambda m: torch.linalg.matrix_norm(m.head.weight, 2),
    "vector": lambda m: nn.utils.parameters_to_vector(m.blocks.parameters()),
    "total_norm": lambda m: nn.utils.get_total_norm(list(m.parameters())),
    "sorted": lambda m: m.blocks[1].bias.sort(descending=True).values,
    "argmax": lambda m: m.blocks[1].weight.argmax(),
    "mean": lambda m: m.conv.weight.mean(),
    "norm": lambda m: m.conv.weight.norm(),
    "finite": lambda m: m.conv.weight.isfinite().all(),
    "rows": lambda m: torch.stack(list(m.head.weight)),
    "copy_beside": lambda m: (m.blocks[0].weight.t() * m.blocks[1].weight).sum(),
    "shard_beside": lambda m: (m.blocks[0].weight.t() * m.blocks[1].weight.detach()).sum(),
    "template": lambda m: m.head.weight.view(-1).view_as(m.head.weight),
    "zeros": lambda m: torch.zeros(m.head.weight.shape).add_(m.head.weight),
}


def read(stage: int) -> None:
    model, plain = make(stage)
    for frozen in (False, True):
        with torch.no_grad():
            if frozen:
                model.requires_grad_(False)
            for name, function in READS.items():
                print(name, frozen, flush=True)
                torch.testing.assert_close(torch.as_tensor(function(model)), function(plain))
    for function in READS.values():  # frozen, with grad mode
        found = function(model)
        assert not found.requires_grad
        torch.testing.assert_close(torch.as_tensor(found), function(plain).detach())
    for (_, param), (_, full) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(full_of(param), full)
        assert full_of(param).stride() == full.stride()
        with torch.no_grad():
            for each in (param, full):
                each.unsqueeze(0)[0].mul_(2)
        assert torch.equal(full_of(param), full)


def test_reads_without_autograd(stage: int) -> None:
    run_ranks(read, 3, stage)


class Reader(Net):
    """Reads the parameters of modules that it does not call, as Hugging Face's models do."""

    knows_calls = False

    def forward(self, x: Tensor) -> Tensor:
        if self.knows_calls:
            assert self.blocks[1].weight.shape == (6, 6) and self.head.weight.size(0) == 5
        h = torch.tanh(F.linear(x, self.blocks[1].weight, self.blocks[1].bias))
        return super().forward(h) @ self.head.weight.t()


def forward(stage: int) -> None:
    torch.manual_seed(0)
    plain = Reader()
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    x = torch.randn(3, 6, generator=seeded(dist.get_rank()))
    model.knows_calls = hasattr(type(model._zerocore_state.engine), "in_call")
    for _ in range(2):
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for key, param in plain.named_parameters():
        mean = param.grad / dist.get_world_size()
        dist.all_reduce(mean)
        torch.testing.assert_close(full_gradients_of(model)[key], mean)


def test_reads_inside_of_a_forward(stage: int) -> None:
    run_ranks(forward, 2, stage)


def version_of(model: nn.Module, param: Any) -> int:
    return model._zerocore_state.engine.param_version(param.unit, param.position)


def change(stage: int) -> None:
    model, plain = make(stage)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    for param, full in pairs:
        address, version = param.detach().local().data_ptr(), version_of(model, param)
        param.data.mul_(2)
        full.data.mul_(2)
        assert version_of(model, param) > version
        param.data = param.data.clone()
        param.data = param.data * 0.9 + 1
        full.data = full.data * 0.9 + 1
        param.data = param
        assert param.detach().local().data_ptr() == address
        assert torch.equal(param.full_tensor(), full)
        values = torch.randn(full.shape, generator=seeded(1))
        param.data = values
        full.data = values.clone()
        assert torch.equal(param.full_tensor(), full)
        with pytest.raises(RuntimeError, match=param.fqn):
            param.mul_(2)  # autograd records
        assert param.detach() != None  # noqa: E711
        with pytest.raises((TypeError, ValueError), match=param.fqn):
            param.data = torch.zeros(3, 77)
        with pytest.raises((TypeError, ValueError), match=param.fqn):
            param.data = values.double()
        with pytest.raises((TypeError, ValueError), match=param.fqn):
            param.grad = torch.zeros(9, 5)
        param.grad = values
        torch.testing.assert_close(param.grad.full_tensor(), values)
        param.grad = torch.ones_like(param.local())
        assert param.grad.sum() == full.numel()
        del param.grad
        assert param.grad is None
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), plain(x))
    with torch.no_grad():
        model.blocks[0].weight.data.zero_()
        plain.blocks[0].weight.data.zero_()
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_is_changed_in_place(stage: int) -> None:
    run_ranks(change, 2, stage)


def vector(stage: int) -> None:
    model, plain = make(stage)
    numel = sum(p.numel() for p in model.blocks.parameters())
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            values = torch.randn(numel, generator=seeded(int(grad_mode)))
            for each in (model, plain):
                nn.utils.vector_to_parameters(values, each.blocks.parameters())
            assert torch.equal(nn.utils.parameters_to_vector(model.blocks.parameters()), values)
        state = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(state, dict(plain.state_dict()))
    torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))


def test_vectors_of_parameters(stage: int) -> None:
    run_ranks(vector, 2, stage)


INITIALISERS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda p: nn.init.normal_(p, std=0.02),
    "uniform": lambda p: nn.init.uniform_(p, -1, 1),
    "trunc_normal": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "constant": lambda p: nn.init.constant_(p, 3.0),
    "zeros": nn.init.zeros_,
    "method": lambda p: p.detach().normal_(),
    "data": lambda p: p.data.uniform_(-1, 1).mul_(2),
    "noise": lambda p: p.data.add_(torch.randn_like(p.detach())),
    "bernoulli": lambda p: p.data.bernoulli_(0.5),
}
OF_MATRICES: dict[str, Callable[[Any], Any]] = {
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "orthogonal": lambda p: nn.init.orthogonal_(p) if shape_of(p).numel() < 50 else None,
}


def shape_of(param: Any) -> torch.Size:
    return getattr(param, "global_shape", param.shape)


def initialise(stage: int) -> None:
    model, plain = make(stage)
    for name, function in (INITIALISERS | OF_MATRICES).items():
        print(name, flush=True)
        for each in (plain, model):
            torch.manual_seed(3)
            for param in each.parameters():
                if name in INITIALISERS or len(shape_of(param)) > 1:
                    function(param)
        state = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=0, atol=0)


def test_random_values_are_those_of_a_plain_model(stage: int) -> None:
    run_ranks(initialise, 3, stage)


def fail_to_read() -> None:
    model, _ = make(3)
    with pytest.raises(RuntimeError, match="square"):
        torch.linalg.inv(model.head.weight)
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0
    model(torch.ones(2, 6)).sum().backward()


def test_a_read_that_fails_gives_the_memory_back() -> None:
    run_ranks(fail_to_read, 2)
