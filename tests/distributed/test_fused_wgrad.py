"""Gradients of linear layers that are written where they are reduced: the same bits, no copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.by_night import by_night
from tests.distributed.chain import Chain
from tests.distributed.chain import step as chain_step
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of
from zerocore.planning.prediction import planned_events

pytestmark = pytest.mark.distributed
WIDTH, VOCABULARY = 13, 11  # no shard ends with a parameter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Awkward(Block):
    """Uses a weight twice, one without its module, one in a graph that is made again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(self.wide(x)) + self.narrow(F.linear(x, self.wide.weight))
        return x + checkpoint(super().forward, x, use_reentrant=False)


class Text(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Awkward(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, self.blocks[0]]:  # a unit of two calls
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def shard(fused: bool, tied: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zerocore.shard(Text(tied), units=[Block], fuse_wgrad=fused, **options)


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 5), generator=generator)


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, gradients' norms and weights after steps of one micro-batch and of two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        for turn in range(1 + step // 2):
            held = turn == 0 and step == 3
            with zerocore.no_sync(model) if held else nullcontext():
                loss = model(tokens(10 * step + turn))
                loss.backward()
            found.append(loss.detach())
        found.append(torch.as_tensor(zerocore.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 2)
    return [*found, *zerocore.full_state_dict(model).values()]


def same_bits(world: int, stages: int) -> None:
    """At so many stages with each set of options, in turn."""
    narrow = {"mixed_precision": zerocore.MixedPrecision(torch.bfloat16, torch.float32)}
    wire = {"mixed_precision": zerocore.MixedPrecision(torch.bfloat16, wire_dtype=torch.bfloat16)}
    cases: list[dict[str, Any]] = [{}, narrow, wire]
    more = {"tied": True, "accumulate": "full", "reductions_in_flight": 2}
    cases += [more, {"gradient_divide_factor": 1.0}]
    cases += [{"offload": zerocore.Offload(states="cpu", gradients="cpu")}] if world == 2 else []
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        cases += [{"group": mesh}, {"group": mesh, **wire}]
        cases += [{"group": mesh, "replicas_share": "optimizer"}]
    for turn, (number, case) in product(range(stages), enumerate(cases)):
        stage = (turn + number) % 4
        least = 2 if "offload" in case else 1 if "replicas_share" in case else 0
        if stage < least:
            continue
        plain = trained(shard(False, stage=stage, **case))
        fused = trained(shard(True, stage=stage, **case))
        assert all(map(torch.equal, plain, fused)), (stage, case)


@pytest.mark.parametrize(("world", "stages"), [*by_night((1, 4), (2, 4), (3, 4), (4, 4)), (4, 2)])
def test_no_bit_changes(world: int, stages: int) -> None:
    run_ranks(same_bits, world, world, stages, timeout=300)


def moved(model: nn.Module, step: Callable[[nn.Module], object]) -> int:
    """Bytes of gradients that a step copies into buckets or scales in place."""
    before = state_of(model).engine.moved_nbytes
    step(model)
    return state_of(model).engine.moved_nbytes - before


def step(model: nn.Module) -> None:
    model(tokens(0)).backward()
    model.zero_grad()


def bytes_of(model: nn.Module) -> tuple[int, int, int]:
    """Of all gradients, of those that are copied, and of this rank's shards with their padding."""
    state = state_of(model)
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(("blocks.0", "blocks.1"))
    }
    sizes = {p.fqn: p.shard.full_tensor().nbytes for unit in state.units for p in unit.params}
    layouts = [state.engine.layout(unit.index) for unit in state.units]
    shards = [region.shard_numel for layout in layouts for region in layout.regions]
    rest = sum(size for name, size in sizes.items() if name not in linears)
    return sum(sizes.values()), rest, 4 * sum(shards)


def counts(world: int) -> None:
    for stage in range(4):
        for fused in (False, True):
            model = shard(fused, stage=stage)
            total, rest, shards = bytes_of(model)
            step(model)
            sums = world == 1 or (world == 4 and stage == 0) or stage > 0
            expected = total if not fused or world == 3 else rest + (0 if sums else shards)
            assert moved(model, step) == expected, (stage, fused)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_linear_layers_have_written_is_not_copied(world: int) -> None:
    """Gloo's own all-reduce alone leaves nothing to be summed here, so shards are scaled."""
    run_ranks(counts, world, world)


def awkward_backwards() -> None:
    """Hooks keep gradients, others choose some or differentiate them, some steps fail."""
    for stage in (1, 3):
        found = []
        for fused in (False, True):
            model = shard(fused, stage=stage)
            kept: list[Tensor] = []
            hooked = model.blocks[0].wide.register_forward_hook(
                lambda module, *_, kept=kept: module.weight.register_hook(kept.append) and None
            )
            model(tokens(0)).backward()
            hooked.remove()
            model(tokens(1)).backward()  # with what the hook has kept
            found += [[each.clone() for each in kept]]
            x = torch.randn(2, WIDTH, requires_grad=True, generator=torch.manual_seed(1))
            block = model.blocks[0]
            found[-1] += torch.autograd.grad(block(x).sum(), x)
            with zerocore.unsharded(model):
                (first,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
                found[-1] += torch.autograd.grad(first.sum(), x)
                with torch.autocast("cpu", torch.bfloat16):
                    block(x).float().sum().backward()
            with pytest.raises(ZeroDivisionError):
                failing = model(tokens(2))
                failing.register_hook(lambda _: 1 // 0)
                failing.backward()
            loss = model(tokens(3))
            loss.backward()
            found[-1] += [loss.detach()] + [p.grad.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, *found)), stage


def test_awkward_backwards_have_the_same_gradients() -> None:
    run_ranks(awkward_backwards, 2)


def copies() -> None:
    model = shard(True)
    with zerocore.unsharded(model):
        linear = model.blocks[0].wide
        x = torch.randn(3, WIDTH)
        for made in (copy.deepcopy(linear), pickled(linear)):
            assert type(made) is nn.Linear and torch.equal(made(x), linear(x))
        assert type(type(linear)(2, 3)) is nn.Linear


def pickled(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def test_copies_of_layers_are_plain() -> None:
    run_ranks(copies, 1)


def predicted(world: int) -> None:
    """Events and bytes, of blocks that are taken when a backward begins."""
    for stage, number in product(range(4), (1, 2)):
        torch.manual_seed(0)
        chain = Chain()
        options: dict[str, Any] = {"stage": stage, "reductions_in_flight": number}
        model = zerocore.shard(chain, units=[*chain.blocks], fuse_wgrad=True, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for turn in range(4):
            events = chain_step(model, optimizer)
            if turn > 0:
                actual = [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events]
                assert actual == planned_events(model), (stage, number)
        assert zerocore.memory_usage(model, optimizer) == zerocore.predict_memory(model)
        assert state_of(model).engine.pool_stats.in_use_nbytes == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plans_are_true_to_the_byte(world: int) -> None:
    run_ranks(predicted, world, world)
