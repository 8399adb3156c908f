"""Checkpointed blocks, in all the ways there are: the same gradients and not one gather more."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import case_named
from tests.distributed.values import own_of, range_of
from tests.engine.test_events import EXPECTED

WIDTH = 8
Collectives = list[tuple[str, str]]


class Block(nn.Module):
    """Two products, and a dropout that a recompute must draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.5))
        return out


class Chain(nn.Module):
    """Four equal blocks; each may be called through a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


WRAPPERS: dict[str, dict[str, Any]] = {
    "reentrant": {"checkpoint_impl": CheckpointImpl.REENTRANT},
    "not_reentrant": {"checkpoint_impl": CheckpointImpl.NO_REENTRANT},
    "selective": {
        "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
}
FUNCTIONS = {"function": False, "function_reentrant": True}
KINDS = (*WRAPPERS, *FUNCTIONS)


def checkpoint_blocks(model: Any, kind: str) -> None:
    if kind in FUNCTIONS:
        model.use_reentrant = FUNCTIONS[kind]
        return
    wrap = partial(checkpoint_wrapper, **WRAPPERS[kind])
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
    )


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def make(kind: str, stage: int, when: str, compiled: str) -> nn.Module:
    torch.manual_seed(0)
    model = Chain()
    if compiled == "before":
        compile_blocks(model)
    if when == "before":
        checkpoint_blocks(model, kind)
    zerocore.shard(model, stage=stage)
    if when == "after":
        checkpoint_blocks(model, kind)
    if compiled == "after":
        compile_blocks(model)
    return model


def assert_local_gradients(model: nn.Module, plain: nn.Module) -> None:
    """All ranks compute the same here, so the average is what one process has."""
    for shard, full in zip(model.parameters(), plain.parameters(), strict=True):
        assert full.grad is not None and shard.grad is not None
        start, end = range_of(shard)
        torch.testing.assert_close(own_of(shard.grad), full.grad.flatten()[start:end])


def collectives_of_a_step(model: nn.Module) -> Collectives:
    """Those of the third step, whose order was learned; gradients are compared in each."""
    torch.manual_seed(0)
    plain = Chain()
    for step in range(3):
        x = torch.randn(3, WIDTH, requires_grad=True)
        torch.manual_seed(step)
        with zerocore.reporting.record_events(model) as events:
            model(x).square().mean().backward()
        torch.manual_seed(step)
        plain(x).square().mean().backward()
        assert_local_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()
    names = [(e.op, e.unit.split("._")[0]) for e in events]
    return [(op, name) for op, name in names if op not in ("unshard", "reshard")]


def checkpoint_all_ways(stage: int) -> None:
    # No optimizer here: only stage 3 gathers again.
    expected = [event for event in EXPECTED[stage] if stage == 3 or event[0] != "all_gather"]
    for number, (kind, when) in enumerate(product(KINDS, ("before", "after"))):
        # Any two of kind, when and compiled meet.
        compiled = ("before", "after")[(number // 2 + number) % 2]
        for how in ("no", compiled) if stage == 3 else ("no",):
            print(kind, when, how, flush=True)
            assert collectives_of_a_step(make(kind, stage, when, how)) == expected


@pytest.mark.one_by_day
def test_no_more_collectives(stage: int) -> None:
    run_ranks(checkpoint_all_ways, 2, stage, timeout=150)


def keep_names() -> None:
    torch.manual_seed(0)
    plain = Chain().state_dict()
    for when in ("before", "after"):
        model = make("not_reentrant", 3, when, "no")
        state = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(state, plain, rtol=0.0, atol=0.0)
        changed = {name: value + 1 for name, value in state.items()}
        zerocore.load_full_state_dict(model, changed)
        loaded = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(loaded, changed, rtol=0.0, atol=0.0)


def test_wrappers_do_not_change_the_names_of_a_state() -> None:
    run_ranks(keep_names, 2)


def checkpoint_huggingface(name: str) -> None:
    case = case_named(name)
    recorded = []
    for use_reentrant in (None, False, True):
        model: Any = zerocore.shard(case.seeded_build())
        if use_reentrant is None:
            # As checkpoints do: a hook on the embedding, which counts as one that reads its weight.
            model.enable_input_require_grads()
        else:
            settings = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        for step in range(2):
            batch = case.seeded_batch(step, dist.get_rank(), 2)
            with zerocore.reporting.record_events(model) as events:
                case.loss(model, batch).backward()
            model.zero_grad()
        recorded.append([(e.op, e.unit, e.nbytes) for e in events])
    assert recorded[0] == recorded[1] == recorded[2]


@pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2_tied"])
def test_huggingface(name: str) -> None:
    run_ranks(checkpoint_huggingface, 2, name)
