"""Both spellings of an option of shard on real ranks, and mistakes in them on one rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks
from zerocore import Communication
from zerocore.model.state import find_state, state_of

pytestmark = pytest.mark.distributed
OPTIONS: dict[str, Any] = {
    "prefetch": 2,
    "reductions_in_flight": 2,
    "accumulate": "full",
    "regather": 2,
    "overlap_reductions": False,
    "retain_last": False,
    "static_graph": True,
    "gradient_divide_factor": 1.0,
    "sync_buffers": True,
    "registered": True,
}


def gradients(**options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = zerocore.shard(Chain(), **options)
    assert state_of(model).config.communication == Communication(**OPTIONS)
    with zerocore.no_sync(model):
        model(torch.ones(2, WIDTH)).sum().backward()
    model(torch.ones(2, WIDTH)).sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def compare() -> None:
    grouped = gradients(communication=Communication(**OPTIONS))
    for first, second in zip(grouped, gradients(**OPTIONS), strict=True):
        assert torch.equal(first, second)


def test_both_spellings_are_equal() -> None:
    run_ranks(compare, 4)


def reduce_at_a_time(world: int) -> None:
    """Gradients of two backwards, the second added, with few and with many reductions in flight."""
    wires = {"mixed_precision": zerocore.MixedPrecision(wire_dtype=torch.bfloat16)}
    replicas: dict[str, Any] = {"group": init_device_mesh("cpu", (2, world // 2))}
    for stage, options in product((0, 2, 3), ({}, wires, replicas, wires | replicas)):
        found = []
        for number in (1, 2, 8):
            torch.manual_seed(0)
            communication = Communication(reductions_in_flight=number)
            model = zerocore.shard(Chain(), stage=stage, communication=communication, **options)
            for seed in range(2):
                torch.manual_seed(10 * seed + dist.get_rank())
                model(torch.randn(2, WIDTH)).sum().backward()
            found.append([param.grad.full_tensor() for param in model.parameters()])
        for more in found[1:]:
            assert all(map(torch.equal, more, found[0])), (stage, options)


@pytest.mark.parametrize("world", [2, 4])
def test_reductions_in_flight_change_no_bit(world: int) -> None:
    run_ranks(reduce_at_a_time, world, world)


def register() -> None:
    """Gloo offers no registered memory."""
    for stage in range(4):
        found = []
        for registered in (True, False):
            torch.manual_seed(0)
            model = zerocore.shard(Chain(), stage=stage, registered=registered)
            model(torch.ones(2, WIDTH)).sum().backward()
            found.append([param.grad.full_tensor() for param in model.parameters()])
            texts = zerocore.describe(model).title(), str(zerocore.report(model))
            offer = "registered memory: not offered by gloo"
            assert all((offer in text) is registered for text in texts)
        assert all(map(torch.equal, *found))


def test_a_backend_without_registered_memory_is_named() -> None:
    run_ranks(register, 2)


def test_one_rank_registers_no_memory() -> None:
    model = zerocore.shard(Chain(), registered=True)
    assert "registered memory: none with one rank" in zerocore.describe(model).title()


def mistake(message: str, error: type[Exception], options: dict[str, Any]) -> None:
    model = Chain()
    with pytest.raises(error if dist.get_rank() == 1 else RuntimeError, match=message):
        zerocore.shard(model, **options if dist.get_rank() == 1 else {})
    assert find_state(model) is None


@pytest.mark.parametrize(
    ("message", "error", "options"),
    [
        ("prefetch= is given twice", ValueError, {"communication": Communication(), "prefetch": 1}),
        ("must be a zerocore.Communication", TypeError, {"communication": {"prefetch": 1}}),
        ("prefetch must be 0 or more", ValueError, {"prefetch": -1}),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all(
    message: str, error: type[Exception], options: dict[str, Any]
) -> None:
    run_ranks(mistake, 2, message, error, options)


def test_reductions_in_flight_are_counted() -> None:
    with pytest.raises(ValueError, match="reductions_in_flight must be 1 or more, got 0"):
        Communication(reductions_in_flight=0)
    with pytest.raises(TypeError, match="reductions_in_flight"):
        Communication(reductions_in_flight=1.5)  # type: ignore[arg-type]


def differ() -> None:
    with pytest.raises(ValueError, match=r"rank 0 has ShardConfig\(.*prefetch=0.*prefetch=1"):
        zerocore.shard(Chain(), communication=Communication(prefetch=dist.get_rank()))
    near = {"regather": 2} if dist.get_rank() else {}
    with pytest.raises(ValueError, match=r"rank 0 has .*regather=1.* has .*regather=2"):
        zerocore.shard(Chain(), **near)


def test_ranks_with_other_options_are_refused() -> None:
    run_ranks(differ, 4)
