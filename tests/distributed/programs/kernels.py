"""Programs: fused kernels as an autograd.Function, given weights of modules that are not called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.programs.fused import (
    LinearCrossEntropy,
    LoraLinear,
    Quantise,
    RmsNorm,
    SwiGlu,
)
from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    Words,
    mean_square,
    sgd,
    train,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class FusedLossWords(Words):
    """The model computes its loss from the weight of its head."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens[:, :-1]).flatten(0, 1)
        return LinearCrossEntropy.apply(hidden, self.head.weight, tokens[:, 1:].flatten())


def train_loss(run: Run, model: Any, steps: int = 3) -> None:
    """A model that returns its loss."""
    optimizer = sgd(model)
    for step in range(steps):
        update(run, model, optimizer, model(run.tokens(11, 2, 6, key=step)))


@program("Liger's fused head and loss, the head's weight given to a Function by the model")
def fused_loss(run: Run) -> None:
    train_loss(run, run.shard(FusedLossWords(), [Block]))


@program("the same with micro-batches under no_sync")
def fused_loss_accumulation(run: Run) -> None:
    model = run.shard(FusedLossWords(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        with run.no_sync(model):
            (model(run.tokens(11, 2, 6, key=2 * step)) / 2).backward()
        update(run, model, optimizer, model(run.tokens(11, 2, 6, key=2 * step + 1)) / 2)


@program("the fused loss and the head's own call in one step")
def fused_loss_and_logits(run: Run) -> None:
    class Both(FusedLossWords):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(self.hidden(tokens))
            return super().forward(tokens) + 0.01 * logits.square().mean()

    train_loss(run, run.shard(Both(), [Block]))


@program("the fused loss where the head is frozen")
def fused_loss_frozen(run: Run) -> None:
    net = FusedLossWords()
    net.head.requires_grad_(False)
    model = run.shard(net, [Block])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        update(run, model, optimizer, model(run.tokens(11, 2, 6, key=step)))


class MambaBlock(nn.Module):
    """Gives the weight of its norm to a Function, as mamba does with fused_add_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        normed, residual = RmsNorm.apply(x, residual, self.norm.weight)
        return torch.tanh(self.mixer(normed)), residual


class Mamba(nn.Module):
    """Blocks, and a last norm whose weight the root gives to the Function."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(SIZE, SIZE), nn.RMSNorm(SIZE)
        self.blocks = nn.ModuleList(MambaBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return RmsNorm.apply(x, residual, self.norm.weight)[0]


@program("mamba's fused norm: blocks and root give the weights of norms to a Function")
def fused_add_norm(run: Run) -> None:
    train(run, run.shard(Mamba(), [MambaBlock]), loss=lambda y: (y - 1).square().mean())


@program("the same, each norm a unit of its own that is never called")
def fused_add_norm_units(run: Run) -> None:
    model = run.shard(Mamba(), [nn.RMSNorm, nn.Linear])
    train(run, model, loss=lambda y: (y - 1).square().mean())


class GatedBlock(nn.Module):
    """A gated layer in one Function; its linear layers are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SIZE, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + SwiGlu.apply(x, self.gate.weight, self.up.weight, self.down.weight)


@program("a fused SwiGLU with the weights of three linear layers")
def fused_swiglu(run: Run) -> None:
    train(run, run.shard(Net(2, GatedBlock), [GatedBlock]))


@program("a fused SwiGLU in blocks that are recomputed")
def fused_swiglu_checkpoint(run: Run) -> None:
    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=index == 1)
            return self.out(self.norm(x))

    train(run, run.shard(Recomputed(2, GatedBlock), [GatedBlock]))


@program("a frozen weight and its adapter in one Function (Unsloth)")
def fused_lora(run: Run) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
            self.a, self.b = nn.Linear(SIZE, 2, bias=False), nn.Linear(2, SIZE, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + LoraLinear.apply(x, self.base.weight, self.a.weight, self.b.weight)

    model = run.shard(Net(2, Adapted), [Adapted])
    train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


@program("training aware of quantisation: a Function rounds the weight, straight through")
def quantised_straight_through(run: Run) -> None:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Quantise.apply(self.weight), self.bias)

    train(run, run.shard(Net(2, lambda: Rounded(SIZE, SIZE)), [Rounded]))


@program("the root rounds the weights of blocks by a Function, before it calls them")
def function_reads_ahead(run: Run) -> None:
    class Ahead(Net):
        def forward(self, x: Tensor) -> Tensor:
            rounded = [Quantise.apply(block.up.weight) for block in self.blocks]
            penalty = sum(weight.square().mean() for weight in rounded)
            return super().forward(x) + penalty

    train(run, run.shard(Ahead(), [Block]))


@program("a kernel under autocast: custom_fwd and custom_bwd around a weight")
def function_autocast(run: Run) -> None:
    class Kernel(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Kernel.apply(super().forward(x), self.out.weight)

    model = run.shard(Model(), [Block])
    optimizer = sgd(model)
    for x in run.batches(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_square(model(x).float())
        update(run, model, optimizer, loss)


@program("a Function that computes no gradient for what needs none (needs_input_grad)")
def function_needs_input_grad(run: Run) -> None:
    class Kernel(Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight.t()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            need_x, need_weight = ctx.needs_input_grad
            return grad @ weight if need_x else None, grad.t() @ x if need_weight else None

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Kernel.apply(x, self.inp.weight)) + self.inp.bias

    net = Model()
    net.norm.requires_grad_(False)
    model = run.shard(net, [Block])
    train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


@program("a backward that adds the weight's gradient to weight.grad itself (Megatron's fusion)")
def function_accumulates_itself(run: Run) -> None:
    class Kernel(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,), weight = ctx.saved_tensors, ctx.weight
            part = grad.t() @ x
            weight.grad = part if weight.grad is None else weight.grad.add_(part)
            return grad @ weight, None

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Kernel.apply(super().forward(x), self.out.weight)

    train(run, run.shard(Model(), [Block]))


@program("one weight in two Functions, in its own layer and in a penalty")
def function_everywhere(run: Run) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.out.weight
            once = RmsNorm.apply(x, torch.zeros_like(x), weight[0])[0]
            rounded = F.linear(once, Quantise.apply(weight))
            return super().forward(x) + rounded + weight.square().mean()

    train(run, run.shard(Model(), [Block]))
