"""Gradient flags that change, evaluation, and frozen values that change, between a forward and
its backward: gradients come and stay away as in one process that does every rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from zerocore.fsdp import fully_shard

WIDTH = 6
STEPS = 3
SYSTEMS = ("stage 0", "stage 1", "stage 2", "stage 3", "fsdp")


class Block(nn.Module):
    """A frozen layer with an adapter, a trained one, and a frozen table that forwards may move."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.table = nn.Embedding(4, WIDTH).requires_grad_(False)
        self.adapts = True
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.adapts:
            y = y + self.up(self.down(x))
        near = self.table(torch.arange(len(x), device=x.device) % 4)
        if self.moves:
            with torch.no_grad():
                self.table.weight.mul_(0.9).add_(0.1)
        return x + torch.tanh(y * self.gain + near)


class Net(nn.Module):
    """Blocks that may be checkpointed, or left out by a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor, left_out: int = -1, spare: bool = True) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == left_out:
                continue
            if self.reentrant is not None and torch.is_grad_enabled():
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x) + (self.spare(x) if spare else 0)


def build() -> Net:
    torch.manual_seed(7)
    return Net().double()


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Shows the model below its adapters as they do: their flags go off, and on again."""
    adapters = [p for name, p in model.named_parameters() if ".down." in name or ".up." in name]
    for block in model.blocks:
        block.adapts = False
    for p in adapters:
        p.requires_grad_(False)
    yield
    for p in adapters:
        p.requires_grad_(True)
    for block in model.blocks:
        block.adapts = True


@contextmanager
def frozen(*modules: Any) -> Iterator[None]:
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    yield
    for p in trained:
        p.requires_grad_(True)


class Way:
    """One rank of a model under one system; under "plain" all ranks' parts in one process."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.model: Any = build()
        if system == "fsdp":
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        elif system != "plain":
            zerocore.shard(self.model, stage=int(system[-1]), units=[Block])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.2)
        self.grads: list[dict[str, Tensor | None]] = []

    def loss(self, number: int, coins: bool = False, spare: bool = True) -> Tensor:
        """The mean over the ranks that this process stands for, each with inputs of its own."""
        world = dist.get_world_size()
        ranks = range(world) if self.system == "plain" else [dist.get_rank()]
        moves = self.model.blocks[0].moves
        losses = []
        for rank in ranks:
            for block in self.model.blocks:  # a step's forwards on all ranks are one move
                block.moves = moves and rank == ranks[-1]
            left_out = hash((number, rank)) % 4 if coins else -1
            losses.append(self.model(batch(number, rank), left_out, spare).square().mean())
        for block in self.model.blocks:
            block.moves = moves
        return torch.stack(losses).mean()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.system == "fsdp":
            self.model.set_requires_gradient_sync(False)
        with zerocore.no_sync(self.model) if self.system[:5] == "stage" else nullcontext():
            yield
        if self.system == "fsdp":
            self.model.set_requires_gradient_sync(True)

    def train(self, scenario: Scenario) -> Trained:
        """Full gradients of each step, None where there is none, and the parameters at the end."""
        grads = []
        for step in range(STEPS):
            scenario(self, step)
            grads.append({n: full(p.grad) for n, p in self.model.named_parameters()})
            self.optimizer.step()
            self.optimizer.zero_grad()
        return grads, {n: full(p.detach()) for n, p in self.model.named_parameters()}


Scenario = Callable[[Way, int], None]
Trained = tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]


def full(tensor: Any) -> Any:
    whole = getattr(tensor, "full_tensor", None)
    return None if tensor is None else (whole() if whole else tensor).clone()


def reference_loss(way: Way, number: int) -> Tensor:
    with without_adapters(way.model), torch.no_grad():
        return way.loss(number)


def reference_before(way: Way, step: int) -> None:
    ref = reference_loss(way, step)
    (way.loss(step) - ref).backward()


def reference_after(way: Way, step: int) -> None:
    policy = way.loss(step)
    (policy - reference_loss(way, step)).backward()


def reference_between_two(way: Way, step: int) -> None:
    chosen = way.loss(step)
    ref = reference_loss(way, step)
    rejected = way.loss(step + 50)
    ref = ref + reference_loss(way, step + 50)
    (chosen - ref - 0.5 * rejected).backward()


def reference_while_accumulating(way: Way, step: int) -> None:
    for micro in range(3):
        with way.no_sync() if micro < 2 else nullcontext():
            reference_after(way, step + 10 * micro)


def checkpointed(reentrant: bool) -> Scenario:
    def run(way: Way, step: int) -> None:
        way.model.reentrant = reentrant
        total = way.loss(step)
        with frozen(*way.model.blocks), torch.no_grad():  # and what is made again has adapters
            ref = way.loss(step)
        (total - ref).backward()

    return run


def some_frozen_for_a_forward(way: Way, step: int) -> None:
    with frozen(way.model.blocks[1], way.model.head):
        total = way.loss(step)
    total.backward()


def some_frozen_for_the_backward(way: Way, step: int) -> None:
    total = way.loss(step)
    with frozen(way.model.blocks[1].up, way.model.blocks[2]):
        total.backward()


def frozen_between(way: Way, step: int) -> None:
    total = way.loss(step)
    with frozen(way.model.blocks[step % 3].down, way.model.head), torch.no_grad():
        way.loss(step + 1)
    total.backward()


def thawed_between(way: Way, step: int) -> None:
    """Frozen parameters begin to train: for this step's second forward, and then for good."""
    first = way.loss(step)
    if step == 1:
        way.model.blocks[0].base.requires_grad_(True)
        way.model.blocks[2].table.requires_grad_(True)
    second = way.loss(step + 20)
    (first + second).backward()


def frozen_after_warm_up(way: Way, step: int) -> None:
    way.model.blocks[0].requires_grad_(step == 0)
    way.model.blocks[1].gain.requires_grad_(step != 1)
    way.loss(step).backward()


def evaluated_between(context: Any) -> Scenario:
    def run(way: Way, step: int) -> None:
        first, second = way.loss(step), way.loss(step + 20)
        way.model.eval()
        with context():
            way.loss(step + 30)
            way.model.blocks[1](batch(step, 0))
        way.model.train()
        (first, second)[step % 2].backward()
        with context():
            way.loss(step + 40)
        (second, first)[step % 2].backward()

    return run


def skipping(between: bool) -> Scenario:
    """Ranks leave out layers of their own choice, and evaluate between forward and backward."""

    def run(way: Way, step: int) -> None:
        total = way.loss(step, coins=True)
        if between:
            with torch.no_grad():
                way.loss(step + 10, coins=step % 2 == 0)
        total.backward()

    return run


def skipping_beside_a_reference(way: Way, step: int) -> None:
    total = way.loss(step, coins=True)
    with without_adapters(way.model), torch.no_grad():
        ref = way.loss(step + 10, coins=True)
    (total - ref).backward()


def moved_in_forward(way: Way, step: int) -> None:
    for block in way.model.blocks:
        block.moves = True
    if step == 1:
        (way.loss(step) + way.loss(step + 10)).backward()
    else:
        way.loss(step).backward()


def moved_between(way: Way, step: int) -> None:
    total = way.loss(step)
    with torch.no_grad():
        for block in way.model.blocks:
            block.table.weight.mul_(0.5)
    total.backward()


def unused_later(way: Way, step: int) -> None:
    way.loss(step, spare=step == 0).backward()


def unused_in_one_micro_batch(way: Way, step: int) -> None:
    for micro in range(3):
        with way.no_sync() if micro < 2 else nullcontext():
            way.loss(step + 10 * micro, spare=step == 0 or (step == 1 and micro == 0)).backward()


def gradients_of_inputs_between(way: Way, step: int) -> None:
    total = way.loss(step)
    x = batch(step, 0).requires_grad_()
    torch.autograd.grad(way.model(x).sum(), x)
    total.backward()


SCENARIOS: dict[str, Scenario] = {
    "reference before": reference_before,
    "reference after": reference_after,
    "reference between two": reference_between_two,
    "reference while accumulating": reference_while_accumulating,
    "reference and checkpoints": checkpointed(False),
    "reference and reentrant checkpoints": checkpointed(True),
    "frozen for a forward": some_frozen_for_a_forward,
    "frozen for a backward": some_frozen_for_the_backward,
    "frozen between": frozen_between,
    "thawed between": thawed_between,
    "frozen after warm-up": frozen_after_warm_up,
    "evaluated between": evaluated_between(torch.no_grad),
    "inference between": evaluated_between(torch.inference_mode),
    "skipping": skipping(False),
    "skipping, evaluated between": skipping(True),
    "skipping beside a reference": skipping_beside_a_reference,
    "moved in forward": moved_in_forward,
    "moved between": moved_between,
    "unused later": unused_later,
    "unused in micro-batches": unused_in_one_micro_batch,
    "gradients of inputs between": gradients_of_inputs_between,
}


def compare(system: str, scenario: Scenario, expected: Trained) -> None:
    grads, params = Way(system).train(scenario)
    for step, (found, right) in enumerate(zip(grads, expected[0], strict=True)):
        unlike = [n for n in right if (found[n] is None) != (right[n] is None)]
        assert not unlike, f"step {step}: a gradient on one side only: {unlike}"
        torch.testing.assert_close(found, right, msg=lambda m, step=step: f"step {step}: {m}")
    torch.testing.assert_close(params, expected[1])


def compare_all(systems: tuple[str, ...], in_turn: bool) -> dict[str, str]:
    """The errors by system and scenario; ``in_turn``: each scenario under one of the systems."""
    wrong = {}
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        expected = Way("plain").train(scenario)
        for system in [systems[number % len(systems)]] if in_turn else systems:
            try:
                compare(system, scenario, expected)
            except Exception as error:
                wrong[f"{system}, {name}"] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.parametrize(
    ("ranks", "systems", "in_turn"),
    [*by_night(*((ranks, SYSTEMS, False) for ranks in (1, 2, 3))), (2, SYSTEMS[3:], True)],
)
def test_flags_evaluation_and_moves_between_forward_and_backward(
    ranks: int, systems: tuple[str, ...], in_turn: bool
) -> None:
    for wrong in run_ranks(compare_all, ranks, systems, in_turn, timeout=240):
        assert not wrong, wrong
