"""The first gather of a forward at the optimizer's step: the bits of one in the forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

WIDTH = 5
STEPS = 4
Run = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """On 4 ranks some shards are empty; a norm that stays in float32 is another region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x).to(self.linear.weight.dtype))
        return x + y.tanh()


class Net(nn.Module):
    """Blocks in a row, of which a rank may leave out the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.first :]:
            x = block(x)
        return x


@dataclass
class Training:
    """A model, its optimizers, and what a step does."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    losses: list[float] = field(default_factory=list)
    gathered: int = 0  # gathers in steps of optimizers

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        loss: Tensor = self.model(torch.randn(3, WIDTH, generator=generator)).square().mean()
        self.losses.append(loss.item())
        return loss

    def backward(self, step: int) -> None:
        self.forward(step).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            self.step(optimizer.step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, call: Callable[[], Any]) -> None:
        before = self.count()
        try:
            call()
        finally:
            self.gathered += self.count() - before

    def count(self) -> int:
        return int(state_of(self.model).engine.counters["unshard"].count)


Way = Callable[[Training, int], None]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OURS = partial(zerocore.optim.AdamW, lr=1e-2)


def plainly(training: Training, step: int) -> None:
    training.backward(step)
    training.update()


def accumulating(training: Training, step: int) -> None:
    for index in range(2):
        with nullcontext() if index else zerocore.no_sync(training.model):
            training.backward(10 * step + index)
    training.update()


def with_scaler(training: Training, step: int) -> None:
    """The second step is skipped, as a rank's loss is infinite."""
    scaler = GradScaler("cpu", init_scale=4.0)
    bad = step == 1 and dist.get_rank() == 0
    scaler.scale(training.forward(step) * (float("inf") if bad else 1.0)).backward()
    for optimizer in training.optimizers:
        training.step(lambda optimizer=optimizer: scaler.step(optimizer))
        optimizer.zero_grad()
    scaler.update()


def evaluating(training: Training, step: int) -> None:
    plainly(training, step)
    with torch.no_grad():
        training.forward(50 + step)


def two_steps(training: Training, step: int) -> None:
    """From the second time on, without a forward between; the first of these is a surprise."""
    training.backward(step)
    for optimizer in training.optimizers[: 1 if step > 0 else 0]:
        training.step(optimizer.step)
    training.update()


def saving(training: Training, step: int) -> None:
    """Functions that read and write weights between steps."""
    plainly(training, step)
    model = training.model
    if step == 0:
        full = zerocore.full_state_dict(model)
        halves = {key: value / 2 for key, value in full.items()}
        zerocore.load_full_state_dict(model, halves)
    elif step == 1:
        own = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for value in own.values():
                value.mul_(0.5)
        model.load_state_dict(own)
    elif step == 2:
        with zerocore.unsharded(model, write_back=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)


def checkpointing(training: Training, step: int, folder: str) -> None:
    plainly(training, step)
    early = state_of(training.model).config.communication.gather_at_step
    kind = "at_step" if early else "in_forward"
    checkpoints = zerocore.Checkpoints(Path(folder, kind), training.model, training.optimizers[0])
    if step == 0:
        checkpoints.save(step)
        checkpoints.wait()
    if step == 2:
        assert checkpoints.load() == 0


def failing(training: Training, step: int) -> None:
    """A step raises on one rank, which goes on; and all reset the model between steps."""
    training.backward(step)
    fails = step == 1 and dist.get_rank() == 0

    def interrupt(*_: object) -> None:
        if fails:
            raise KeyError("on purpose")

    hooks = [each.register_step_pre_hook(interrupt) for each in training.optimizers]
    with suppress(KeyError):
        training.update()
    for hook in hooks:
        hook.remove()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    zerocore.reset(training.model)


def skipping(training: Training, step: int) -> None:
    """One rank leaves out the unit that was gathered."""
    training.model.first = int(step > 0 and dist.get_rank() == 0)
    plainly(training, step)


def reading(training: Training, step: int) -> None:
    """Units are used outside of a forward of the model."""
    plainly(training, step)
    training.losses.append(training.model.blocks[0](torch.ones(1, WIDTH)).sum().item())
    with zerocore.unsharded(training.model.blocks[1]):
        training.losses.append(training.model.blocks[1].linear.weight.sum().item())


def two_optimizers(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., Any]:
    """One for biases, one for the rest: both update each unit."""

    def make_both(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        flat = [param for param in params if len(param.shape) == 1]
        return [make([p for p in params if len(p.shape) > 1]), make(flat)]

    return make_both


BF16 = zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
EVERYTHING = zerocore.Offload(states="cpu", gradients="cpu", parameters="cpu")


@dataclass(frozen=True)
class Case:
    """A way to train with an optimizer, and options of `shard`."""

    way: Way = plainly
    make: Callable[..., Any] = ADAMW
    options: dict[str, Any] = field(default_factory=dict)
    gathered: int = STEPS  # gathers in steps
    frozen: bool = False  # the first block is


CASES = {
    "plain": Case(),
    "clipped": Case(make=partial(OURS, clip_grad_norm=0.1), options={"prefetch": 0}),
    "accumulated": Case(accumulating, SGD, {"accumulate": "full"}),
    "scaled": Case(with_scaler, SGD, gathered=STEPS - 1),
    "scaled in the kernel": Case(with_scaler, OURS, {"prefetch": 2}),
    "bf16": Case(evaluating, ADAMW, {"mixed_precision": BF16}),
    "bf16, cast by the optimizer": Case(evaluating, OURS, {"mixed_precision": BF16}),
    "states on the host": Case(plainly, OURS, {"offload": zerocore.Offload(states="cpu")}),
    "states of torch": Case(evaluating, ADAMW, {"offload": zerocore.Offload(states="cpu")}),
    "all on the host": Case(plainly, partial(OURS, clip_grad_norm=0.1), {"offload": EVERYTHING}),
    # The first time, the second step drops what the first one has gathered.
    "two optimizers": Case(plainly, two_optimizers(SGD)),
    "two steps": Case(two_steps, SGD),
    "frozen": Case(plainly, SGD, frozen=True),
    "saved": Case(saving, SGD),
    "failing": Case(failing, SGD, gathered=-1),
    "skipping": Case(skipping, SGD),
    "reading": Case(reading, OURS),
}


def train(case: Case, stage: int, gather_at_step: bool, group: Any = None) -> Run:
    """Losses of this rank, and the weights."""
    torch.manual_seed(0)
    net = Net()
    net.blocks[0].requires_grad_(not case.frozen)
    options = case.options if stage == 3 else {}
    model = zerocore.shard(
        net, stage=stage, units=[Block], gather_at_step=gather_at_step, group=group, **options
    )
    made = case.make([param for param in model.parameters() if param.requires_grad])
    training = Training(model, made if isinstance(made, list) else [made])
    for step in range(STEPS):
        case.way(training, step)
    full = zerocore.full_state_dict(model)
    gathers = gather_at_step and stage == 3 and (group is not None or dist.get_world_size() > 1)
    if case.gathered >= 0:
        assert training.gathered == (case.gathered if gathers else 0)
    elif gathers:
        assert training.gathered > 0
    return training.losses, full


def same_bits(names: list[str], stage: int, shape: tuple[int, int] | None = None) -> None:
    for name in names:
        print(name, flush=True)  # shown if the rank fails
        group = None if shape is None else init_device_mesh("cpu", shape)
        case = CASES[name]
        losses, full = train(case, stage, False, group)
        again, full_again = train(case, stage, True, group)
        assert losses == again
        assert list(full) == list(full_again)
        for key, value in full.items():
            assert torch.equal(value, full_again[key]), key


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_are_those_of_gathers_in_the_forward(world_size: int) -> None:
    """Half of the cases on 2 ranks, half of them on 3."""
    names = list(CASES)[world_size % 2 :: 2]
    run_ranks(same_bits, world_size, names, 3)


def test_other_numbers_of_ranks_and_stages() -> None:
    run_ranks(same_bits, 1, ["plain"], 3)
    run_ranks(same_bits, 4, ["skipping"], 3)
    run_ranks(same_bits, 4, ["bf16"], 3, (2, 2))
    for stage in range(3):
        run_ranks(same_bits, 2, ["plain"], stage)


def restore(folder: str) -> None:
    CASES["restored"] = Case(partial(checkpointing, folder=folder), OURS)
    same_bits(["restored"], 3)


def test_a_checkpoint_is_loaded_between_steps(tmp_path: Path) -> None:
    run_ranks(restore, 2, str(tmp_path))
