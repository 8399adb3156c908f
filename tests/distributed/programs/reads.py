"""Programs: a module that reads the parameters of another one, in a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import Block, Net, Words, sgd, train, train_words, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Scale(nn.Module):
    """Holds a weight; nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4))


class ReadsScale(nn.Module):
    """Uses the weight of a child that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.scale = nn.Linear(8, 8), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return (self.l(x).unsqueeze(-1) * self.scale.w).sum(-1)


@program("the root multiplies by the weight of a child that it never calls")
def read_uncalled_child(run: Run) -> None:
    train(run, run.shard(ReadsScale()))


@program("the same, the children being units")
def read_uncalled_unit(run: Run) -> None:
    train(run, run.shard(ReadsScale(), [nn.Linear]))


@program("a block multiplies by the weight of a child that it never calls")
def read_uncalled_in_block(run: Run) -> None:
    train(run, run.shard(Net(2, ReadsScale), [ReadsScale]))


@program("F.layer_norm with the weight and bias of a child")
def read_layer_norm(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.n, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.layer_norm(self.l(x), (8,), self.n.weight, self.n.bias))

    train(run, run.shard(Model()))


@program("a grandchild is called, its parent never")
def call_grandchild(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Module()
            self.enc.lin, self.enc.bias = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.enc.lin(x) + self.enc.bias))

    train(run, run.shard(Model()))


@program("logits with F.linear(x, embed.weight)")
def tied_by_function(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.embed.weight)

    train_words(run, run.shard(Model(), [Block]))


@program("logits with F.linear(x, embed.weight), the embedding being a unit")
def tied_by_function_unit(run: Run) -> None:
    class Model(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.embed.weight) + self.head(x)

    train_words(run, run.shard(Model(), [Block, nn.Embedding]))


@program("q, k and v fused by the root: torch.cat of three children's weights")
def fused_qkv(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(8, 8)
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
            bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
            q, k, v = F.linear(self.inp(x), weight, bias).chunk(3, -1)
            return torch.softmax(q @ k.t(), -1) @ v

    train(run, run.shard(Model()))


@program("q, k and v fused inside of a block", unused=True)
def fused_qkv_block(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
            q, k, v = F.linear(x, weight).chunk(3, -1)
            return x + torch.softmax(q @ k.t(), -1) @ v

    train(run, run.shard(Net(2, Attention), [Attention]))


@program("a model that torch.fx traced")
def fx_traced(run: Run) -> None:
    train(run, run.shard(torch.fx.symbolic_trace(Net())))


@program("a traced model with the blocks as leaves")
def fx_traced_leaves(run: Run) -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, Block) or super().is_leaf_module(m, name)

    net = Net()
    train(run, run.shard(torch.fx.GraphModule(net, Tracer().trace(net)), [Block]))


@program("a block reads the weight of the block before it")
def read_neighbour(run: Run) -> None:
    class Neighbour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.before: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            shared = [F.linear(x, other.l.weight) for other in self.before]
            return x + torch.tanh(self.l(x) + sum(shared))

    net = Net(3, Neighbour)
    for before, block in zip(net.blocks[:-1], net.blocks[1:], strict=True):
        block.before.append(before)
    train(run, run.shard(net, [Neighbour]))


@program("the root reads the weights of all blocks, stacked")
def read_stacked_blocks(run: Run) -> None:
    class Stacked(Net):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.stack([block.up.weight for block in self.blocks])
            return super().forward(x) + torch.einsum("nod,bd->bo", weights, x)[:, :8]

    train(run, run.shard(Stacked(), [Block]))


@program("an orthogonality penalty computed inside of the root's forward")
def read_penalty_inside(run: Run) -> None:
    class Penalised(Net):
        def forward(self, x: Tensor) -> Any:
            penalty = sum((b.up.weight @ b.up.weight.t()).square().sum() for b in self.blocks)
            return super().forward(x), penalty

    train(run, run.shard(Penalised(), [Block]), loss=lambda o: o[0].square().mean() + 0.01 * o[1])


@program("the same penalty before the blocks were called, and their own forward after it")
def read_early(run: Run) -> None:
    class Early(Net):
        def forward(self, x: Tensor) -> Tensor:
            gain = self.blocks[1].up.weight.mean() + self.out.weight.std()
            return super().forward(x * gain)

    train(run, run.shard(Early(), [Block]))


@program("x.to(self.child.weight.dtype), and the shape of a child's weight")
def read_dtype_shape(run: Run) -> None:
    class Casting(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.blocks[0].up.weight.dtype)
            return super().forward(x) / self.blocks[1].up.weight.shape[0]

    train(run, run.shard(Casting(), [Block]))


@program("a method of the model that reads a child, called from forward", unused=True)
def read_in_method(run: Run) -> None:
    class Model(Net):
        def logits(self, x: Tensor) -> Tensor:
            return x @ self.out.weight.t() + self.out.bias

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(self.norm(x))
            return self.logits(x)

    train(run, run.shard(Model(), [Block]))


@program("the head's weight read outside of the forward, for a loss in chunks")
def read_head_outside(run: Run) -> None:
    model = run.shard(Words(), [Block])
    optimizer = sgd(model)
    features: list[Tensor] = []
    run.module(model).blocks[1].register_forward_hook(lambda m, a, o: features.append(o))
    for step in range(2):
        features.clear()
        model(run.tokens(11, 2, 6, key=step))
        logits = F.linear(features[0], run.module(model).head.weight)
        update(run, model, optimizer, logits.square().mean())
