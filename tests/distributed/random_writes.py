"""Random writes to parameters: how each is spelled, where a program makes it, what it changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WIDTH, STEPS = 6, 3
SYSTEMS = (0, 1, 2, 3, 3, "fsdp")
PLACES = (
    "forward", "late in forward", "pre-hook", "hook", "parent", "root", "behind the forward",
    "backward pre-hook", "backward hook", "inner hook", "output hook", "function", "between steps",
    "next to the step",
)  # fmt: skip
BEFORE_USE = ("forward", "pre-hook", "between steps", "next to the step")
TARGETS = ("weight", "code", "lin.weight", "lin.bias", "mix.weight")


def numbers(like: Any, case: Case, step: int) -> Tensor:
    """Values of a tensor's shape, the same on all ranks; one number, where there are DTensors."""
    generator = torch.Generator().manual_seed(100 * case.seed + step)
    shape = () if case.system == "fsdp" else like.shape
    return 1 + 0.2 * torch.rand(shape, generator=generator, dtype=like.dtype)


def set_data(module: Any, name: str, values: Callable[[Any], Any]) -> None:
    getattr(module, name).data = values(getattr(module, name).data)


@torch.no_grad()
def set_memory(module: Any, name: str, values: Callable[[Any], Any]) -> None:
    param = getattr(module, name)
    if isinstance(param, DTensor):  # has no set_
        param.mul_(values(torch.ones((), dtype=param.dtype)))
    else:
        param.set_(values(param.detach().clone()))


@torch.inference_mode()
def in_inference_mode(module: Any, name: str, values: Callable[[Any], Any]) -> None:
    param = getattr(module, name)
    param.data.copy_(values(param.data))


def written(write: Callable[[Any, Callable[[Any], Any]], Any]) -> Callable[..., None]:
    """Of a function of the parameter and its new values the spelling of a write."""

    def run(module: Any, name: str, values: Callable[[Any], Any]) -> None:
        with torch.no_grad():
            write(getattr(module, name), values)

    return run


def fill(param: Any, values: Callable[[Any], Any]) -> None:
    param.data.fill_(values(torch.ones((), dtype=param.dtype)).item() - 0.8)


def assign_items(param: Any, values: Callable[[Any], Any]) -> None:
    param.data[:] = values(param.data)


SPELLINGS: dict[str, Callable[..., None]] = {
    "data.copy_": written(lambda p, f: p.data.copy_(f(p.data))),
    "data.add_": written(lambda p, f: p.data.add_(f(torch.zeros_like(p.data) + 0.1))),
    "data.fill_": written(fill),
    "data[:]": written(assign_items),
    "data.mul_": written(lambda p, f: p.data.mul_(f(torch.ones_like(p.data)))),
    "data.clamp_": written(lambda p, f: p.data.clamp_(-0.3, 0.3)),
    "data.lerp_": written(lambda p, f: p.data.lerp_(f(p.data), 0.5)),
    "foreach": written(lambda p, f: torch._foreach_mul_([p.data], 0.9)),
    "mul_": written(lambda p, f: p.mul_(0.9)),
    "copy_": written(lambda p, f: p.copy_(f(p.detach()))),
    "row.data": written(lambda p, f: p[0].data.fill_(0.3)),
    "flat.data": written(lambda p, f: p.view(-1).data.mul_(0.9)),
    "turned.data": written(lambda p, f: p.transpose(-1, 0).data.clamp_(-0.3, 0.3)),
    "part.data": written(lambda p, f: p.detach()[..., 1:].data.add_(0.1)),
    "data.row.data": written(lambda p, f: p.data[1].data.add_(0.1)),
    "detach": written(lambda p, f: p.detach().mul_(0.9)),
    "set_": set_memory,
    "data =": set_data,
    "inference": in_inference_mode,
}
VIEWS = tuple(name for name in SPELLINGS if name.endswith(".data"))  # of a parameter in full
SHOWN = ("forward", "late in forward", "pre-hook", "hook", "parent", "root")  # where it is that
FREE = tuple(name for name in SPELLINGS if "data" in name or name in ("foreach", "inference"))


@dataclass(frozen=True)
class Write:
    """One in a program; it is made in the given step."""

    spelling: str
    place: str
    target: str
    block: int
    step: int


@dataclass(frozen=True)
class Case:
    """A program."""

    seed: int
    system: Any
    writes: tuple[Write, ...]
    checkpoints: bool
    twice: bool  # two forwards for each backward
    units: int
    columns: bool  # parameters of `zerocore.fsdp` are cut in their last dimension


def is_shown(place: str, target: str, units: int) -> bool:
    """Whether a module sees the parameter in full there; of DTensors views are copies."""
    in_call = place != "root" if units == 1 else place != "root" and "." not in target
    return place in SHOWN and (units == 0 or in_call)


def case_of(seed: int) -> Case:
    """The one of a seed."""
    rng = random.Random(f"writes {seed}")
    writes = []
    is_refused = False  # in a checkpoint, by its name
    system = rng.choice(SYSTEMS)
    columns = system == "fsdp" and rng.random() < 0.4
    units = rng.randrange(3)
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, target = rng.choice(PLACES), rng.choice(TARGETS)
        # Autograd refuses others of what it has saved, as in plain torch.
        is_free = target in ("code", "lin.bias") or place in ("between steps", "next to the step")
        spelling = rng.choice(tuple(SPELLINGS) if is_free or rng.random() < 0.1 else FREE)
        is_refused = is_refused or (spelling not in FREE and place not in BEFORE_USE)
        # Foreach functions of DTensors count no change in torch, so a gather ahead misses it.
        is_uncounted = spelling == "foreach" and system == "fsdp"
        is_known = is_shown(place, target, units if system == "fsdp" else 0)
        if (spelling in VIEWS or is_uncounted) and not is_known:
            spelling = "data.fill_"
        if columns and spelling in ("data =", "set_"):
            spelling = "data.mul_"  # what modules see is a view
        if spelling == "set_":
            target = "code"  # DDP loses its hook on one that is trained
        if (
            spelling == "data ="
            and place not in BEFORE_USE
            and target in ("lin.weight", "mix.weight")
        ):
            target = "weight"  # of linear layers plain torch saves a view of the old memory
        writes.append(Write(spelling, place, target, rng.randrange(2), rng.randrange(STEPS)))
    return Case(
        seed,
        system,
        tuple(writes),
        rng.random() < 0.2 and not is_refused,
        rng.random() < 0.2,
        units,
        columns,
    )


class Ran(torch.autograd.Function):
    """Calls `run` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.run()
        return grad, None


class Block(nn.Module):
    """A weight and a frozen code of its own, and two layers; tells `at` where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.lin, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.at: Callable[[str], None] = lambda place: None
        self.register_forward_pre_hook(lambda *_: self.at("pre-hook"))
        self.register_forward_hook(lambda *_: self.at("hook"))
        self.register_full_backward_pre_hook(lambda *_: self.at("backward pre-hook"))
        self.register_full_backward_hook(lambda *_: self.at("backward hook"))

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward")
        inner = torch.tanh(self.lin(x) * self.code)
        self.at("parent")
        if inner.requires_grad:
            inner.register_hook(lambda _: self.at("inner hook"))
        inner = Ran.apply(inner @ self.weight, lambda: self.at("function"))
        result = self.mix(inner) + x * self.code
        self.at("late in forward")
        return result


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if x.requires_grad:
                x.register_hook(lambda _, block=block: block.at("output hook"))
        for block in self.blocks:
            block.at("root")
        return self.head(x)


class Program:
    """Trains a net and makes the writes of a case; `wrapped` is what it calls."""

    def __init__(self, case: Case, net: Net, wrapped: Any, rank: int) -> None:
        self.case, self.net, self.wrapped, self.rank = case, net, wrapped, rank
        self.step = 0
        trained = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
        for index, block in enumerate(net.blocks):
            block.at = lambda place, index=index: self.write(index, place)

    def write(self, block: int, place: str) -> None:
        for write in self.case.writes:
            if (write.block, write.place, write.step) == (block, place, self.step):
                module, _, name = write.target.rpartition(".")
                owner = self.net.blocks[block].get_submodule(module)
                SPELLINGS[write.spelling](owner, name, self.values)

    def values(self, old: Any) -> Any:
        return old * numbers(old, self.case, self.step)

    def at(self, place: str) -> None:
        for block in range(2):
            self.write(block, place)

    def losses(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.case.seed + 10 * number + self.rank)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        return self.wrapped(x).square().mean()

    def run(self) -> list[float]:
        """The losses; with a `nan` at the end if autograd has refused a write."""
        seen: list[float] = []
        for self.step in range(STEPS):
            loss = self.losses(self.step)
            if self.case.twice:
                loss = loss + self.losses(self.step + 50)
            seen.append(loss.item())
            self.at("behind the forward")
            try:
                loss.backward()
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                return [*seen, float("nan")]
            self.at("between steps")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.at("next to the step")
            with torch.no_grad():
                seen.append(self.losses(self.step + 100).item())
        return seen


def build(case: Case) -> Net:
    """The model, the same in each call."""
    torch.manual_seed(case.seed)
    return Net(case.checkpoints).double()
