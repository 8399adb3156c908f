"""Programs: the states of optimizers read, reset and moved by hand; optimizers of operators."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.distributed.programs.models import Block, Net, adamw, mean_square, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def between_steps(run: Run, change: Any, steps: int = 4) -> None:
    """AdamW whose states are changed right behind each step."""
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step, x in enumerate(run.batches(steps)):
        update(run, model, optimizer, mean_square(model(x)))
        change(model, optimizer, step)


@program("momentum reset right behind step: optimizer.state[p]['exp_avg'].zero_()")
def state_zeroed(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].zero_()

    between_steps(run, change)


@program("the second moment clamped and scaled behind each step")
def state_clamped(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(0.9).clamp_(min=1e-6)

    between_steps(run, change)


@program("the count of steps set back: state['step'].fill_(1)")
def state_steps_set(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        if step == 1:
            for state in optimizer.state.values():
                state["step"].fill_(1)

    between_steps(run, change)


@program("all states dropped once: optimizer.state = defaultdict(dict)")
def state_dropped(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        if step == 1:
            optimizer.state = defaultdict(dict)

    between_steps(run, change)


@program("the states of one layer dropped when it is made again: del optimizer.state[p]")
def state_of_layer_dropped(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        if step == 1:
            with torch.no_grad():
                for p in run.module(model).out.parameters():
                    p.mul_(0.5)
                    del optimizer.state[p]

    between_steps(run, change)


@program("states assigned: optimizer.state[p]['exp_avg'] = torch.zeros_like(p)")
def state_assigned(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"] = torch.zeros_like(p)

    between_steps(run, change)


@program("norms of the moments logged behind each step")
def state_logged(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        for p in model.parameters():
            state = optimizer.state[p]
            run.record(state["exp_avg"].norm(), state["exp_avg_sq"].sqrt().mean(), state["step"])

    between_steps(run, change)


@program("dormant units found by a hook, their weights and states reset by masks (ReDo)")
def state_redo(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    block = run.module(model).blocks[0]
    seen: list[Tensor] = []
    block.up.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for x in run.batches(4):
        seen.clear()
        update(run, model, optimizer, mean_square(model(x)))
        use = seen[0].abs().mean(0)
        torch.distributed.all_reduce(use)
        rows = (use < use.median())[:, None].expand(-1, 8)
        with torch.no_grad():
            for value in (block.up.weight, *moments(optimizer, block.up.weight)):
                value.masked_fill_(rows, 0.0)


def moments(optimizer: Optimizer, p: Any) -> list[Tensor]:
    return [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]


@program("shrink and perturb: weights scaled and mixed with those of the start, momentum kept")
def shrink_and_perturb(run: Run) -> None:
    model = run.shard(Net(), [Block])
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model.parameters())
    for x in run.batches(4):
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.mul_(0.8).add_(s, alpha=0.2)


@program("momentum scaled where the learning rate changes")
def state_momentum_scaled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(run, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"].mul_(0.5)
    train(run, model, optimizer)


@program("AdamW's first moment handed to SGD as momentum in mid-run")
def state_handed_over(run: Run) -> None:
    model = run.shard(Net(), [Block])
    first = adamw(model.parameters())
    train(run, model, first)
    second = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for p in model.parameters():
        second.state[p]["momentum_buffer"] = first.state[p]["exp_avg"].clone()
    train(run, model, second)


@program("a loss that rises: model and optimizer go back to a deepcopy of their states")
def state_rolled_back(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    train(run, model, optimizer)
    net = run.module(model)
    kept = {name: t.clone() for name, t in net.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict())
    train(run, model, optimizer)
    net.load_state_dict(kept)
    optimizer.load_state_dict(states)
    train(run, model, optimizer)


@program("betas and eps changed in the groups between steps")
def groups_betas(run: Run) -> None:
    def change(model: Any, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.8, 0.9 + 0.02 * step)
            group["eps"] = 1e-5 * (step + 1)

    between_steps(run, change)


class AdamByHand:
    """No Optimizer: a dict of moments by name."""

    def __init__(self, model: Any) -> None:
        self.named = list(model.named_parameters())
        self.first = {name: torch.zeros_like(p) for name, p in self.named}
        self.second = {name: torch.zeros_like(p) for name, p in self.named}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, p in self.named:
            m, v = self.first[name], self.second[name]
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            scale = (v / (1 - 0.99**self.count)).sqrt().add_(1e-5)
            p.mul_(0.999).addcdiv_(m / (1 - 0.9**self.count), scale, value=-3e-3)


@program("AdamW by hand with dicts of moments, no Optimizer")
def adam_by_hand(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = AdamByHand(model)
    for x in run.batches(4):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        optimizer.step()
        model.zero_grad()
        run.record(loss)


class ScheduleFree(Optimizer):
    """AdamW without a schedule: gradients at a mixture of two sequences of weights."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"] = torch.clone(p, memory_format=torch.preserve_format)
                    state["v"] = torch.zeros_like(p)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                slope = p.grad.div(state["v"].sqrt().add_(1e-4))
                p.lerp_(end=state["z"], weight=share)
                p.add_(slope, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                state["z"].sub_(slope, alpha=group["lr"])


@program("a schedule-free AdamW, switched for evaluation and back")
def schedule_free(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = ScheduleFree(model.parameters())
    for x in run.batches(4):
        optimizer.switch(training=True)
        update(run, model, optimizer, mean_square(model(x)))
        optimizer.switch(training=False)
        with torch.no_grad():
            run.record(model(x))
    optimizer.switch(training=True)


def define_steps() -> None:
    """Updates as operators that write their arguments, once in a process."""
    if hasattr(torch.ops.programs, "lion"):
        return

    @torch.library.custom_op("programs::lion", mutates_args=("p", "m"))
    def lion(p: Tensor, m: Tensor, grad: Tensor, lr: float) -> None:
        p.sub_(m.lerp(grad, 0.1).sign(), alpha=lr)
        m.lerp_(grad, 0.01)

    @torch.library.custom_op("programs::packed_lion", mutates_args=("p", "m"))
    def packed_lion(p: Tensor, m: Tensor, grad: Tensor, lr: float) -> None:
        full = (m.to(p.dtype) - 128) / 500
        p.sub_(full.lerp(grad, 0.1).sign(), alpha=lr)
        m.copy_((full.lerp(grad, 0.3) * 500 + 128).round().clamp(0, 255).to(m.dtype))


class OperatorLion(Optimizer):
    """Lion whose step is one operator, as those of compiled kernels are."""

    def __init__(self, params: Any, packed: bool, lr: float = 0.003) -> None:
        super().__init__(params, {"lr": lr})
        define_steps()
        self.packed = packed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        operator = torch.ops.programs.packed_lion if self.packed else torch.ops.programs.lion
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    options: Any = {"dtype": torch.uint8} if self.packed else {}
                    state["m"] = torch.zeros_like(p, **options) + (128 if self.packed else 0)
                operator(p, state["m"], p.grad, group["lr"])


@program("an optimizer whose step is an operator that writes parameter and state")
def operator_step(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, OperatorLion(model.parameters(), packed=False), steps=4)


@program("the same with states of 8 bits")
def operator_step_packed(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, OperatorLion(model.parameters(), packed=True), steps=4)


@program("torch._fused_adamw_ called by hand with lists")
def operator_fused_adamw(run: Run) -> None:
    model = run.shard(Net(), [Block])
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    counts = [torch.zeros(()) for _ in parameters]
    for x in run.batches(4):
        loss = mean_square(model(x))
        loss.backward()
        run.average(model)
        with torch.no_grad():
            torch._foreach_add_(counts, 1)
            torch._fused_adamw_(
                parameters,
                [p.grad for p in parameters],
                first,
                second,
                [],
                counts,
                lr=3e-3,
                beta1=0.9,
                beta2=0.99,
                weight_decay=0.1,
                eps=1e-5,
                amsgrad=False,
                maximize=False,
            )
        model.zero_grad()
        run.record(loss)


class Cautious(Optimizer):
    """A momentum whose elements count where they agree with the gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p.data))
                m.mul_(0.9).add_(p.grad)
                mask = (m * p.grad > 0).to(p.grad.dtype)
                mask.div_(mask.mean().clamp_(min=1e-3))
                p.add_(m * mask, alpha=-group["lr"])


@program("a cautious optimizer: masks of m * grad > 0, divided by their means")
def cautious(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model, Cautious(model.parameters()), steps=4)
