"""Collectives and hooks of a program's own do as under ``torch.distributed.fsdp``."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    Trained,
    check_same,
    loss_of,
    make_net,
    shard_blocks,
    tokens_of,
    train,
    train_both,
)


class _Comm:
    """Counts its calls."""

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Comm):
    """Through a collective on lists."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        to, own = output_tensor, input_tensor
        self.sizes[to.nbytes, own.nbytes] += 1
        parts = list(to.chunk(group.size()))
        work = dist.all_gather(parts, own, group, async_op=True)
        if async_op:
            return work
        work.wait()
        return None


class Reduce(_Comm):
    """Through a sum of everything, which has ended when it returns."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        to, full = output_tensor, input_tensor
        self.sizes[full.numel(), to.numel()] += 1
        total = full.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        to.copy_(total.chunk(group.size())[group.rank()])


def set_own(model: Any) -> tuple[Gather, Reduce]:
    """On all blocks but the last."""
    gather, reduce = Gather(), Reduce()
    for block in model.blocks[:2]:
        block.set_custom_all_gather(gather)
        block.set_custom_reduce_scatter(reduce)
    return gather, reduce


def uses_own(shape: tuple[int, ...], fsdp: Any, model: Any, **options: Any) -> Trained:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    shard_blocks(fsdp, model, mesh=mesh, **options)
    gather, reduce = set_own(model)
    trained = train(model)
    assert sum(gather.sizes.values()) >= 12  # two blocks, four steps, forward or backward too
    assert sum(reduce.sizes.values()) == 8
    for full, own in (*gather.sizes, *reduce.sizes):
        assert full == own * shape[-1]
    return trained


def own_collectives_are_called() -> None:
    check_same(train_both(partial(uses_own, (dist.get_world_size(),))))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    check_same(
        train_both(partial(uses_own, (dist.get_world_size(),), mp_policy=policy)),
        rtol=2e-2,
        atol=2e-2,
    )


def own_collectives_beside_replicas() -> None:
    check_same(train_both(partial(uses_own, (2, 2))))


def clips_and_accumulates(fsdp: Any, model: Any) -> Trained:
    """The hook is not linear, so it must see the gradients of one backward only."""
    shard_blocks(fsdp, model)
    calls = []

    def hook(reduced: Tensor) -> None:
        calls.append(reduced.numel())
        reduced.clamp_(-2e-3, 2e-3)

    for module in (model, *model.blocks):
        module.set_all_reduce_hook(hook)

    def step(model: Any, index: int) -> float:
        for micro in range(2):
            loss = loss_of(model, tokens_of(index, micro))
            loss.backward()
        return loss.item()

    trained = train(model, step)
    assert len(calls) == 4 * 2 * 4
    return trained


def hooks_after_reductions() -> None:
    check_same(train_both(clips_and_accumulates))


def gradients_that_are_set_apart_come_back() -> None:
    """A backward that raises behind a reduction leaves the gradients of the one before it."""
    model = shard_blocks(zerocore.fsdp, make_net())
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda reduced: None)
    loss_of(model, tokens_of(0)).backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    handle = model.embed.register_full_backward_hook(_raise)
    with pytest.raises(RuntimeError, match="once"):
        loss_of(model, tokens_of(1)).backward()
    handle.remove()
    model.reset_iter_state()
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_local(), grad)


def _raise(*args: Any) -> None:
    raise RuntimeError("once")


def refuses() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(zerocore.fsdp, make_net(), mesh=mesh)
    with pytest.raises(ValueError, match="native HSDP"):
        model.set_all_reduce_hook(lambda reduced: None, stream=object())
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_custom_all_gather(Gather())
    with pytest.raises(AssertionError, match="exclude each other"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm"):
        model.set_symm_mem_for_comm()


def counted(fsdp: Any, reshards: bool) -> dict[str, int]:
    """Collectives of a second step, by name."""
    model = shard_blocks(fsdp, make_net(), reshard_after_forward=reshards)
    loss_of(model, tokens_of(0)).backward()
    with CommDebugMode() as mode:
        loss_of(model, tokens_of(1)).backward()
    return {str(op): count for op, count in mode.comm_counts.items() if count}


def counts_are_those_of_fsdp2() -> None:
    """Gathers of forward and backward, and reductions of each unit."""
    import torch.distributed.fsdp as torch_fsdp

    for reshards in (True, False):
        ours = counted(zerocore.fsdp, reshards)
        assert ours == counted(torch_fsdp, reshards)
        assert sum(ours.values()) == (12 if reshards else 8)


def shards_of_stage_three_are_counted() -> None:
    """``zerocore.shard`` keeps the unit that a forward leaves last, unless it is told not to."""
    for retains, gathers in ((True, 9), (False, 10)):
        model: Any = make_net()
        zerocore.shard(
            model, stage=3, communication=zerocore.Communication(retain_last=retains, prefetch=0)
        )
        for step in range(2):
            with CommDebugMode() as mode:
                loss_of(model, tokens_of(step)).backward()
        names = {str(op): count for op, count in mode.comm_counts.items() if count}
        gathered = sum(count for name, count in names.items() if "gather" in name)
        assert gathered == gathers, names


def modules_after_a_forward() -> None:
    """A root that is given ``reshard_after_forward=True`` shows shards while a loss is computed."""
    model = shard_blocks(zerocore.fsdp, make_net(), reshard_after_forward=True)
    assert isinstance(model, nn.Module)
    out = model(tokens_of(0))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    out.sum().backward()


def on_two() -> None:
    own_collectives_are_called()
    hooks_after_reductions()
    gradients_that_are_set_apart_come_back()
    refuses()


def counts() -> None:
    counts_are_those_of_fsdp2()
    shards_of_stage_three_are_counted()
    modules_after_a_forward()


def test_collectives_and_hooks_of_a_program() -> None:
    run_ranks(on_two, 2, timeout=120)


@pytest.mark.nightly
def test_collectives_of_uneven_rows() -> None:
    run_ranks(own_collectives_are_called, 3, timeout=120)


@pytest.mark.nightly
def test_collectives_beside_replicas() -> None:
    run_ranks(own_collectives_beside_replicas, 4, timeout=120)


def test_comm_debug_mode_counts_what_engines_issue() -> None:
    run_ranks(counts, 2, timeout=120)
