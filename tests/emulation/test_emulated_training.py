"""Training on the emulated link: unmodified peers and zerocore compute what one process does.

A replica's shard is this rank's shard. So where parameters are sharded, training equals that of one
process only for a model whose shards are all equal and stay so; these tests build such models.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerocore
from tests.distributed import chain
from tests.distributed.scripts import run_program
from zerocore.common.events import COLLECTIVES

WIDTH = 32  # a bias of 128 bytes, so that a unit of zerocore has no padding
Wrap = Callable[[nn.Module], nn.Module]


class Branches(nn.Module):
    """The mean of equal branches: their parameters are a unit's equal shards."""

    def __init__(self, num_branches: int) -> None:
        super().__init__()
        branches = [nn.Linear(WIDTH, WIDTH) for _ in range(num_branches)]
        for branch in branches:
            branch.load_state_dict(branches[0].state_dict())
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([branch(x).relu() for branch in self.branches]).mean(0)


def train(
    model: nn.Module, after_backward: Callable[[nn.Module], None] | None = None
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        inputs = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] != losses[0]
    return losses


def make_branches(world_size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Branches(world_size) for _ in range(3)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", range(4))
def test_zerocore(stage: int, world_size: int) -> None:
    expected = train(make_branches(world_size))
    with zerocore.emulate(world_size, "10GB/s", "10us"):
        model = zerocore.shard(make_branches(world_size), stage=stage, units=[Branches])
        with zerocore.reporting.record_events(model) as events:
            losses = train(model)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    collectives = [event for event in events if event.op in ("all_gather", "reduce_scatter")]
    assert bool(collectives) == (stage > 0 and world_size > 1)
    assert all(event.done_ns >= event.issued_ns for event in collectives)


@pytest.mark.parametrize("stage", range(4))
def test_sums_over_replicas_begin_within_the_backward(stage: int) -> None:
    """Right before the next unit's reduction, also where that needs no memory of the last."""
    with zerocore.emulate(8, "10GB/s", "10us"):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = zerocore.shard(chain.Chain(), stage=stage, group=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            events = chain.step(model, optimizer)
        planned = zerocore.planning.predict_events(model)
    found = [(event.op, event.unit, event.nbytes) for event in events if event.op in COLLECTIVES]
    assert found == planned
    first = "reduce_scatter" if stage else "all_reduce"
    assert [op for op, *_ in found if op != "all_gather"] == [first, "all_reduce"] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ddp(world_size: int) -> None:
    expected = train(make_branches(2))
    with zerocore.emulate(world_size, "10GB/s", "10us"):
        losses = train(nn.parallel.DistributedDataParallel(make_branches(2)))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)


def repeat_first_rows(model: nn.Module, world_size: int, *, grads: bool) -> None:
    """Makes the rows that each rank of FSDP2 holds of a parameter (or gradient) those of rank 0."""
    for parameter in model.parameters():
        tensor = parameter.grad if grads else parameter.data
        tensor.copy_(tensor.chunk(world_size)[0].repeat(world_size, *[1] * (tensor.dim() - 1)))


def with_fsdp2(model: nn.Module) -> nn.Module:
    for block in model.children():
        fully_shard(block)
    return fully_shard(model)


def with_fsdp2_and_prefetch(model: nn.Module) -> nn.Module:
    sharded = with_fsdp2(model)
    sharded._set_unshard_async_op(True)
    sharded[0].set_modules_to_forward_prefetch([sharded[1]])
    sharded[1].set_modules_to_backward_prefetch([sharded[0]])
    return sharded


@pytest.mark.parametrize("wrap", [with_fsdp2, with_fsdp2_and_prefetch])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_fsdp2(world_size: int, wrap: Wrap) -> None:
    reference = make_branches(2)
    repeat_first_rows(reference, world_size, grads=False)
    expected = train(reference, lambda model: repeat_first_rows(model, world_size, grads=True))
    with zerocore.emulate(world_size, "10GB/s", "10us"):
        losses = train(wrap(make_branches(2)))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)


def test_subgroups_have_the_link_of_the_default_group() -> None:
    with zerocore.emulate(4, "3GB/s", "5us"):
        group = torch.distributed.new_group([0, 1])
        backend = group._get_backend(torch.device("cpu"))
        assert (backend.link.bandwidth, backend.link.latency) == pytest.approx((3e9, 5e-6))
        assert group.size() == 2
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor, group=group)
        assert tensor.item() == 2.0


def test_init_process_group() -> None:
    torch.distributed.init_process_group(
        "emulated", rank=0, world_size=2, store=torch.distributed.HashStore()
    )
    try:
        with pytest.raises(ValueError, match="destroy_process_group"):
            zerocore.emulate(2)
    finally:
        torch.distributed.destroy_process_group()


# -- ends -------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist, zerocore
ending = sys.argv[1]
emulation = zerocore.emulate(8, latency=100.0)
work = dist.all_reduce(torch.ones(3), async_op=True)
dist.all_reduce(torch.ones(3), async_op=True)
work.get_future().then(lambda future: print("told"))
if ending == "destroyed":
    emulation.close()
    try:
        work.wait()
    except RuntimeError as error:
        print("destroyed" in str(error))
    try:
        dist.all_reduce(torch.ones(1))
    except ValueError:
        print("no group")
elif ending == "dropped":
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._world.pg_map.clear()
    del emulation, group
elif ending == "failed":
    raise SystemExit(3)
print("end")
"""


@pytest.mark.parametrize("ending", ["left", "destroyed", "dropped", "failed"])
def test_ends_in_mid_flight(ending: str) -> None:
    ((code, output),) = run_program(SCRIPT, 1, ending)
    assert code == (3 if ending == "failed" else 0), output
    assert "told" in output
    assert "Error" not in output and "terminate" not in output, output
    if ending == "destroyed":
        assert output.count("True") == 1 and "no group" in output
