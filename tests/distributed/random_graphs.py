"""Random models: nested, shared, repeated, tied and skipped modules, read and called in any way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


@dataclass
class Plan:
    """The steps of a node in each forward, each as (what, child)."""

    steps: list[tuple[str, int]] = field(default_factory=list)


class Leaf(nn.Module):
    """A linear layer, perhaps with a parameter of its own, and with a frozen one that moves."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if rng.random() < 0.3 else None
        self.code = nn.Parameter(torch.ones(WIDTH), False) if rng.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.code is not None:
            x = x + self.code
        return x + (y if self.gain is None else y * self.gain)


class Node(nn.Module):
    """Calls its children as its plan says.

    `clock` is the number of the forward, the rank, and whether the root moves what is frozen: at
    its end or, early, behind a step that differs from rank to rank.
    """

    def __init__(self, children: list[nn.Module], rng: random.Random, clock: list[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.own = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.4 else None
        self.clock = clock
        self.aux: Tensor | None = None
        self.moves = self.moves_early = False
        whats = ["call"] * 5 + [
            "twice",
            "sometimes",
            "checkpoint",
            "reentrant",
            "read",
            "aux",
            "detach",
            "routed",
            "routed",
        ]
        order = list(range(len(children)))
        rng.shuffle(order)
        self.plan = Plan([(rng.choice(whats), child) for child in order])

    def forward(self, x: Tensor) -> Tensor:
        if self.own is not None:
            x = x + torch.tanh(self.own(x))
        self.aux = None
        steps = self.plan.steps
        last = sum(self.clock[:2]) % len(steps) if self.moves_early else len(steps) - 1
        for number, (what, index) in enumerate(steps):
            x = self.step(what, index, x)
            if self.moves and self.clock[2] and number == last:
                move(self)
        return x

    def step(self, what: str, index: int, x: Tensor) -> Tensor:
        part = self.parts[index]
        steps: dict[str, Callable[[], Any]] = {
            "call": lambda: part(x),
            "twice": lambda: part(part(x)),
            "sometimes": lambda: part(x) if self.clock[0] % 2 else x,
            "checkpoint": lambda: checkpoint(self.by_this_clock(part), x, use_reentrant=False),
            "reentrant": lambda: checkpoint(self.by_this_clock(part), x, use_reentrant=True),
            "read": lambda: x + read(part, x),
            "aux": lambda: self.keep(part, x),
            "detach": lambda: x + part(x.detach()).detach(),
            "routed": lambda: part(x) if hash((*self.clock[:2], index)) % 2 else x,
        }
        return steps[what]()

    def by_this_clock(self, part: nn.Module) -> Callable[[Tensor], Tensor]:
        """``part``, which goes the same ways in a backward that comes when time has gone on."""
        now = list(self.clock)

        def run(x: Tensor) -> Tensor:
            later = list(self.clock)
            self.clock[:] = now
            try:
                return cast(Tensor, part(x))
            finally:
                self.clock[:] = later

        return run

    def keep(self, part: nn.Module, x: Tensor) -> Tensor:
        self.aux = part(x).square().mean()
        return x


def has_joint_backwards(seed: int) -> bool:
    """Whether some backwards go through several forwards."""
    return seed % 5 == 1


def codes_of(model: nn.Module) -> list[Tensor]:
    """Frozen parameters that the root moves."""
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    return [leaf.code for leaf in leaves if leaf.code is not None]


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Changes what is frozen in place, behind the calls that have used it or between them."""
    for code in codes_of(model):
        code.mul_(0.9).add_(0.05)


def read(part: nn.Module, x: Tensor) -> Tensor:
    """Uses a matrix of `part` without calling it."""
    weight = next(p for p in part.parameters() if len(p.shape) == 2)
    return torch.tanh(F.linear(x, weight))


def build(seed: int) -> tuple[nn.Module, list[int], list[nn.Module]]:
    """A model, its clock, and modules that may be units; no two calls with one seed differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    clock = [0, 0, 0]
    leaves: list[nn.Module] = [Leaf(rng) for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.4:  # tied
        first, last = leaves[0], leaves[-1]
        assert isinstance(first, Leaf) and isinstance(last, Leaf)
        last.linear.weight = first.linear.weight
    nodes = list(leaves)
    candidates: list[nn.Module] = list(leaves)
    for _ in range(rng.randint(1, 3)):
        children = [rng.choice(nodes) for _ in range(rng.randint(1, 3))]
        node = Node(children, rng, clock)
        nodes.append(node)
        candidates.append(node)
    root = Node([nodes[-1], *leaves], rng, clock)
    root.moves = not has_joint_backwards(seed)  # a checkpoint would see what a later forward moved
    root.moves_early = seed // 2 % 2 == 0
    if root.own is None:  # else a rank's loss may not go through the model at all
        root.own = nn.Linear(WIDTH, WIDTH)
    root.double()
    inside = set(root.modules())
    return root, clock, [module for module in candidates if module in inside]


def choose_units(seed: int, candidates: list[nn.Module]) -> list[nn.Module] | None:
    """Some modules, none inside of another one, or None to let `shard` choose."""
    rng = random.Random(seed + 1)
    if rng.random() < 0.3:
        return None
    chosen: list[nn.Module] = []
    for module in rng.sample(candidates, len(candidates)):
        apart = all(
            module not in set(other.modules()) and other not in set(module.modules())
            for other in chosen
        )
        if apart and rng.random() < 0.7:
            chosen.append(module)
    return chosen or None


def total_loss(model: nn.Module, x: Tensor) -> Tensor:
    """The mean square of the output, and of what nodes kept as attributes."""
    nodes = [module for module in model.modules() if isinstance(module, Node)]
    for node in nodes:
        node.aux = None  # of the forward before, if the node is not called in this one
    loss = model(x).square().mean()
    return loss + sum(0.1 * node.aux for node in nodes if node.aux is not None)
