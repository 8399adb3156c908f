"""Random pairs of features in one training run: which ones, the model, and one process as truth."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.distributed.programs.adapters import Lora, disabled_adapters
from tests.distributed.programs.run import MUON_REST
from tests.distributed.random_graphs import WIDTH
from tests.distributed.random_runs import Event, Result, batch, mode

STEPS = 4
OF_MODEL = (
    "checkpoint", "reentrant", "skipped", "function", "tied", "codebook", "adapters",
    "unused_later", "compile", "hooks", "complex", "sparse",
)  # fmt: skip
OF_LOOP = (
    "accumulation", "no_sync", "eval_between", "double_forward", "no_grad_before", "clip",
    "scaler", "frozen_later", "state_surgery", "grad_surgery", "save_load", "exception",
    "zeros_kept", "copied", "second_backward", "whole_gradients", "parts_written",
)  # fmt: skip
OF_SHARD = (
    "offload_states", "offload_gradients", "offload_parameters", "mixed_precision", "muon",
    "hybrid", "accumulate_full",
)  # fmt: skip
FEATURES = OF_MODEL + OF_LOOP + OF_SHARD
LEAST_STAGE = {"offload_gradients": 2, "offload_parameters": 3}
OFFLOADED = ("offload_states", "offload_gradients", "offload_parameters")
NOT_IN_FSDP = {*OFFLOADED, "muon", "accumulate_full", "tied"}
# Of DTensors, as in FSDP2. In torch 2.13, view_as_real() of a DTensor gives wrong values.
NOT_IN_FSDP |= {"copied", "whole_gradients", "parts_written", "complex"}
ALTERNATIVES = (  # of which one pair has one
    set(OFFLOADED),
    {"checkpoint", "reentrant"},
    {"parts_written", "mixed_precision"},  # refused: the parts are of copies in another dtype
    {"second_backward", "reentrant"},  # torch refuses the two together
    {"second_backward", "skipped"},  # the alarm's error at stage 3, see docs/behaviour.md
    {"second_backward", "exception"},  # the others' first backward raises, too
    *({"complex", name} for name in ("mixed_precision", "scaler", "muon", "grad_surgery")),
    *({"copied", name} for name in ("hooks", "compile", "mixed_precision")),
    {"mixed_precision", "codebook"},  # a frozen codebook would have no wide copy in the truth
    {"adapters", "muon"},  # no matrix of the blocks is trained
    {"exception", "codebook"},  # the forward that fails may have moved the codes
    {"adapters", "tied"},  # the ties are of weights that adapters hide
)


@dataclass(frozen=True)
class Case:
    """One run: its seed, features, stage (or "fsdp"), and whether there are replicas."""

    seed: int
    features: frozenset[str]
    stage: int | str
    world_size: int

    def __str__(self) -> str:
        features = " + ".join(sorted(self.features))
        return f"pair {self.seed}: {features}, stage {self.stage}, {self.world_size} ranks"

    def choose(self, *values: Any) -> Any:
        """One of them, by the seed."""
        return random.Random(f"{self.seed} {values}").choice(values)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if "mixed_precision" in self.features else torch.float64


def case_of(seed: int, world_size: int) -> Case:
    """The run of a seed: two features, sometimes three, and a stage that has them."""
    rng = random.Random(f"pair {seed}")
    names = [name for name in FEATURES if world_size == 4 or name != "hybrid"]
    while True:
        features = frozenset(rng.sample(names, rng.choice([2, 2, 2, 3])))
        if not any(len(features & apart) > 1 for apart in ALTERNATIVES):
            break
    least = max((LEAST_STAGE.get(name, 0) for name in features), default=0)
    stages: list[int | str] = list(range(least, 4))
    if not features & NOT_IN_FSDP:
        stages.append("fsdp")
    return Case(seed, features, rng.choice(stages), world_size)


class Scale(Function):
    """Multiplies by a weight, and gives it its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Block(nn.Module):
    """A residual block, perhaps with adapters or a weight that a Function takes."""

    def __init__(self, features: frozenset[str]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if "adapters" in features:
            self.up, self.down = Lora(self.up), Lora(self.down)  # type: ignore[assignment]
        self.norm = nn.RMSNorm(WIDTH) if "function" in features else None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm is None else Scale.apply(x, self.norm.weight)
        return x + self.down(torch.tanh(self.up(y)))


class Net(nn.Module):
    """Blocks between two layers; `clock` is (step, micro-batch, forward) and the rank."""

    def __init__(self, features: frozenset[str]) -> None:
        super().__init__()
        self.features = features
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(features) for _ in range(3))
        if "tied" in features:
            self.blocks[2].up.weight = self.blocks[0].up.weight
        self.extra = nn.Linear(WIDTH, WIDTH) if "unused_later" in features else None
        if "complex" in features:
            size = WIDTH // 2 + 1
            self.filter = nn.Parameter(torch.randn(size, dtype=torch.complex128))
        if "sparse" in features:
            self.table = nn.Embedding(5, WIDTH, sparse=True)
        if "codebook" in features:
            self.codes = nn.Parameter(torch.randn(3, WIDTH), requires_grad=False)
        self.clock: tuple[int, ...] = (0, 0, 0)
        self.moved: dict[tuple[int, ...], Tensor] = {}  # the codes, by clock
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if "complex" in self.features:
            x = x + torch.fft.irfft(torch.fft.rfft(x) * self.filter.conj(), n=WIDTH)
        if "sparse" in self.features:
            x = x + self.table(
                torch.tensor([self.rank % 5, self.clock[0]]).repeat(len(x))[: len(x)]
            )
        for index, block in enumerate(self.blocks):
            if not self.skips(index):
                x = self.call(block, x)
        if "codebook" in self.features:
            self.follow()
            x = x + 0.1 * self.codes[index]
        if self.extra is not None and self.clock[0] == 0:
            x = x + self.extra(x)
        return self.out(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        if "reentrant" in self.features or "checkpoint" in self.features:
            return checkpoint(block, x, use_reentrant="reentrant" in self.features)
        return block(x)

    def skips(self, index: int) -> bool:
        coin = hash((*self.clock, self.rank, index)) % 3 == 0
        return "skipped" in self.features and self.training and coin

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the codes in each training forward, alike for all ranks of one process."""
        if not self.training:
            return
        if self.clock in self.moved:
            self.codes.copy_(self.moved[self.clock])
        else:
            self.codes.mul_(0.5).add_(float(sum(self.clock)))
            self.moved[self.clock] = self.codes.clone()


def build(case: Case) -> Net:
    """The model, the same in each call."""
    torch.manual_seed(case.seed)
    net = Net(case.features)
    for p in net.parameters():
        p.data = p.data if p.is_complex() else p.data.to(case.dtype)
    if "mixed_precision" in case.features:  # frozen weights have no wide copy
        for p in net.parameters():
            if not p.requires_grad:
                p.data = p.data.bfloat16().to(p.dtype)
    return net


class Player:
    """One process that plays the parts of some ranks; here of all of them, on one plain model."""

    def __init__(self, case: Case, model: nn.Module, ranks: list[int]) -> None:
        self.case, self.model, self.ranks = case, model, ranks
        self.net: Any = model  # has the clock
        self.owner: nn.Module = model  # has what is updated
        self.numbers: list[list[float]] = [[] for _ in ranks]
        self.optimizers: list[Any] = []

    def has(self, *names: str) -> bool:
        return any(name in self.case.features for name in names)

    def inputs(self, rank: int, number: int) -> Tensor:
        return batch(self.case.seed, number, rank).detach().to(self.case.dtype).requires_grad_()

    def loss(self, rank: int, clock: tuple[int, ...]) -> Tensor:
        self.net.clock, self.net.rank = clock, rank
        number = 10 * clock[0] + 2 * clock[1]
        inputs = self.inputs(rank, number)
        output = self.model(inputs).to(self.case.dtype)
        if self.has("double_forward"):
            self.net.clock = (*clock[:2], 1)
            output = output + self.model(self.inputs(rank, number + 1)).to(self.case.dtype).flip(0)
        loss = (output - 0.5).square().mean()
        if self.has("second_backward") and torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            loss = loss + 0.1 * slope.to(self.case.dtype).square().mean()
        return loss

    def evaluate(self, clock: tuple[int, ...]) -> None:
        for rank, numbers in zip(self.ranks, self.numbers, strict=True):
            with mode(self.model, Event("eval")):
                numbers.append(self.loss(rank, clock).item())

    def micro_batch(self, clock: tuple[int, ...]) -> None:
        """Forward, what lies in between, backward."""
        losses = [self.loss(rank, clock) for rank in self.ranks]
        for numbers, loss in zip(self.numbers, losses, strict=True):
            numbers.append(loss.item())
        if self.has("adapters"):
            with disabled_adapters(self.net):
                self.evaluate(clock)
        if self.has("eval_between"):
            self.evaluate(clock)
        for loss in losses:
            self.backward(loss)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def record(self, value: Any) -> None:
        for numbers in self.numbers:
            numbers.append(float(value))

    def run(self) -> Result:
        """Trains, with all that the case says."""
        self.begin()
        for step in range(STEPS):
            self.before(step)
            for part in range(parts := 1 + self.has("accumulation", "no_sync", "accumulate_full")):
                with self.held() if part < parts - 1 else nullcontext():
                    self.micro_batch((step, part, 0))
            self.update()
            self.after(step)
        return Result(self.numbers, self.final_state())

    def begin(self) -> None:
        self.optimizers = self.make_optimizers()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.has("scaler"))
        if self.has("hooks"):
            for p in list(self.model.parameters())[::2]:
                # As in FSDP2, no gradient passes through a DTensor.
                if p.requires_grad and self.case.stage != "fsdp":
                    p.register_hook(lambda grad: grad * 0.5)
            self.net.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
        if self.has("compile"):
            torch._dynamo.reset()
            for block in self.net.blocks:
                block.compile(backend="eager")

    def before(self, step: int) -> None:
        if self.has("exception") and step == 1:
            self.fail((step, 8, 0))
            self.zero_grad()
        if self.has("no_grad_before"):
            self.evaluate((step, 9, 0))
        if self.has("frozen_later") and step == 2:
            self.net.out.requires_grad_(False)

    def update(self) -> None:
        """Everything from the last backward to the next forward."""
        self.average()
        if self.has("scaler"):
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.has("clip"):
            self.record(self.clip(0.1))
        if self.has("grad_surgery"):
            self.operate()
        if self.has("whole_gradients"):
            self.centre()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.has("state_surgery"):
            for values in [v for o in self.optimizers for v in o.state.values()]:
                for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if values.get(name) is not None:
                        values[name].mul_(0.5)
        self.zero_grad()

    def centre(self) -> None:
        """Changes gradients by functions of all their elements."""
        for p in self.owner.parameters():
            if p.grad is not None and p.grad.ndim == 2:
                p.grad -= p.grad.mean(0)
                p.grad.copy_(torch.linalg.svd(p.grad, full_matrices=False)[1].sum() * p.grad)

    @torch.no_grad()
    def write_parts(self) -> None:
        for p in self.owner.parameters():
            if p.ndim == 2:
                row = p[0]
                row.mul_(0.5)
                p.t()[1].add_(0.01)
                p.data[2:, :2] = 0.125
                row += 0.01

    def go_on_with_a_copy(self) -> None:
        self.model = self.owner = self.net = copy.deepcopy(self.model)
        states = [each.state_dict() for each in self.optimizers]
        self.optimizers = self.make_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    def after(self, step: int) -> None:
        if self.has("parts_written"):
            self.write_parts()
        if self.has("copied") and step == 1:
            self.go_on_with_a_copy()
        if self.has("save_load") and step == 1:
            self.save()
        if self.has("save_load") and step == 2:
            self.load()

    def operate(self) -> None:
        """Changes gradients as people do."""
        # As in FSDP2, `p.grad.data = t` does nothing to a DTensor.
        ways = ("data", "assigned", "in_place", "sign")
        how = self.case.choose(*ways[self.case.stage == "fsdp" :])
        for p in self.owner.parameters():
            if p.grad is None:
                continue
            if how == "data":
                p.grad.data = p.grad.data * 1.5
            elif how == "assigned":
                p.grad = p.grad * 0.5 + p.detach() * 0.01
            elif how == "in_place":
                p.grad.add_(p.grad.abs(), alpha=0.1)
            else:
                p.grad = (p.grad + 1e-3).sign() * 0.01

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.has("zeros_kept"))

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.owner.parameters() if p.requires_grad]

    def make_optimizers(self) -> list[Any]:
        if not self.has("muon"):
            if self.case.choose(True, False):
                return [torch.optim.SGD(self.trained(), lr=0.05, momentum=0.9, weight_decay=0.1)]
            return [self.adamw(self.trained(), lr=3e-3, eps=1e-5, weight_decay=0.1)]
        return self.muon()

    def adamw(self, parameters: Any, **options: Any) -> Any:
        return torch.optim.AdamW(parameters, **options)

    def muon(self) -> list[Any]:
        named = [(name, p) for name, p in self.owner.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if "blocks" in name and p.ndim == 2]
        rest = [p for name, p in named if not ("blocks" in name and p.ndim == 2)]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, **MUON_REST)]

    def clip(self, most: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.owner.parameters(), most)

    def held(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def fail(self, clock: tuple[int, ...]) -> None:
        """A step that raises; the truth leaves it out."""

    def average(self) -> None:
        for p in self.owner.parameters():
            if p.grad is not None:
                p.grad = p.grad.to_dense().resolve_conj() / len(self.ranks)

    def save(self) -> None:
        weights = {name: value.clone() for name, value in self.owner.state_dict().items()}
        self.kept = weights, [copy.deepcopy(each.state_dict()) for each in self.optimizers]

    def load(self) -> None:
        self.owner.load_state_dict(self.kept[0])
        for optimizer, state in zip(self.optimizers, self.kept[1], strict=True):
            optimizer.load_state_dict(state)

    def final_state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.owner.state_dict().items()}


class NarrowPlayer(Player):
    """The truth of mixed precision: a narrow copy computes, the wide model is updated."""

    def __init__(self, case: Case, model: nn.Module, ranks: list[int]) -> None:
        super().__init__(case, copy.deepcopy(model).bfloat16(), ranks)
        self.owner = model

    def inputs(self, rank: int, number: int) -> Tensor:
        return super().inputs(rank, number).bfloat16()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for p, narrow in self.both():
            if narrow.grad is not None:
                grad = narrow.grad.to(p.dtype)
                p.grad = grad if p.grad is None else p.grad + grad
                narrow.grad = None

    def both(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.owner.parameters(), self.model.parameters(), strict=True)

    @torch.no_grad()
    def after(self, step: int) -> None:
        super().after(step)
        for p, narrow in self.both():
            narrow.copy_(p)


def reference(seed: int, world_size: int) -> Result:
    """One process that does every rank's part."""
    case = case_of(seed, world_size)
    player = NarrowPlayer if "mixed_precision" in case.features else Player
    return player(case, build(case), list(range(world_size))).run()
