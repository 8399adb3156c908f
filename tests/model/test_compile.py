"""torch.compile of blocks and of whole models: graphs end at units and are made once."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
import zerocore.fsdp
from tests.by_night import by_night, stage_3_by_day
from tests.distributed.harness import run_ranks
from tests.distributed.training import adamw, assert_same_state, case_named
from tests.zoo_case import Case

WAYS = ("blocks_before", "blocks_after", "model_before", "model_after", "wrapped")
NUM_STEPS = 4


class Block(nn.Module):
    """One graph, whatever the number of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks between two layers."""

    def __init__(self, classes: list[type[Block]]) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(cls() for cls in classes)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def seeded_stack(classes: list[type[Block]] | None = None) -> Any:
    torch.manual_seed(0)
    return Stack(classes or 3 * [Block])


def make_counter(backend: str) -> Any:
    """A backend that counts the graphs it is given."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return CompileCounterWithBackend(backend)


def compile_and_shard(way: str, model: Any, counter: Any, **options: Any) -> Any:
    """The module to call; `model` is sharded."""

    def compile_in_place() -> None:
        for module in model.blocks if way.startswith("blocks") else [model]:
            module.compile(backend=counter, fullgraph=way.startswith("blocks"))

    if way.endswith("before"):
        compile_in_place()
    zerocore.shard(model, **options)
    if way.endswith("after"):
        compile_in_place()
    return torch.compile(model, backend=counter) if way == "wrapped" else model


def rank_batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train_compiled(way: str, stage: int, backend: str) -> list[int]:
    """The number of graphs after each step; all else must be as without compiler and ranks."""
    model, plain, counter = seeded_stack(), seeded_stack(), make_counter(backend)
    run = compile_and_shard(way, model, counter, stage=stage)
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    num_graphs = []
    for step in range(NUM_STEPS):
        run(rank_batch(step, dist.get_rank())).square().mean().backward()
        world_size = dist.get_world_size()
        losses = [plain(rank_batch(step, rank)).square().mean() for rank in range(world_size)]
        (sum(losses, torch.zeros(())) / world_size).backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        num_graphs.append(counter.frame_count)
        evaluate(run, model, plain, step)
        num_graphs.append(counter.frame_count)
    state = zerocore.full_state_dict(model, rank0_only=False)
    assert_same_state(state, plain.state_dict())
    return num_graphs


def evaluate(run: Any, model: nn.Module, plain: nn.Module, step: int) -> None:
    x = rank_batch(step, dist.get_rank())
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(x), plain(x))
    model.train()


def train_all_ways(stage: int) -> None:
    """At stage 3 in all ways, at the others in two each: the compiler sees no stage."""
    for way in WAYS if stage == 3 else (WAYS[stage], WAYS[stage + 2]):
        print(way, flush=True)
        # One graph that records and one that does not, for all blocks and steps.
        assert train_compiled(way, stage, "aot_eager") == [1] + (2 * NUM_STEPS - 1) * [2]
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert all("zerocore gathers a unit here" in reason for reason in breaks)
        assert bool(breaks) == (not way.startswith("blocks"))


@stage_3_by_day
def test_one_graph_for_all_blocks_and_steps(stage: int) -> None:
    run_ranks(train_all_ways, 2, stage)


def train_stages(stages: tuple[int, ...]) -> None:
    for stage in stages:
        print(f"stage {stage}", flush=True)
        assert train_compiled("blocks_after", stage, "aot_eager")[-1] == 2


@pytest.mark.parametrize(
    ("world_size", "stages"), [*by_night((1, (0, 3)), (3, (3,)), (4, (2, 3))), (3, (1,))]
)
def test_parity(world_size: int, stages: tuple[int, ...]) -> None:
    """Two ranks are above, at all stages."""
    run_ranks(train_stages, world_size, stages, timeout=120)


def train_mixed(stage: int, compiled: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, main weights, number of graphs."""
    mixed = zerocore.MixedPrecision(
        torch.bfloat16, torch.float32, output_dtype=torch.float32, keep_fp32=("*norm",)
    )
    model, counter = seeded_stack(), make_counter("aot_eager")
    zerocore.shard(model, stage=stage, mixed_precision=mixed)
    for block in model.blocks if compiled else []:
        block.compile(backend=counter, fullgraph=True)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(rank_batch(step, dist.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, zerocore.full_state_dict(model), counter.frame_count


def compare_mixed() -> None:
    """With what is not compiled, which test_mixed_precision.py compares with one process."""
    for stage in range(4):
        expected, state, _ = train_mixed(stage, compiled=False)
        losses, compiled_state, num_graphs = train_mixed(stage, compiled=True)
        assert losses == expected and losses[-1] != losses[0]
        assert_same_state(compiled_state, state)
        assert num_graphs == 1


@pytest.mark.nightly
def test_mixed_precision() -> None:
    run_ranks(compare_mixed, 2, timeout=120)


@pytest.mark.nightly
def test_inductor() -> None:
    run_ranks(train_compiled, 2, "blocks_after", 3, "inductor", timeout=200)


def make_class(index: int) -> type[Block]:
    """A block whose code is its own, as that of another class of a user."""
    code = Block.forward.__code__.replace(co_name=f"forward{index}")
    return type(f"Block{index}", (Block,), {"forward": FunctionType(code, globals())})


def compile_many_classes() -> None:
    classes = [make_class(index) for index in range(12)]
    model, counter = seeded_stack(classes), make_counter("eager")
    run = compile_and_shard("wrapped", model, counter, units=classes)
    for _ in range(2):
        run(rank_batch(0, 0)).sum().backward()
        assert counter.frame_count == len(classes)


def test_each_class_of_units_is_compiled() -> None:
    """Compilers give up on a function after 8 versions; entering a unit must not be one."""
    run_ranks(compile_many_classes, 2)


def refuse_one_graph() -> None:
    run = torch.compile(zerocore.shard(seeded_stack()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"zerocore gathers a unit here.*compile the units"):
        run(rank_batch(0, 0))


def test_whole_model_in_one_graph_is_refused() -> None:
    run_ranks(refuse_one_graph, 2)


def count_huggingface_graphs(model: Any, plain: nn.Module, case: Case, way: str) -> int:
    """Graphs after the first step; later ones make none. Losses are those of `plain`."""
    counter = make_counter("eager")
    for module in model.model.layers if way == "layers" else [model]:
        module.compile(backend=counter, fullgraph=way == "layers")
    num_graphs = []
    for step in range(3):
        batch = {**case.seeded_batch(step, dist.get_rank(), 2), "use_cache": False}
        loss = case.loss(model, batch)
        torch.testing.assert_close(loss, case.loss(plain, batch))
        loss.backward()
        model.zero_grad()
        num_graphs.append(counter.frame_count)
    assert num_graphs[0] == num_graphs[-1], num_graphs
    return num_graphs[0]


def compile_huggingface(name: str) -> None:
    case = case_named(name)
    for way in ("layers", "model"):
        plain, model = case.seeded_build(), zerocore.shard(case.seeded_build())
        num_graphs = count_huggingface_graphs(model, plain, case, way)
        # The layers' graph; in the model also those between units (masks, positions, loss).
        assert num_graphs == 1 if way == "layers" else 2 <= num_graphs <= 8, (way, num_graphs)


@pytest.mark.nightly
def test_huggingface() -> None:
    pytest.importorskip("transformers")
    run_ranks(compile_huggingface, 2, "hf_qwen3_tied", timeout=200)


def losses_of(model: Any, run: Any, compiles_step: bool) -> Tensor:
    """Losses of this rank; the last ones show whether all updates arrived."""
    optimizer, losses = adamw(model.parameters()), []
    step = torch.compile(optimizer.step, backend="aot_eager") if compiles_step else optimizer.step
    for index in range(NUM_STEPS):
        loss = run(rank_batch(index, dist.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())
        step()
        optimizer.zero_grad()
    return torch.tensor(losses)


def compile_step(stage: int) -> None:
    eager, compiled = (
        losses_of(model := zerocore.shard(seeded_stack(), stage=stage), model, compiles)
        for compiles in (False, True)
    )
    assert torch.equal(eager, compiled) and eager[0] != eager[-1]


@stage_3_by_day
def test_step(stage: int) -> None:
    run_ranks(compile_step, 2, stage)


def fully_sharded() -> Any:
    model = seeded_stack()
    for block in model.blocks:
        zerocore.fsdp.fully_shard(block)
    return zerocore.fsdp.fully_shard(model)


def compile_fully_sharded() -> None:
    plain = losses_of(model := fully_sharded(), model, False)
    run = torch.compile(model := fully_sharded(), backend="aot_eager")
    assert torch.equal(losses_of(model, run, False), plain)
    torch.testing.assert_close(losses_of(model := fully_sharded(), model, True), plain)


def test_fully_sharded() -> None:
    """The whole model, then the step of its optimizer."""
    run_ranks(compile_fully_sharded, 2, timeout=120)
