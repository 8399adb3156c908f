"""Random programs that train inside of a model's forward, and what one process makes of them.

A program is a tree: calls of the model or of a part, in which forwards, backwards, steps of several
optimizers, evaluations and more calls follow each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.random_runs import Result

WIDTH = 4
WHERE = ("root", "gen", "critic")
PATHS = ("root", "gen", "critic", "both", "detached", "read")
OPS = (
    "backward", "backward", "backward", "joint", "late", "step", "step", "step", "zero_grad",
    "zero_grad", "eval", "eval", "clip", "toggle", "penalty", "write",
)  # fmt: skip
SPLITS = ((("gen", "critic", ""),), (("gen", ""), ("critic",)), (("gen",), ("critic",), ("",)))
OPTIMIZERS = ("sgd", "adamw", "own_adamw", "custom")


@dataclass(frozen=True)
class Op:
    """One thing that a program does; a call of a module has a body."""

    kind: str
    path: str = "root"  # what is computed, or which module is called
    which: int = 0  # optimizer, by number
    number: int = 0  # of the batch
    body: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Case:
    """One program: its seed, stage (or "fsdp"), the parts of each optimizer and its kind."""

    seed: int
    world_size: int
    stage: int | str
    split: tuple[tuple[str, ...], ...]
    optimizers: tuple[str, ...]
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.world_size} ranks, {self.optimizers}\n{shown(self.ops)}"


def shown(ops: Sequence[Op], indent: str = "  ") -> str:
    """The program as text."""
    lines = []
    for op in ops:
        lines.append(f"{indent}{op.kind} {op.path} {op.which}")
        if op.body:
            lines.append(shown(op.body, indent + "  "))
    return "\n".join(lines)


def case_of(seed: int, world_size: int) -> Case:
    """The program of a seed."""
    rng = random.Random(f"inner {seed}")
    split = rng.choice(SPLITS)
    kinds = tuple(rng.choice(OPTIMIZERS) for _ in split)
    stage = rng.choice((0, 1, 2, 3, "fsdp"))
    if stage == "fsdp":
        kinds = tuple("adamw" if kind in ("own_adamw", "custom") else kind for kind in kinds)
    ops = body_of(rng, len(split), 0)
    ops += ops[: rng.randrange(9)]
    if stage == "fsdp":
        ops = (Op("call", body=for_fsdp(ops)),)
    return Case(seed, world_size, stage, split, kinds, ops)


def for_fsdp(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Without what FSDP2 has not: reads of parameters outside of their module's call, and freezing
    in a call."""
    others = {"toggle": "eval", "read": "both"}
    return tuple(
        replace(
            op,
            kind=others.get(op.kind, op.kind),
            path=others.get(op.path, op.path),
            body=for_fsdp(op.body),
        )
        for op in ops
    )


def body_of(rng: random.Random, optimizers: int, depth: int) -> tuple[Op, ...]:
    """The operations of one place; a call opens another."""
    ops: list[Op] = []
    for _ in range(rng.randrange(3, 8)):
        number = rng.randrange(1000)
        if depth < 3 and rng.random() < (0.5 if depth == 0 else 0.2):
            where = rng.choice(("root", "root", *WHERE)) if depth == 0 else rng.choice(WHERE)
            kind = rng.choice(("call", "call", "returned"))
            body = body_of(rng, optimizers, depth + 1)
            ops.append(Op(kind, where, rng.randrange(optimizers), number, body))
        else:
            kind = rng.choice(OPS)
            ops.append(Op(kind, rng.choice(PATHS), rng.randrange(optimizers), number))
    return tuple(ops)


class Part(nn.Module):
    """Two layers and a parameter of its own; given a program, it runs that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Any) -> Any:
        if callable(x):
            return x()
        return self.second(torch.tanh(self.first(x))) * self.gain + self.code


class Net(nn.Module):
    """A generator, a critic and a scale; given a program, it runs that."""

    def __init__(self) -> None:
        super().__init__()
        self.gen, self.critic = Part(), Part()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return x() if callable(x) else self.critic(self.gen(x)) * self.scale


class Custom(torch.optim.Optimizer):
    """Momentum in torch functions of whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.add_(mean, alpha=-group["lr"])


def build(seed: int) -> Net:
    """The model, the same in each call."""
    torch.manual_seed(seed)
    return Net().double()


class Player:
    """One process that plays the parts of some ranks; here of all of them, on one plain model."""

    def __init__(self, case: Case, net: Any, ranks: Sequence[int]) -> None:
        self.case, self.net, self.ranks = case, net, ranks
        self.numbers: list[list[float]] = [[] for _ in ranks]
        self.parts: list[list[nn.Parameter]] = []
        self.optimizers: list[Any] = []
        self.codes: list[nn.Parameter] = []

    def run(self) -> Result:
        for names, kind in zip(self.case.split, self.case.optimizers, strict=True):
            params = [
                param
                for name, param in self.net.named_parameters()
                if (name.partition(".")[0] if "." in name else "") in names
            ]
            self.parts.append(params)
            self.optimizers.append(self.make_optimizer(kind, params))
        self.codes = [self.net.gen.code, self.net.critic.code]
        self.play(self.case.ops)
        return Result(self.numbers, self.final_state())

    def make_optimizer(self, kind: str, params: list[nn.Parameter]) -> Any:
        if kind == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)
        if kind == "custom":
            return Custom(params)
        make = self.own_adamw() if kind == "own_adamw" else torch.optim.AdamW
        return make(params, lr=3e-3, eps=1e-5, weight_decay=0.1)

    def own_adamw(self) -> Any:
        return torch.optim.AdamW

    def final_state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.net.state_dict().items()}

    def play(self, ops: Sequence[Op]) -> None:
        for op in ops:
            getattr(self, op.kind)(op)

    def inputs(self, rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    def output(self, path: str, x: Tensor) -> Tensor:
        net = self.net
        if path == "read":
            return x.mean() * net.scale.square().sum() + net.gen.gain.sum() * net.critic.gain.sum()
        if path in ("both", "detached"):
            made = net.gen(x)
            return net.critic(made.detach() if path == "detached" else made)
        return (net if path == "root" else getattr(net, path))(x)

    def loss(self, op: Op, more: int = 0) -> Tensor:
        losses = []
        for rank, numbers in zip(self.ranks, self.numbers, strict=True):
            output = self.output(op.path, self.inputs(rank, op.number + more))
            losses.append((torch.tanh(output) - 0.5).square().mean())  # bounded
            numbers.append(losses[-1].item())
        return torch.stack(losses).mean()

    # -- what programs do

    def call(self, op: Op) -> None:
        module = self.net if op.path == "root" else getattr(self.net, op.path)
        module(lambda: self.play(op.body))

    def returned(self, op: Op) -> None:
        """A call that ends with a loss, whose backward comes after it."""

        def run() -> Tensor:
            self.play(op.body)
            return self.loss(op)

        module = self.net if op.path == "root" else getattr(self.net, op.path)
        self.go_back(module(run))

    def go_back(self, loss: Tensor) -> None:
        if any(p.requires_grad for part in self.parts for p in part) and loss.requires_grad:
            loss.backward()

    def backward(self, op: Op) -> None:
        self.go_back(self.loss(op))

    def joint(self, op: Op) -> None:
        self.go_back(self.loss(op) + self.loss(op, more=1))

    def late(self, op: Op) -> None:
        loss = self.loss(op)
        self.eval(op)
        self.go_back(loss)

    def penalty(self, op: Op) -> None:
        """Records the gradient of the inputs."""
        for rank, numbers in zip(self.ranks, self.numbers, strict=True):
            x = self.inputs(rank, op.number)
            output = self.output(op.path, x).sum()
            if output.requires_grad:
                (grad,) = torch.autograd.grad(output, x, allow_unused=True)
                numbers.append(0.0 if grad is None else grad.square().sum().item())

    def eval(self, op: Op) -> None:
        with torch.no_grad():
            self.loss(op, more=2)

    def step(self, op: Op) -> None:
        self.optimizers[op.which].step()

    def zero_grad(self, op: Op) -> None:
        self.optimizers[op.which].zero_grad(set_to_none=op.number % 3 > 0)

    def clip(self, op: Op) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parts[op.which], 0.5)
        for numbers in self.numbers:
            numbers.append(float(norm))

    def toggle(self, op: Op) -> None:
        """Freezes the parameters of an optimizer, or thaws them."""
        for param in self.parts[op.which]:
            if not any(param is code for code in self.codes):
                param.requires_grad_(not param.requires_grad)

    def write(self, op: Op) -> None:
        """A forward that changes a parameter in place."""
        part = self.net.critic if op.path == "critic" else self.net.gen

        def move() -> None:
            with torch.no_grad():
                part.code.mul_(0.9).add_(0.1)

        part(move)


def every_op(ops: Sequence[Op], depth: int = 0) -> Iterator[tuple[int, Op]]:
    """All of them with the number of calls around each."""
    for op in ops:
        yield depth, op
        yield from every_op(op.body, depth + 1)


def reference(seed: int, world_size: int) -> Result:
    """One process that does every rank's part."""
    return Player(case_of(seed, world_size), build(seed), range(world_size)).run()
