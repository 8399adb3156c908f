"""zerocore.retryable: what fails on one rank is undone on all, as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states, make
from tests.distributed.harness import run_ranks

NUM_STEPS, NUM_MICRO = 4, 3


class Culprit(nn.Module):
    """Raises in the forward of one rank when it is told to."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.raises = net, False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.raises:
            raise KeyError("a token that is not in the vocabulary")
        return out


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Dropout draws from the rank's stream, which goes on from one micro-batch to the next."""
    data = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return model(torch.randn(4, 4, 3, 3, generator=data)).square().mean()


def backward(model: nn.Module, culprit: Culprit, attempt: Any, number: int, failure: str) -> None:
    """One micro-batch, which fails on the last rank alone."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    culprit.raises = is_last and failure == "forward"
    try:
        loss = loss_of(model, number)
    finally:
        culprit.raises = False
    if is_last and failure == "nan":
        loss = loss * float("nan")
    attempt.check(loss)
    loss.backward()
    if is_last and failure == "behind":
        raise OSError("the disk is full")


def train(wrap: Any, name: str, failures: dict[tuple[int, int], str], guarded: bool) -> Any:
    """Micro-batches that fail are left out by the guard, or were never there."""
    culprit = Culprit(make(None))
    model = wrap(culprit)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            failure = failures.get((step, micro), "")
            if not guarded:
                if not failure:
                    backward(
                        model,
                        culprit,
                        zerocore.recovery.Attempt.__new__(Free),
                        step * 10 + micro,
                        "",
                    )
                continue
            with zerocore.retryable(model, optimizer, schedule) as attempt:
                backward(model, culprit, attempt, step * 10 + micro, failure)
            assert attempt.failed == bool(failure)
            if failure:
                assert attempt.reason.startswith(f"rank {dist.get_world_size() - 1}: ") or (
                    failure == "forward"
                ), attempt.reason
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return full_states(model, optimizer)


class Free(zerocore.recovery.Attempt):
    """Looks at nothing."""

    def check(self, loss: Any) -> None:
        pass


FAILURES = {(0, 0): "forward", (0, 2): "nan", (1, 1): "behind", (2, 0): "nan", (2, 1): "forward"}


def leave_out(stage: int, name: str, hybrid: bool) -> None:
    options: dict[str, Any] = {"stage": stage}
    if hybrid:
        options["group"] = init_device_mesh("cpu", (2, 2))

    def wrap(model: nn.Module) -> nn.Module:
        return zerocore.shard(model, **options)

    guarded = train(wrap, name, FAILURES, True)
    assert_equal(guarded, train(wrap, name, FAILURES, False))


@pytest.mark.parametrize(
    ("stage", "name", "num_ranks"),
    [(0, "adamw", 2), (1, "zerocore", 3), (2, "sgd", 2), (3, "zerocore", 3), (3, "adamw", 4)],
)
def test_micro_batches_that_fail_were_never_there(stage: int, name: str, num_ranks: int) -> None:
    run_ranks(leave_out, num_ranks, stage, name, num_ranks == 4)


def states_of_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    return {
        "model": {name: param.full_tensor() for param, name in names.items()},
        "state": {
            f"{names[param]}.{key}": getattr(value, "_local_tensor", value)
            for param, state in optimizer.state.items()
            for key, value in state.items()
        },
        "groups": [{**group, "params": []} for group in optimizer.param_groups],
    }


def whole_steps(make_model: Any, name: str, copies: bool) -> None:
    """A step that fails behind its begin is undone from copies, also the first one."""
    states = []
    for failing in (True, False):
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        for number, failure in enumerate(["behind", "", "loss", "behind", ""]):
            if failure and not failing:
                continue
            with zerocore.retryable(model, optimizer, schedule, copies=copies) as attempt:
                loss = loss_of(model, number)
                is_first = dist.get_rank() == 0
                attempt.check(torch.tensor(torch.inf) if failure == "loss" and is_first else loss)
                loss.backward()
                if failure == "behind" and not copies and is_first:
                    raise OSError("a full disk")
                optimizer.step()
                schedule.step()
                if failure == "behind" and is_first:
                    raise OSError("a full disk")
            assert attempt.failed == bool(failure)
            optimizer.zero_grad()
        is_rows = hasattr(next(model.parameters()), "_spec")
        states.append((states_of_rows if is_rows else full_states)(model, optimizer))
    assert_equal(*states)


def shard_rows() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    for module in (net[1], net):
        zerocore.fsdp.fully_shard(module)
    return net


def steps_of(kind: str, name: str, copies: bool) -> None:
    host = zerocore.Offload(states="cpu", gradients="cpu", parameters="cpu")
    half = zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
    options = {"host": {"offload": host}, "bf16": {"mixed_precision": half}, "plain": {}}
    whole_steps(shard_rows if kind == "rows" else lambda: make(3, **options[kind]), name, copies)


@pytest.mark.parametrize(
    ("kind", "name", "copies"),
    [
        ("plain", "adamw", True),
        ("plain", "zerocore", False),
        ("bf16", "zerocore", True),
        ("host", "zerocore", True),
        ("rows", "zerocore", True),
        ("rows", "sgd", False),
    ],
)
def test_steps_that_fail_were_never_there(kind: str, name: str, copies: bool) -> None:
    run_ranks(steps_of, 2, kind, name, copies)


def see_spikes() -> None:
    model = zerocore.shard(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def attempt_of(loss: float) -> zerocore.recovery.Attempt:
        with zerocore.retryable(model, optimizer, spike=3.0, most=3) as attempt:
            attempt.check(loss)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return attempt

    is_first = dist.get_rank() == 0
    for _ in range(10):
        assert not attempt_of(2.0 if is_first else 1.0).failed
    assert not attempt_of(5.0 if is_first else 1.0).failed  # the ranks' mean is no spike
    found = attempt_of(9.5 if is_first else 1.0)
    assert found.reason == "the loss is 5.25, the mean of the last 11 is 1.636", found.reason
    assert attempt_of(torch.nan).reason == "rank 0: the loss is nan; rank 1: the loss is nan"
    with pytest.raises(RuntimeError, match=r"3 retryable blocks in a row .*, the last: rank 1"):
        attempt_of(torch.inf if not is_first else 1.0)
    assert not attempt_of(1.0).failed


def test_spikes_and_too_many_failures() -> None:
    run_ranks(see_spikes, 2)


def lose_around_zero() -> None:
    model = zerocore.shard(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(30):
        with zerocore.retryable(model, optimizer, spike=3.0) as attempt:
            attempt.check((-1.0) ** number if number < 29 else 3.5)
            optimizer.step()
        assert attempt.failed == (number == 29), (number, attempt.reason)


def test_losses_around_zero_are_no_spikes() -> None:
    """Their mean is about zero, and any positive loss is larger than three times that."""
    run_ranks(lose_around_zero, 2)


def refuse() -> None:
    model = zerocore.shard(nn.Linear(3, 1), communication=zerocore.Communication(accumulate="full"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerocore.no_sync(model):
        with zerocore.retryable(model, optimizer):
            model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="no_sync"), zerocore.retryable(model, optimizer):
            pass
    model(torch.ones(2, 3)).sum().backward()
    with zerocore.retryable(model, optimizer):
        optimizer.step()
    with pytest.raises(OSError, match="behind"), zerocore.retryable(model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        raise OSError("behind the step")
    with pytest.raises(KeyboardInterrupt), zerocore.retryable(model, optimizer):
        raise KeyboardInterrupt


def test_what_is_raised_as_it_is() -> None:
    run_ranks(refuse, 2)


def drop_gradients_inside(kind: str, sets_none: bool) -> None:
    """Programs that begin a step with zero_grad(): a step that fails leaves the old gradients."""
    model = make(3) if kind == "shard" else shard_rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads: list[list[Tensor]] = []
    for number, failure in enumerate(["", "loss", ""]):
        with zerocore.retryable(model, optimizer) as attempt:
            optimizer.zero_grad(sets_none)
            loss = loss_of(model, number)
            loss.backward()
            attempt.check(loss * torch.nan if failure and dist.get_rank() == 0 else loss)
            optimizer.step()
        assert attempt.failed == bool(failure)
        params = [param for param in model.parameters() if param.requires_grad]
        grads.append([param.grad.full_tensor() for param in params])  # type: ignore[union-attr]
    for before, after in zip(*grads[:2], strict=True):
        assert torch.equal(before, after)
    assert any(not torch.equal(*pair) for pair in zip(*grads[1:], strict=True))


@pytest.mark.parametrize("kind", ["shard", "rows"])
def test_steps_that_begin_with_zero_grad(kind: str) -> None:
    for sets_none in (True, False):
        run_ranks(drop_gradients_inside, 2, kind, sets_none)
