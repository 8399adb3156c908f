"""Options of communication on real ranks, and mistakes in them on one rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.chain import WIDTH, Chain
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from zerocore import Communication
from zerocore.model.state import find_state


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
            found.append([full_of(param.grad) for param in model.parameters()])
        for more in found[1:]:
            assert all(map(torch.equal, more, found[0])), (stage, options)


@pytest.mark.one_by_day
@pytest.mark.parametrize("world", [2, 4])
def test_reductions_in_flight_change_no_bit(world: int) -> None:
    run_ranks(reduce_at_a_time, world, world)


def register() -> None:
    """Gloo offers no registered memory."""
    for stage in range(4):
        found = []
        for registered in (True, False):
            torch.manual_seed(0)
            model = zerocore.shard(
                Chain(), stage=stage, communication=Communication(registered=registered)
            )
            model(torch.ones(2, WIDTH)).sum().backward()
            found.append([full_of(param.grad) for param in model.parameters()])
            texts = zerocore.describe(model).title(), str(zerocore.report(model))
            offer = "registered memory: not offered by gloo"
            assert all((offer in text) is registered for text in texts)
        assert all(map(torch.equal, *found))


def test_a_backend_without_registered_memory_is_named() -> None:
    run_ranks(register, 2)


def test_one_rank_registers_no_memory() -> None:
    model = zerocore.shard(Chain(), communication=Communication(registered=True))
    assert "registered memory: none with one rank" in zerocore.describe(model).title()


def mistake(message: str, error: type[Exception], options: dict[str, Any]) -> None:
    model = Chain()
    with pytest.raises(error if dist.get_rank() == 1 else RuntimeError, match=message):
        zerocore.shard(model, **options if dist.get_rank() == 1 else {})
    assert find_state(model) is None


@pytest.mark.parametrize(
    ("message", "error", "options"),
    [
        ("must be a zerocore.Communication", TypeError, {"communication": {"prefetch": 1}}),
        (
            "regather: 3 ranks do not divide",
            ValueError,
            {"communication": Communication(regather=3)},
        ),
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
    near = Communication(regather=2 if dist.get_rank() else None)
    with pytest.raises(ValueError, match=r"rank 0 has .*regather=1.* has .*regather=2"):
        zerocore.shard(Chain(), communication=near)


def test_ranks_with_other_options_are_refused() -> None:
    run_ranks(differ, 4)
