"""Training on a GPU over the emulated link equals training in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.gpu.training import (
    PRECISIONS,
    VARIANTS,
    Branches,
    Stack,
    Variant,
    make_optimizer,
    peers,
    run_step,
    shard,
    train,
)


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    """Equal to what each dtype can hold after a few steps; double to 1e-9."""
    state = {name: value.cpu() for name, value in expected.state_dict().items()}
    full = zerocore.full_state_dict(actual, rank0_only=False)
    assert list(full) == list(state)
    for name, value in state.items():
        tight = {"rtol": 1e-9, "atol": 1e-9} if value.dtype == torch.float64 else {}
        torch.testing.assert_close(full[name], value, **tight, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_stages(device: torch.device, stage: int, variant: Variant, prefetch: int) -> None:
    plain = Stack(variant).to(device)
    expected = train(plain, micro_batches=variant.micro_batches)
    assert expected[0] != expected[-1]
    with peers():
        model = shard(Stack(variant).to(device), stage, prefetch, variant.accumulate)
        losses = train(model, micro_batches=variant.micro_batches)
        # Single and half precision parts round, and a loss shows that; double alone does not.
        tolerance = 1e-5 if variant.mixed else 1e-9
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0.0)
        assert_same_state(model, plain)


@pytest.mark.parametrize("variant", PRECISIONS, ids=lambda variant: variant.name)
def test_stages_agree_in_mixed_precision(device: torch.device, variant: Variant) -> None:
    answers = []
    for stage in range(4):
        with peers():
            model = shard(Stack(variant).to(device), stage, 1, variant.accumulate)
            losses = train(model, micro_batches=variant.micro_batches)
            answers.append((losses, zerocore.full_state_dict(model)))
    assert answers[0][0][0] != answers[0][0][-1]
    for losses, state in answers[1:]:
        assert torch.equal(losses, answers[0][0])
        assert all(torch.equal(state[name], value) for name, value in answers[0][1].items())
    plain = train(Stack(variant).to(device), micro_batches=variant.micro_batches)
    torch.testing.assert_close(answers[0][0], plain, rtol=5e-2, atol=0.0)


def test_without_a_group(device: torch.device, stage: int) -> None:
    plain = Stack(VARIANTS[-1]).to(device)
    expected = train(plain, micro_batches=2)
    model = shard(Stack(VARIANTS[-1]).to(device), stage)
    torch.testing.assert_close(train(model, micro_batches=2), expected, rtol=1e-5, atol=0.0)
    assert_same_state(model, plain)


def test_a_real_group_of_one_rank(device: torch.device, stage: int) -> None:
    """There is nothing to share: no collective is made, and training is that of one process."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    plain = Stack(VARIANTS[0]).to(device)
    expected = train(plain)
    model = shard(Stack(VARIANTS[0]).to(device), stage)
    with zerocore.reporting.record_events(model) as events:
        torch.testing.assert_close(train(model), expected, rtol=1e-9, atol=0.0)
    assert not {event.op for event in events} - {"unshard", "reshard"}
    assert_same_state(model, plain)


def test_on_another_stream(cuda: torch.device, stage: int) -> None:
    """The compute stream is the one that is current, also if it changes between steps."""
    module = torch.get_device_module(cuda)
    plain = Stack(VARIANTS[0]).to(cuda)
    expected = train(plain)
    with peers():
        model = shard(Stack(VARIANTS[0]).to(cuda), stage)
        optimizer = make_optimizer(model)
        losses = []
        for step in range(4):
            stream = module.Stream()
            stream.wait_stream(module.current_stream())
            with module.stream(stream):
                losses += run_step(model, optimizer, step)
            module.current_stream().wait_stream(stream)
        torch.testing.assert_close(torch.stack(losses).cpu(), expected, rtol=1e-9, atol=0.0)
        assert_same_state(model, plain)


def test_from_the_meta_device(device: torch.device) -> None:
    """`device` may leave the index open, as "cuda" does."""

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zerocore.shard(model, stage=3, device=torch.device(device.type), init_fn=init)
    assert {parameter.device for parameter in model.parameters()} == {device}
    model(torch.ones(2, 8, device=device)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class FailureError(Exception):
    """The error that the failing tests raise."""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_failed_step_leaves_the_model_usable(
    device: torch.device, stage: int, where: str, at: int
) -> None:
    def fail(place: str) -> None:
        calls.append(place)
        if calls.count(where) == at + 1:
            raise FailureError

    plain = Stack(VARIANTS[0]).to(device)
    expected = train(plain)
    with peers():
        model = shard(Stack(VARIANTS[0]).to(device), stage)
        for _ in range(2):
            calls: list[str] = []
            model.pause = fail
            with pytest.raises(FailureError):
                run_step(model, make_optimizer(model), 0)
            model.pause = lambda place: None
            zerocore.reset(model)
            model.zero_grad()
        assert isinstance(model.units[0], Branches)
        torch.testing.assert_close(train(model), expected, rtol=1e-9, atol=0.0)
        assert_same_state(model, plain)


def test_a_failed_backward_needs_no_reset(device: torch.device) -> None:
    """The next forward may begin before autograd's thread has let go of the failed backward."""

    def fail(place: str) -> None:
        if place == "backward":
            raise FailureError

    with peers():
        model = shard(Stack(VARIANTS[0]).to(device), stage=3)
        optimizer = make_optimizer(model)
        for step in range(20):
            model.pause = fail
            with pytest.raises(FailureError):
                run_step(model, optimizer, step)
            model.pause = lambda place: None
            run_step(model, optimizer, step)
