"""Real ranks on the device learn the same as ranks on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocore
from tests.async_device.training import (
    WIDTH,
    Block,
    in_turns,
    make_model,
    start,
    train,
    train_offloaded,
    train_sharded,
)
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

STAGES = range(4)
PREFETCH = (0, 1, 2)


def train_all(on_device: bool, seeds: int) -> list[list[float]]:
    """Returns this rank's losses by seed of the delays, stage and prefetch."""
    device, extension = start(on_device)
    losses = []
    for seed in in_turns(extension, seeds):
        for stage in STAGES:
            losses += [train_sharded(device, stage, prefetch) for prefetch in PREFETCH[seed:]]
    return losses


@pytest.mark.parametrize("num_ranks", [*by_night(1, 2), 3])
def test_losses_are_those_of_gloo(num_ranks: int) -> None:
    """Bit for bit: both ways sum in the order of the ranks."""
    seeds = 3 if num_ranks == 2 else 1
    expected = run_ranks(train_all, num_ranks, False, seeds, launch="torchrun", timeout=150)
    found = run_ranks(train_all, num_ranks, True, seeds, launch="torchrun", timeout=150)
    assert found == expected


class Streams:
    """Two streams that work uses in turn, each after the other; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.Stream(device) for _ in range(2)] if device.type != "cpu" else []

    def next(self) -> AbstractContextManager[Any]:
        if not self.streams:
            return nullcontext()
        self.streams.reverse()
        self.streams[0].wait_stream(self.streams[1])
        stream: AbstractContextManager[Any] = self.streams[0]
        return stream


def train_on_streams(device: torch.device, stage: int, prefetch: int) -> list[float]:
    """Returns the losses of steps whose forwards, backwards and updates change streams."""
    model = zerocore.shard(
        make_model(device),
        stage=stage,
        units=[Block],
        communication=zerocore.Communication(prefetch=prefetch),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.linspace(-1, 1, 8 * WIDTH, device=device).view(2, 4, WIDTH)
    inputs = inputs * (1 + dist.get_rank())
    streams, losses = Streams(device), []
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    for step in range(4):
        for x in inputs:
            with streams.next() as forward_stream:
                loss = (model(x) - x.flip(1)).square().mean()
            with streams.next() if step % 2 else forward_stream or nullcontext():
                loss.backward()
            losses.append(loss)  # keeps its memory while another stream may read it
        with streams.next():
            optimizer.step()
            optimizer.zero_grad()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return [loss.item() for loss in losses]


def train_all_on_streams(on_device: bool, seeds: int) -> list[list[float]]:
    device, extension = start(on_device)
    losses = []
    for seed in range(seeds):
        if on_device:
            extension.set_delays(seed, 0.3, 400)
        losses += [train_on_streams(device, stage, seed % 3) for stage in STAGES]
    return losses


@pytest.mark.nightly
def test_compute_goes_from_stream_to_stream() -> None:
    """The engine records events on the stream that is current at the time."""
    expected = run_ranks(train_all_on_streams, 2, False, 3, launch="torchrun", timeout=150)
    assert run_ranks(train_all_on_streams, 2, True, 3, launch="torchrun", timeout=150) == expected


BF16 = zerocore.MixedPrecision(torch.bfloat16, torch.float32)


def change_weights_alone(stage: int) -> str:
    """Returns this rank's error after only rank 1 changes a gathered weight."""
    device, _ = start(on_device=True)
    model = zerocore.shard(make_model(device), stage=stage, units=[Block])
    inputs = torch.ones(4, WIDTH, device=device)
    train(model, device, steps=2)
    model(inputs).sum().backward()
    if dist.get_rank() == 1:
        model[0].down.bias.data.local().add_(1.0)
    with pytest.raises(ValueError, match="restart from a checkpoint") as caught:
        model(inputs).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("stage", [*by_night(1), 2])
def test_a_gathered_weight_that_one_rank_changes_is_an_error(stage: int) -> None:
    """The device matches collectives by their order alone, as NCCL does."""
    first, second = run_ranks(change_weights_alone, 2, stage, launch="torchrun", timeout=100)
    assert "weights have changed on another rank only" in first
    assert "unit '0': its weights have changed on this rank" in second


def train_all_offloaded(on_device: bool) -> list[list[float]]:
    """Does the same as train_all with states on the host, and at stage 3 parameters."""
    device, extension = start(on_device)
    losses = []
    for _ in in_turns(extension, 2):
        for stage in STAGES:
            losses.append(train_offloaded(device, stage, zerocore.Offload(states="cpu")))
        everything = zerocore.Offload(states="cpu", parameters="cpu")
        losses.append(train_offloaded(device, 3, everything))
    return losses


def test_losses_with_states_on_the_host_are_those_of_gloo() -> None:
    expected = run_ranks(train_all_offloaded, 2, False, launch="torchrun", timeout=150)
    found = run_ranks(train_all_offloaded, 2, True, launch="torchrun", timeout=150)
    assert found == expected


def train_in_order(on_device: bool) -> list[list[float]]:
    """Trains with gradients sent in bfloat16 and summed in order; each unit has two regions."""
    device, extension = start(on_device)
    mixed = zerocore.MixedPrecision(wire_dtype=torch.bfloat16, keep_fp32=("*.up.bias",))
    losses = []
    for _ in in_turns(extension, 2):
        for stage in STAGES:
            offloads = (None, zerocore.Offload(states="cpu"))
            for offload in offloads:
                model = zerocore.shard(
                    make_model(device),
                    stage=stage,
                    units=[Block],
                    offload=offload,
                    mixed_precision=mixed,
                )
                made = train(model, device, make_optimizer=zerocore.optim.AdamW)
                losses.append(torch.stack(made).tolist())
    return losses


@pytest.mark.nightly
def test_sums_in_order_are_those_of_gloo() -> None:
    """An exchange, a sum and at stage 0 a gather follow each other on streams."""
    expected = run_ranks(train_in_order, 3, False, launch="torchrun", timeout=150)
    found = run_ranks(train_in_order, 3, True, launch="torchrun", timeout=150)
    assert found == expected


def train_narrow(on_device: bool) -> list[list[float]]:
    """Trains with parameters gathered as numbers of one byte."""
    device, extension = start(on_device)
    losses = []
    for _ in in_turns(extension, 2):
        for dtype in (torch.float8_e4m3fn, torch.int8):
            mixed = zerocore.MixedPrecision(gather_dtype=dtype)
            model = zerocore.shard(make_model(device), units=[Block], mixed_precision=mixed)
            losses.append(torch.stack(train(model, device)).tolist())
    return losses


def test_narrow_gathers_have_the_losses_of_gloo() -> None:
    """The gather's stream writes the numbers, the compute stream reads them."""
    expected = run_ranks(train_narrow, 2, False, launch="torchrun", timeout=150)
    found = run_ranks(train_narrow, 2, True, launch="torchrun", timeout=150)
    assert found == expected


def gathers_before_each_call(on_device: bool, offload: zerocore.Offload | None) -> list[int]:
    """Returns how many gathers of a forward were issued before each block computes."""
    device, _ = start(on_device)
    model = zerocore.shard(make_model(device), stage=3, units=[Block], offload=offload)
    train(model, device, make_optimizer=zerocore.optim.AdamW)
    found: list[int] = []
    before = state_of(model).engine.counters["all_gather"].count
    for block in model:
        block.up.register_forward_pre_hook(
            lambda *_: found.append(state_of(model).engine.counters["all_gather"].count - before)
        )
    model(torch.ones(4, WIDTH, device=device)).sum().backward()
    return found


def test_a_device_computes_before_the_host_waits_for_weights() -> None:
    """All-gathers of offloaded weights come a call later, see Note [Delayed prefetch]."""
    for offload in (zerocore.Offload(), zerocore.Offload(parameters="cpu")):
        (found, _) = run_ranks(gathers_before_each_call, 2, True, offload, launch="torchrun")
        assert found == [1, 2, 3, 4]
    assert run_ranks(gathers_before_each_call, 2, True, None, launch="torchrun")[0] == [2, 3, 4, 4]
