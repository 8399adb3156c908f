"""Trains a model whose weights and moments are in files, one unit in memory at a time.

This is plain torch over zerocore's swapped units: no `shard()`, one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zerocore._C import SwappedUnits

ops: Any = torch.ops.zerocore
F32 = torch.float32
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
NUM_BUFFERS = 3


class Block(nn.Module):
    """A transformer's block with causal attention; takes and gives (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, shaped as its input."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def gpt(num_blocks: int, width: int, heads: int, vocabulary: int) -> Iterator[nn.Module]:
    """Its units in order, each made when it is asked for."""
    yield nn.Embedding(vocabulary, width)
    for _ in range(num_blocks):
        yield Block(width, heads)
    yield nn.Linear(width, vocabulary, bias=False)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of each token by those before it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class SwappedModel:
    """Units in two files in `folder`: weights, and the two moments of AdamW.

    A unit is updated as soon as it has its gradient, so gradients are in no file.
    """

    def __init__(self, folder: Path, make_units: Callable[[], Iterator[nn.Module]]) -> None:
        with torch.device("meta"):
            self._modules = list(make_units())
        self._steps = [[torch.zeros(()) for _ in m.parameters()] for m in self._modules]
        self.numels = [sum(p.numel() for p in module.parameters()) for module in self._modules]
        names = [f"{index}" for index in range(len(self.numels))]
        sizes = [F32.itemsize * numel for numel in self.numels]
        self.weights = SwappedUnits(str(folder), "weights", names, sizes, NUM_BUFFERS)
        moments = [2 * size for size in sizes]
        self.moments = SwappedUnits(str(folder), "moments", names, moments, NUM_BUFFERS)
        with torch.no_grad():
            for index, module in enumerate(make_units()):
                torch._foreach_copy_(self._acquire(index), list(module.parameters()))
                self.weights.release(index, True)

    def step(self, tokens: Tensor) -> Tensor:
        """Forward, backward and update; the loss of the batch `tokens`, int64 (batch, tokens)."""
        last = len(self._modules) - 1
        self.weights.expect([*range(last + 1), *reversed(range(last))])
        self.moments.expect(list(reversed(range(last + 1))))
        inputs = list(self._forward(tokens))
        loss, grad = self._backward(last, inputs[last], None, tokens)
        for index in reversed(range(last)):
            _, grad = self._backward(index, inputs[index], grad, tokens)
        self.weights.finish()
        self.moments.finish()
        return loss

    def _forward(self, tokens: Tensor) -> Iterator[Tensor]:
        """The input of each unit."""
        x = tokens
        with torch.no_grad():
            for index, module in enumerate(self._modules):
                yield x
                if index < len(self._modules) - 1:
                    x = functional_call(module, self._named(index, self._acquire(index)), x)
                    self.weights.release(index, False)

    def _backward(
        self, index: int, x: Tensor, grad: Tensor | None, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the unit again and updates it; the last one's loss, the input's gradient."""
        weights = [weight.detach().requires_grad_() for weight in self._acquire(index)]
        x = x.detach().requires_grad_(x.is_floating_point())
        out = functional_call(self._modules[index], self._named(index, weights), x)
        if grad is None:
            out = loss_of(out, tokens)
        wanted = [*weights, x] if x.requires_grad else weights
        grads = list(torch.autograd.grad(out, wanted, grad))
        input_grad = grads.pop() if x.requires_grad else None
        with torch.no_grad():
            self._update(index, weights, grads)
        self.weights.release(index, True)
        return out.detach(), input_grad

    def _update(self, index: int, weights: Sequence[Tensor], grads: list[Tensor]) -> None:
        numel = self.numels[index]
        moments = self.moments.acquire(index, 2 * numel, F32).split(numel)
        averages, squares = (self._views(index, flat) for flat in moments)
        ops.adamw(weights, grads, averages, squares, self._steps[index], [], **OPTIONS)
        self.moments.release(index, True)

    def _acquire(self, index: int) -> list[Tensor]:
        return self._views(index, self.weights.acquire(index, self.numels[index], F32))

    def _views(self, index: int, flat: Tensor) -> list[Tensor]:
        params = list(self._modules[index].parameters())
        pieces = flat.split([param.numel() for param in params])
        return [p.view(param.shape) for p, param in zip(pieces, params, strict=True)]

    def _named(self, index: int, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        names = [name for name, _ in self._modules[index].named_parameters()]
        return dict(zip(names, weights, strict=True))
