"""Programs: smaller models, by fewer bits, fewer weights or low ranks; and edited ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    Words,
    adamw,
    mean_square,
    sgd,
    train_words,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Rounded(nn.Linear):
    """Weights and inputs rounded to few levels; an observer keeps the range of the inputs."""

    low: Tensor
    high: Tensor
    observing: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))
        self.register_buffer("observing", torch.ones((), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.observing:
            self.low.lerp_(torch.minimum(x.detach().min(), torch.zeros(())), 0.3)
            self.high.lerp_(torch.maximum(x.detach().max(), torch.zeros(())), 0.3)
        scale = (self.high - self.low) / 15
        zero = (-self.low / scale).round().clamp(0, 15).int()
        x = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 15)
        size = self.weight.detach().abs().amax(1) / 7
        weight = torch.fake_quantize_per_channel_affine(
            self.weight, size, torch.zeros(len(size), dtype=torch.int32), 0, -7, 7
        )
        return F.linear(x, weight, self.bias)


@program(
    "training for 4 bits: fake quantisation with observers, frozen in the end; integers exported"
)
def fake_quantised(run: Run) -> None:
    net = nn.Sequential(Rounded(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(), Rounded(SIZE, SIZE))
    model = run.shard(net, [Rounded])
    optimizer = sgd(model)
    for step in range(4):
        if step == 2:
            for module in run.module(model).modules():
                if isinstance(module, Rounded):
                    module.observing.zero_()
                elif isinstance(module, nn.BatchNorm1d):
                    module.eval()
        loss = F.mse_loss(model(run.tensor(6, SIZE, key=step)), run.tensor(6, SIZE, key=10 + step))
        update(run, model, optimizer, loss)
    for name, value in sorted(run.full_state(run.models[0]).items()):
        if name.endswith("weight") and value.ndim == 2:
            run.record((value / (value.abs().amax(1, keepdim=True) / 7)).round().to(torch.int8))


class LearnedStep(torch.autograd.Function):
    """Rounds to multiples of a step that is learned (LSQ)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(weight, step)
        return (weight / step).round().clamp(-3, 3) * step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, step = ctx.saved_tensors
        ratio = weight / step
        inside = (ratio.abs() <= 3).float()
        by_step = ratio.clamp(-3, 3).round() - ratio * inside
        by_step = (by_step * grads[0]).sum() / (3 * weight.numel()) ** 0.5
        return grads[0] * inside, by_step.view_as(step)


class Stepped(nn.Linear):
    """A linear layer of 7 levels; its step begins from its weights, in the first forward."""

    begun: Tensor

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.step = nn.Parameter(torch.ones(1))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.begun:
            self.step.data.copy_(2 * self.weight.detach().abs().mean() / 3**0.5)
            self.begun.fill_(True)
        return F.linear(x, LearnedStep.apply(self.weight, self.step), self.bias)


@program("LSQ: learned steps of quantisation, set in the first forward, by a Function of both")
def learned_steps(run: Run) -> None:
    model = run.shard(nn.Sequential(Stepped(), nn.Tanh(), Stepped()), [Stepped])
    named = list(model.named_parameters())
    steps, others = ([p for n, p in named if n.endswith("step") == flag] for flag in (True, False))
    groups: list[dict[str, Any]] = [{"params": steps, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        update(run, model, optimizer, mean_square(model(run.tensor(6, SIZE, key=step)) - 1))


@program("pruning by a schedule: one threshold for all layers, masks on weights and gradients")
def gradual_pruning(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    matrices = {n: p for n, p in run.module(model).named_parameters() if p.ndim == 2}
    masks = {name: torch.ones_like(p) for name, p in matrices.items()}
    for step in range(4):
        share = 0.6 * (1 - (1 - step / 4) ** 3)
        sizes = torch.cat([p.detach().abs().flatten() for p in matrices.values()])
        edge = sizes.kthvalue(max(1, int(share * len(sizes))))[0]
        for name, param in matrices.items():
            masks[name] = (param.detach().abs() > edge).float()
            param.data.mul_(masks[name])
        loss = mean_square(model(run.tensor(4, SIZE, key=step)) - 1)
        loss.backward()
        run.average(model)
        for name, param in matrices.items():
            assert param.grad is not None
            param.grad.mul_(masks[name])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in matrices.items():
                param.mul_(masks[name])
        zeros = sum(int((p == 0).sum()) for p in matrices.values())
        run.record(loss, zeros / sum(p.numel() for p in matrices.values()))


@program("RigL: the smallest weights dropped, and as many grown where gradients are largest")
def regrown(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    matrices = {n: p for n, p in run.module(model).named_parameters() if p.ndim == 2}
    generator = torch.Generator().manual_seed(run.seed)
    masks = {
        n: (torch.rand(p.shape, generator=generator) < 0.5).float() for n, p in matrices.items()
    }
    with torch.no_grad():
        for name, param in matrices.items():
            param.mul_(masks[name])
    for step in range(4):
        loss = mean_square(model(run.tensor(4, SIZE, key=step)) - 1)
        loss.backward()
        run.average(model)
        for name, param in matrices.items():
            assert param.grad is not None
            if step == 2:
                count, mask = int(masks[name].sum()) // 4, masks[name].flatten()
                weak = torch.where(mask > 0, param.detach().abs().flatten(), float("inf"))
                steep = torch.where(mask > 0, -1.0, param.grad.abs().flatten())
                mask[weak.topk(count, largest=False)[1]] = 0.0
                mask[steep.topk(count)[1]] = 1.0
                masks[name] = mask.view_as(masks[name])
                state = optimizer.state[param]
                state["momentum_buffer"].mul_(masks[name])
            param.grad *= masks[name]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in matrices.items():
                param *= masks[name]
        run.record(loss)


@program(
    "a lottery ticket: trained, pruned layer by layer, weights rewound to those of an early step"
)
def lottery_ticket(run: Run) -> None:
    model = run.shard(Net(), [Block])
    module = run.module(model)
    masks = {n: torch.ones_like(p.detach()) for n, p in module.named_parameters() if p.ndim == 2}
    for attempt in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            if attempt == 0 and step == 1:
                early = copy.deepcopy(module.state_dict())
            update(run, model, optimizer, mean_square(model(run.tensor(4, SIZE, key=step)) - 1))
            with torch.no_grad():
                for name, param in module.named_parameters():
                    if name in masks:
                        param.mul_(masks[name])
        for name, param in module.named_parameters():
            if name in masks:
                alive = param.detach().abs()[masks[name] > 0]
                masks[name][param.detach().abs() < alive.quantile(0.3)] = 0.0
        module.load_state_dict(early)
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.mul_(masks.get(name, 1.0))
        run.record([int(mask.sum()) for mask in masks.values()])


class Halves(torch.autograd.Function):
    """Keeps the half with the largest scores; gradients go straight to the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        mask = torch.zeros_like(scores)
        mask.view(-1)[scores.flatten().topk(scores.numel() // 2)[1]] = 1.0
        return mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Scored(nn.Linear):
    """A linear layer with a score for each weight."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.scores = nn.Parameter(0.1 * torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * Halves.apply(self.scores), self.bias)


@program("movement pruning: masks from learned scores, a penalty on them outside of the forward")
def movement_pruning(run: Run) -> None:
    model = run.shard(nn.Sequential(Scored(), nn.Tanh(), Scored()), [Scored])
    scores = [p for n, p in model.named_parameters() if "scores" in n]
    others = [p for n, p in model.named_parameters() if "scores" not in n]
    optimizer = adamw([{"params": scores, "lr": 0.05}, {"params": others}], weight_decay=0.0)
    for step in range(3):
        loss = mean_square(model(run.tensor(6, SIZE, key=step)) - 1)
        penalty = torch.stack([p.sigmoid().mean() for p in scores]).mean()
        update(run, model, optimizer, loss + 0.1 * step * penalty)


@program("ROME: keys by a hook, a value found by gradients of an added vector, a write of rank one")
def rank_one_edit(run: Run) -> None:
    model = run.shard(Words(), [Block])
    train_words(run, model)
    module, keys = run.module(model), []
    layer = module.blocks[0].down
    handle = layer.register_forward_hook(lambda m, args, out: keys.append(args[0].detach()))
    with torch.no_grad():
        for step in range(3):
            model(run.tokens(11, 4, 6, key=step))
    handle.remove()
    flat = torch.cat(keys).flatten(0, 1)
    covariance = flat.t() @ flat
    dist.all_reduce(covariance)
    covariance = covariance / (len(flat) * run.world_size) + 0.1 * torch.eye(2 * SIZE)
    prompt, aim = torch.tensor([[3, 1, 4]]), torch.tensor([5])
    delta, kept = torch.zeros(SIZE, requires_grad=True), {}

    def add(m: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        kept["key"], kept["value"] = args[0][0, -1].detach(), output[0, -1].detach()
        return torch.cat([output[:, :-1], output[:, -1:] + delta], 1)

    handle = layer.register_forward_hook(add)
    model.requires_grad_(False)
    finder = torch.optim.Adam([delta], lr=0.3, eps=1e-4)
    for _ in range(3):
        loss = F.cross_entropy(model(prompt)[:, -1], aim) + 0.05 * delta.square().sum()
        finder.zero_grad()
        loss.backward()
        finder.step()
        run.record(loss)
    handle.remove()
    direction = torch.linalg.solve(covariance, kept["key"])
    with torch.no_grad():
        layer.weight += torch.outer(delta.detach(), direction) / (direction @ kept["key"])
        run.record(model(prompt)[:, -1].softmax(-1)[0, 5], model(torch.tensor([[2, 7, 1]]))[:, -1])


class Projected(torch.optim.Optimizer):
    """Adam in the space of a matrix's largest singular vectors (GaLore)."""

    def __init__(self, params: Any, lr: float, every: int) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state, slope = self.state[param], param.grad
                if param.ndim == 2:
                    if state.get("step", 0) % group["every"] == 0:
                        left = torch.linalg.svd(slope, full_matrices=False)[0]
                        state["basis"] = left[:, :3] * left[:, :3].sum(0).sign()
                    slope = state["basis"].t() @ slope
                if "step" not in state:
                    state["step"] = 0
                    state["first"], state["second"] = (
                        torch.zeros_like(slope),
                        torch.zeros_like(slope),
                    )
                state["step"] += 1
                state["first"].lerp_(slope, 0.1)
                state["second"].lerp_(slope.square(), 0.1)
                move = state["first"] / (state["second"].sqrt() + 1e-3)
                param.sub_(state["basis"] @ move if param.ndim == 2 else move, alpha=group["lr"])


@program(
    "GaLore: moments in the space of a gradient's singular vectors, which are found again at times"
)
def projected_moments(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = Projected(model.parameters(), lr=0.01, every=2)
    for step in range(4):
        update(run, model, optimizer, mean_square(model(run.tensor(8, SIZE, key=step)) - 1))


@program(
    "factors of a trained matrix: cut to a low rank by its singular values, sharded again, tuned"
)
def low_rank_factors(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    optimizer = sgd(model)
    for step in range(2):
        update(run, model, optimizer, mean_square(model(run.tensor(4, SIZE, key=step)) - 1))
    state = run.full_state(model)
    small = Net(1)
    small.load_state_dict(state)
    for block in small.blocks:
        assert isinstance(block, Block)
        left, values, right = torch.linalg.svd(state["blocks.0.up.weight"], full_matrices=False)
        first, second = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, 2 * SIZE)
        with torch.no_grad():
            first.weight.copy_(values[:4].sqrt()[:, None] * right[:4])
            second.weight.copy_(left[:, :4] * values[:4].sqrt())
            second.bias.copy_(state["blocks.0.up.bias"])
        block.up = nn.Sequential(first, second)  # type: ignore[assignment]
    tuned = run.shard(small, [Block])
    optimizer = sgd(tuned)
    for step in range(2):
        with torch.no_grad():
            aim = model(run.tensor(4, SIZE, key=10 + step))
        update(run, tuned, optimizer, F.mse_loss(tuned(run.tensor(4, SIZE, key=10 + step)), aim))
