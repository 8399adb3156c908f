"""memory_budget: refuses before anything is allocated, names changes that fit, with true bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.model.state import find_state, state_of

WIDTH = 64
ON_DEMAND = zerocore.Communication(prefetch=0)


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def make() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))


def mesh_of(num_replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_replicas, 8 // num_replicas))


def used(stage: int, dtype: torch.dtype = torch.float32, **options: Any) -> int:
    """Bytes that the runtime holds on rank 0 of 8 after two steps with Adam."""
    model = zerocore.shard(make().to(dtype), stage=stage, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, WIDTH, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    usage = zerocore.memory_usage(model, optimizer)
    pool = state_of(model).engine.pool_stats.peak_reserved_nbytes
    return usage.parameters + usage.main_weights + usage.gradients + usage.optimizer + pool


def refusal(budget: str | int, **options: Any) -> str:
    model = make()
    with pytest.raises(ValueError, match="memory_budget: stage") as caught:
        zerocore.shard(model, memory_budget=budget, **options)
    assert find_state(model) is None
    return str(caught.value)


def test_a_budget_that_is_met_to_the_byte_is_accepted(fake_group: None) -> None:
    needed = used(stage=1)
    zerocore.shard(make(), stage=1, memory_budget=needed)
    assert f"({needed:,} bytes) for parameters" in refusal(needed - 1, stage=1)


def test_three_changes_that_fit_and_what_they_save(fake_group: None) -> None:
    needed = used(stage=0)
    message = refusal(needed - 1, stage=0)
    changes = re.findall(r"^- (.+): saves .+ \(([\d,]+) bytes\)$", message, re.MULTILINE)
    assert [text.split(" ")[0] for text, _ in changes] == ["stage=1", "stage=2", "stage=3"]
    saved = [int(nbytes.replace(",", "")) for _, nbytes in changes]
    assert saved == [needed - used(stage) for stage in (1, 2, 3)]


def test_only_changes_that_fit_are_named(fake_group: None) -> None:
    message = refusal(used(3, communication=ON_DEMAND), stage=3)
    assert "- communication=zerocore.Communication(prefetch=0) (gathers are" in message
    assert "- parameters in bfloat16" in message
    assert "- 16 ranks" in message
    message = refusal(used(3, dtype=torch.bfloat16), stage=3)
    assert "prefetch" not in message
    assert "No change" in refusal(100, stage=3)


def test_a_change_is_code_that_keeps_the_other_options(fake_group: None) -> None:
    """The call that a refusal names needs what it says, with the options that were given."""
    given = zerocore.Communication(prefetch=3, reductions_in_flight=2)
    one_by_one = zerocore.Communication(prefetch=0, reductions_in_flight=2)
    budget = used(3, communication=one_by_one)
    message = refusal(budget, stage=3, communication=given)
    (call,) = re.findall(r"^- (communication=.+\)) \(gathers", message, re.MULTILINE)
    options = eval(f"dict({call})", {"zerocore": zerocore})
    assert options == {"communication": one_by_one}
    zerocore.shard(make(), stage=3, memory_budget=budget, **options)
    assert "communication=" not in refusal(budget - 1, stage=3, communication=given)


def test_replicas_are_counted_and_fewer_of_them_named(fake_group: None) -> None:
    meshes = {number: mesh_of(number) for number in (4, 2, 1)}
    needed = {
        number: used(3, communication=ON_DEMAND, group=mesh) for number, mesh in meshes.items()
    }
    options = {"stage": 3, "communication": ON_DEMAND, "group": meshes[4]}
    zerocore.shard(make(), memory_budget=needed[4], **options)
    message = refusal(needed[4] - 1, **options)
    assert f"stage 3 on 8 ranks in a (4, 2) mesh needs {needed[4] / 1e3:.2f} kB" in message
    saved = needed[4] - needed[2]
    assert f"- group= a (2, 4) mesh (gathers reach further): saves {saved / 1e3:.2f} kB" in message
    assert "16 ranks in a (4, 4) mesh" in message
    assert "group= a (1, 8) mesh" in refusal(needed[1], **options)
    assert "group=" not in refusal(needed[1] - 1, **options)


def test_replicas_alone_have_gradients_on_the_wire(fake_group: None) -> None:
    """Nothing is sharded, but sums in another dtype take a slot that one rank would not."""
    mixed = zerocore.MixedPrecision(torch.bfloat16)
    options = {"stage": 1, "group": mesh_of(8), "mixed_precision": mixed}
    needed = used(**options)
    zerocore.shard(make(), memory_budget=needed, **options)
    assert f"({needed:,} bytes) for parameters" in refusal(needed - 1, **options)


@pytest.mark.parametrize(("budget", "error"), [("much", ValueError), ([], TypeError)])
def test_a_budget_that_is_no_size(budget: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="memory_budget must be a number or text such as '24GiB'"):
        zerocore.shard(make(), memory_budget=budget)


def refused(budget: int) -> str:
    with pytest.raises(ValueError, match="memory_budget: stage 3 on 2 ranks") as caught:
        zerocore.shard(make(), memory_budget=budget)
    return str(caught.value)


@pytest.mark.distributed
def test_every_rank_refuses_alike() -> None:
    first, second = run_ranks(refused, 2, 1000)
    assert first == second
