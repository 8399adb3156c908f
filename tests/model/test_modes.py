"""Ways to call a sharded model other than one forward and one backward per step."""

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
from tests.distributed.training import (
    accumulate,
    assert_gradients,
    case_named,
    full_gradients,
    train_reference,
)
from tests.distributed.values import full_of
from tests.zoo_case import Case

CASES = ("plain", "tied", "mixed_dtypes", "encoder_decoder", "looped")


def losses_of_ranks(model: nn.Module, case: Case, seed: int) -> list[Tensor]:
    """Every rank's result for batch `seed`, on a plain model."""
    return [
        case.loss(model, case.seeded_batch(seed, rank, 2)) for rank in range(dist.get_world_size())
    ]


def own_loss(model: nn.Module, case: Case, seed: int) -> Tensor:
    return case.loss(model, case.seeded_batch(seed, dist.get_rank(), 2))


def assert_gradients_of(model: nn.Module, plain: nn.Module, losses: list[Tensor]) -> None:
    """The gradients in `model` are those of the mean of `losses`, computed with `plain`."""
    plain.zero_grad()
    (sum(losses, torch.zeros(())) / dist.get_world_size()).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in plain.named_parameters()
    }
    torch.testing.assert_close(full_gradients(model), expected, rtol=1e-5, atol=1e-6)


def evaluate(stage: int, mode: str) -> None:
    for name in CASES:
        case = case_named(name)
        model, plain = zerocore.shard(case.seeded_build(), stage=stage), case.seeded_build()
        for seed in range(3):  # before the first, and between training steps
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                model.eval()
                loss = own_loss(model, case, seed)
                torch.testing.assert_close(
                    loss, losses_of_ranks(plain, case, seed)[dist.get_rank()]
                )
                model.train()
            accumulate(model, case, seed)
            assert_gradients(model, case, seed)
            model.zero_grad()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_steps(stage: int, mode: str) -> None:
    run_ranks(evaluate, 2, stage, mode)


def release_without_grad() -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=3)
    with zerocore.reporting.record_events(model) as events, torch.no_grad():
        own_loss(model, case, 0)
        own_loss(model, case, 1)
    assert events[-1].pool_nbytes == 0
    assert sum(e.op == "unshard" for e in events) == sum(e.op == "reshard" for e in events) > 0
    assert all(isinstance(p, zerocore.ShardedParameter) for p in model.parameters())


def test_evaluation_releases_all_units() -> None:
    run_ranks(release_without_grad, 2)


def freeze_and_thaw(stage: int, frozen: str) -> None:
    case = case_named("plain")
    model, plain = zerocore.shard(case.seeded_build(), stage=stage), case.seeded_build()
    for step, requires_grad in enumerate((True, False, False, True)):
        for net in (model, plain):
            for name, parameter in net.named_parameters():
                if frozen in name:
                    parameter.requires_grad_(requires_grad)
        own_loss(model, case, step).backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (requires_grad or frozen not in name), name
        assert_gradients_of(model, plain, losses_of_ranks(plain, case, step))
        model.zero_grad()


@pytest.mark.parametrize(
    "frozen", ["blocks.1.", "linear.weight", "embed", "head.bias", "norm", "b", "blocks"]
)
def test_requires_grad_changed_between_steps(stage: int, frozen: str) -> None:
    run_ranks(freeze_and_thaw, 2, stage, frozen)


def forward_twice(stage: int, order: str) -> None:
    for name in CASES:
        case = case_named(name)
        model, plain = zerocore.shard(case.seeded_build(), stage=stage), case.seeded_build()
        for _ in range(2):
            first, second = own_loss(model, case, 0), own_loss(model, case, 1)
            if order == "sum":
                (first + second).backward()
            else:
                for loss in (first, second) if order == "first" else (second, first):
                    loss.backward()
            expected = losses_of_ranks(plain, case, 0) + losses_of_ranks(plain, case, 1)
            assert_gradients_of(model, plain, expected)
            model.zero_grad()


@pytest.mark.parametrize("order", ["sum", "first", "second"])
def test_several_forwards_before_backward(stage: int, order: str) -> None:
    run_ranks(forward_twice, 2, stage, order)


def backward_twice(stage: int) -> None:
    case = case_named("plain")
    model, plain = zerocore.shard(case.seeded_build(), stage=stage), case.seeded_build()
    loss = own_loss(model, case, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients_of(model, plain, 2 * losses_of_ranks(plain, case, 0))


def test_backward_twice_through_one_graph(stage: int) -> None:
    run_ranks(backward_twice, 2, stage)


def drop_forward(stage: int) -> None:
    """A forward whose result is dropped, as for metrics, has no effect on the next step."""
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    for step in range(3):
        own_loss(model, case, 7)
        accumulate(model, case, step)
        assert_gradients(model, case, step)
        model.zero_grad()


def test_forward_without_backward(stage: int) -> None:
    run_ranks(drop_forward, 2, stage)


def differentiate_inputs(stage: int) -> None:
    case = case_named("plain")
    model, plain = zerocore.shard(case.seeded_build(), stage=stage), case.seeded_build()
    batch = case.seeded_batch(0, dist.get_rank(), 2)
    batch["x"].requires_grad_()
    (actual,) = torch.autograd.grad(case.loss(model, batch), batch["x"])
    (expected,) = torch.autograd.grad(case.loss(plain, batch), batch["x"])
    torch.testing.assert_close(actual, expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_gradient_of_inputs_alone(stage: int) -> None:
    run_ranks(differentiate_inputs, 2, stage)


def call_parts(stage: int) -> None:
    """Blocks called outside of the model's own call, and a loss on an early output."""
    case = case_named("plain")
    model: Any = zerocore.shard(case.seeded_build(), stage=stage)
    plain: Any = case.seeded_build()

    def early_loss(net: Any, rank: int) -> Tensor:
        x = net.embed(case.seeded_batch(0, rank, 2)["x"])
        return net.blocks[1](net.blocks[0](x, rank), rank).square().mean()

    for _ in range(2):
        early_loss(model, dist.get_rank()).backward()
        expected = [early_loss(plain, rank) for rank in range(dist.get_world_size())]
        assert_gradients_of(model, plain, expected)
        model.zero_grad()
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_blocks_called_directly(stage: int) -> None:
    run_ranks(call_parts, 2, stage)


class Failure(Exception):
    """Raised on purpose."""


def fail_forward(module: nn.Module, args: Any, output: Any) -> None:
    raise Failure


def fail_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    def fail(gradient: Tensor) -> None:
        raise Failure

    output.register_hook(fail)


def recover(stage: int, name: str, hook: Callable[..., None], reset: bool) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    for failed_step in (0, 2):  # in the very first step, and in a warm one
        handle = model.get_submodule(name).register_forward_hook(hook)
        with pytest.raises(Failure):
            accumulate(model, case, failed_step)
        handle.remove()
        model.zero_grad()
        if reset:
            zerocore.reset(model)
            assert all(zerocore.is_sharded(p) == (stage > 0) for p in model.parameters())
        for step in range(2):
            accumulate(model, case, step)
            assert_gradients(model, case, step)
            model.zero_grad()


def fail_behind_no_sync(stage: int, reset: bool) -> None:
    """Sums of a micro-batch without sync are averaged later, as DDP's, also if a forward fails."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model = zerocore.shard(plain, stage=stage)
    xs = torch.randn(3, dist.get_world_size(), 2, 5)[:, dist.get_rank()]
    for each in (model, ddp):
        with each.no_sync():
            each(xs[0]).square().sum().backward()
    handle = model[1].register_forward_hook(fail_forward)
    with pytest.raises(Failure):
        model(xs[1])
    handle.remove()
    if reset:
        zerocore.reset(model)
    for x in xs[1:]:
        for each in (model, ddp):
            each(x).square().sum().backward()
        for own, right in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(full_of(own.grad), right.grad)


@pytest.mark.parametrize("reset", [False, True], ids=["as_is", "reset"])
def test_sums_stay_when_a_forward_fails(stage: int, reset: bool) -> None:
    run_ranks(fail_behind_no_sync, 3, stage, reset)


@pytest.mark.parametrize("reset", [False, True], ids=["as_is", "reset"])
@pytest.mark.parametrize("name", ["embed", "blocks.1", "blocks.2.linear", "head"])
@pytest.mark.parametrize("hook", [fail_forward, fail_backward])
def test_next_step_works_after_a_failure(
    stage: int, name: str, hook: Callable[..., None], reset: bool
) -> None:
    run_ranks(recover, 2, stage, name, hook, reset)


class Talker(nn.Module):
    """A model whose methods other than forward use its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = case_named("plain").build()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.generate(x)

    def generate(self, x: Tensor, times: int = 1) -> Tensor:
        """`times` calls of the net."""
        out: Tensor = sum(self.net(x, 0, False) for _ in range(times)) * self.scale
        return out


def call_method(stage: int) -> None:
    torch.manual_seed(0)
    plain = Talker()
    torch.manual_seed(0)
    model: Any = zerocore.shard(Talker(), stage=stage)
    zerocore.register_forward_method(model, "generate")
    x = torch.randn(2, 5)
    for times in (1, 2):
        with torch.no_grad():
            torch.testing.assert_close(model.generate(x, times=times), plain.generate(x, times))
        model.generate(x, times=times).square().mean().backward()
        expected = [plain.generate(x, times).square().mean()] * dist.get_world_size()
        assert_gradients_of(model, plain, expected)
        model.zero_grad()
    with pytest.raises(ValueError, match="chat"):
        zerocore.register_forward_method(model, "chat")


def test_register_forward_method(stage: int) -> None:
    run_ranks(call_method, 2, stage)


def batch_norm() -> Case:
    """Buffers that the forward changes."""
    from tests.zoo_awkward import Net

    def build() -> nn.Module:
        net = Net()
        net.norm = nn.BatchNorm1d(7)  # type: ignore[assignment]
        return net

    plain = case_named("plain")
    return Case("batch_norm", build, plain.make_batch, plain.loss)


def keep_buffers(stage: int) -> None:
    case = batch_norm()
    sharded_buffers = dict((net := case.seeded_build()).named_buffers())
    model, plain = zerocore.shard(net, stage=stage), case.seeded_build()
    own_loss(model, case, 0).backward()
    own_loss(plain, case, 0).backward()
    for name, buffer in model.named_buffers():
        assert buffer is sharded_buffers[name]
        torch.testing.assert_close(buffer, plain.get_buffer(name))


def test_buffers_are_left_alone(stage: int) -> None:
    run_ranks(keep_buffers, 2, stage)


def train_in_prefetch(stage: int, prefetch: int) -> None:
    case = case_named("looped")
    model = zerocore.shard(
        case.seeded_build(), stage=stage, communication=zerocore.Communication(prefetch=prefetch)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        accumulate(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
    expected = train_reference(
        case, dist.get_world_size(), lambda p: torch.optim.SGD(p, lr=0.1), steps=3
    )
    state = zerocore.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, expected.state, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_any_prefetch(stage: int, prefetch: int) -> None:
    run_ranks(train_in_prefetch, 2, stage, prefetch)
