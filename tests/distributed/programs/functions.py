"""Programs: weights given to code that torch functions do not announce: an autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    Words,
    mean_square,
    sgd,
    train,
    train_words,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Product(torch.autograd.Function):
    """x @ w.t(), as a fused linear layer does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in the forward, chunk by chunk, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, targets: Tensor, chunk: int = 3) -> Tensor:
        grads, grad_w, loss = [], torch.zeros_like(w), h.new_zeros(())
        for part, target in zip(h.split(chunk), targets.split(chunk), strict=True):
            logits = part @ w.t()
            loss = loss + F.cross_entropy(logits, target, reduction="sum")
            slope = torch.softmax(logits, -1) - F.one_hot(target, len(w))
            grads.append(slope @ w)
            grad_w += slope.t() @ part
        ctx.save_for_backward(torch.cat(grads) / len(h), grad_w / len(h))
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_h, grad_w = ctx.saved_tensors
        return grad * grad_h, grad * grad_w, None, None


class RmsNorm(torch.autograd.Function):
    """A norm with a context that is set up apart, keyword arguments and defaults."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
        return w * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.eps = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            output = RmsNorm.forward(x, w, ctx.eps)
        return *torch.autograd.grad(output, (x, w), grad), None


class Mixed(torch.autograd.Function):
    """Adds a list of vectors, which get no gradient, to a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, biases: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + torch.stack(biases).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, None


# As kernels' packages have it: bound when they are imported.
product, linear_cross_entropy = Product.apply, LinearCrossEntropy.apply


class FusedHead(Words):
    """The root gives the weight of a head that nobody calls to a loss that is one Function."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens[:, :-1])
        for block in self.blocks:
            h = block(h)
        return LinearCrossEntropy.apply(h.flatten(0, 1), self.head.weight, tokens[:, 1:].flatten())


def train_losses(run: Run, model: Any, steps: int = 3) -> None:
    """Trains a model that returns its loss on tokens."""
    optimizer = sgd(model)
    for step in range(steps):
        update(run, model, optimizer, model(run.tokens(11, 2, 6, key=step)))


@program("a fused linear cross-entropy of the head's weight in the root's forward")
def function_head(run: Run) -> None:
    train_losses(run, run.shard(FusedHead(), [Block]))


@program("the same, the head being a unit that nobody calls")
def function_head_unit(run: Run) -> None:
    train_losses(run, run.shard(FusedHead(), [nn.Linear, nn.Embedding]))


@program("the same, the head's weight tied to the embedding, which is a unit")
def function_head_tied(run: Run) -> None:
    train_losses(run, run.shard(FusedHead(tied=True), [Block, nn.Embedding]))


@program("a fused linear cross-entropy of the head's weight, evaluated under no_grad in between")
def function_evaluated(run: Run) -> None:
    model = run.shard(FusedHead(), [nn.Linear, nn.Embedding])
    optimizer = sgd(model)
    for step in range(3):
        loss = model(run.tokens(11, 2, 6, key=step))
        with torch.no_grad():
            run.record(model(run.tokens(11, 2, 6, key=step + 7)))
        update(run, model, optimizer, loss)


@program("a fused linear cross-entropy of the head's weight in the loss, behind the model")
def function_in_the_loss(run: Run) -> None:
    model = run.shard(Words(), [nn.Linear, nn.Embedding])
    net, optimizer = run.module(model), sgd(model)
    for step in range(3):
        tokens = run.tokens(11, 2, 6, key=step)
        h = model(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = linear_cross_entropy(h.flatten(0, 1) @ net.head.weight, net.head.weight, targets)
        with torch.no_grad():
            run.record(linear_cross_entropy(h.flatten(0, 1)[:, :8], net.head.weight, targets))
        update(run, model, optimizer, loss)


class FusedBlock(Block):
    """A block that gives weights of its children to Functions, with keywords and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = RmsNorm.apply(x, self.norm.weight, eps=1e-3)
        return x + product(torch.tanh(product(h, self.up.weight)), self.down.weight)


@program("blocks that give their children's weights to Functions", unused=True)
def function_in_blocks(run: Run) -> None:
    train(run, run.shard(Net(2, FusedBlock), [FusedBlock]))


@program("the same, the children being units that nobody calls", unused=True)
def function_of_units(run: Run) -> None:
    train(run, run.shard(Net(2, FusedBlock), [nn.Linear, nn.RMSNorm]))


@program("the same, under both kinds of checkpoint in turn", unused=True)
def function_checkpointed(run: Run) -> None:
    class Recomputed(FusedBlock):
        def forward(self, x: Tensor) -> Tensor:
            for reentrant in (False, True):
                x = checkpoint(super().forward, x, use_reentrant=reentrant)
            return x

    train(run, run.shard(Net(2, Recomputed), [Recomputed]))


@program("the same, blocks called under both kinds of checkpoint", unused=True)
def function_in_checkpointed_blocks(run: Run) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=index == 0)
            return self.out(self.norm(x))

    train(run, run.shard(Model(2, FusedBlock), [nn.Linear, nn.RMSNorm]))


@program("a frozen weight, and a list of weights that get no gradient, given to a Function")
def function_of_a_list(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            self.fixed = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = Mixed.apply(self.inp(x), self.fixed.weight, [self.fixed.bias, self.out.bias])
            return self.out(x) + self.inp(x)

    train(run, run.shard(Model(), [nn.Linear]))


@program("a gradient all-reduced by a Function of torch.distributed.nn, of a weight nobody calls")
def function_of_collectives(run: Run) -> None:
    from torch.distributed.nn.functional import all_reduce

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.table = nn.Linear(8, 8), nn.Embedding(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inp(x) @ all_reduce(self.table.weight) / run.world_size

    train(run, run.shard(Model(), [nn.Linear, nn.Embedding]))


@program("an operator of torch.library with a backward, given a weight nobody calls")
def library_operator(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.zerocore_tests.product(self.inp(x), self.head.weight)

    train(run, run.shard(Model(), [nn.Linear]))


@torch.library.custom_op("zerocore_tests::product", mutates_args=())
def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return grad @ w, grad.t() @ x


torch.library.register_autograd("zerocore_tests::product", _product_backward, setup_context=_save)


def chunked(run: Run, reentrant: bool, give: str) -> None:
    """Logits in chunks under checkpoint: the weight is an argument, in a list, or in a closure."""

    def losses(h: Tensor, weight: Any, target: Tensor) -> Tensor:
        weight = weight[0] if isinstance(weight, list) else weight
        return F.cross_entropy(h @ weight.t(), target, reduction="sum")

    class Model(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            h, total = self.embed(tokens[:, :-1]), torch.zeros(())
            for block in self.blocks:
                h = block(h)
            w = self.head.weight
            for part, target in zip(h.unbind(1), tokens[:, 1:].unbind(1), strict=True):
                given = {"argument": w, "list": [w], "closure": None}[give]
                closure = (lambda h, _, t: losses(h, w, t)) if give == "closure" else losses
                total = total + checkpoint(closure, part, given, target, use_reentrant=reentrant)
            return total / target.numel()

    train_losses(run, run.shard(Model(), [Block]))
    train_losses(run, run.shard(Model(), [nn.Linear, nn.Embedding]))


@program("logits in chunks by a reentrant checkpoint that is given the head's weight")
def chunked_reentrant(run: Run) -> None:
    chunked(run, True, "argument")


@program("the same, the weight given in a list")
def chunked_reentrant_list(run: Run) -> None:
    chunked(run, True, "list")


@program("the same, the weight taken from outside by the function")
def chunked_reentrant_closure(run: Run) -> None:
    chunked(run, True, "closure")


@program("logits in chunks by a checkpoint that is not reentrant, given the head's weight")
def chunked_checkpoint(run: Run) -> None:
    chunked(run, False, "argument")


@program("the same, the weight taken from outside by the function")
def chunked_checkpoint_closure(run: Run) -> None:
    chunked(run, False, "closure")


@program("attention whose keys and values are weights of a module that nobody calls")
def attention_over_weights(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            keys, values = self.keys.weight[None], self.values.weight[None]
            return F.scaled_dot_product_attention(self.inp(x)[None], keys, values)

    train(run, run.shard(Model(), [nn.Linear]), loss=mean_square)


@program("tied logits by a Function of the embedding's weight, two backwards of one forward")
def function_twice(run: Run) -> None:
    class Model(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            h = self.embed(tokens)
            for block in self.blocks:
                h = block(h)
            return Product.apply(h, self.embed.weight) + self.head(h)

    model = run.shard(Model(), [Block, nn.Embedding])
    train_words(run, model, steps=2)
    optimizer = sgd(model)
    logits = model(run.tokens(11, 2, 6, key=9))
    logits.square().mean().backward(retain_graph=True)
    update(run, model, optimizer, logits.logsumexp(-1).mean())
