"""Programs: what goes into a forward and what comes out of it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

Both = namedtuple("Both", ["hidden", "extra"])


@dataclass
class Output:
    """As models of vision and language return."""

    hidden: Tensor
    extra: Any = None


class Plain:
    """No container that anybody knows."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def block_returning(make: Any) -> type[nn.Module]:
    """A class of blocks whose output is made by a function."""

    class Made(Block):
        def forward(self, x: Tensor) -> Any:
            return make(super().forward(x))

    return Made


def train_through(run: Run, make: Any, read: Any) -> None:
    """Trains a model whose blocks return `make(x)`; the next one takes `read` of it."""
    cls = block_returning(make)

    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            x = self.inp(x)
            for block in self.blocks:
                x = read(block(x))
            return make(self.out(self.norm(x)))

    train(run, run.shard(Model(2, cls), [cls]), loss=lambda output: mean_square(read(output)))


@program("blocks and model return a dict")
def output_dict(run: Run) -> None:
    train_through(run, lambda x: {"hidden": x, "none": None}, lambda o: o["hidden"])


@program("blocks and model return a dataclass")
def output_dataclass(run: Run) -> None:
    train_through(run, lambda x: Output(x), lambda o: o.hidden)


@program("blocks and model return a plain object")
def output_object(run: Run) -> None:
    train_through(run, Plain, lambda o: o.hidden)


@program("blocks and model return a namedtuple")
def output_namedtuple(run: Run) -> None:
    train_through(run, lambda x: Both(x, None), lambda o: o.hidden)


@program("blocks and model return an OrderedDict in a list, with None and numbers")
def output_nested(run: Run) -> None:
    train_through(run, lambda x: [None, 3, OrderedDict(a=(x,))], lambda o: o[2]["a"][0])


@program("a block returns a function that holds its output")
def output_closure(run: Run) -> None:
    train_through(run, lambda x: lambda: x, lambda o: o())


@program("blocks write into a dict that they are given")
def output_in_argument(run: Run) -> None:
    class Writes(Block):
        def forward(self, store: Any) -> None:  # type: ignore[override]
            store["x"] = super().forward(store["x"])

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            store = {"x": self.inp(x)}
            for block in self.blocks:
                block(store)
            return self.out(store["x"])

    train(run, run.shard(Model(2, Writes), [Writes]))


@program("blocks append their output to a list that they are given")
def output_appended(run: Run) -> None:
    class Appends(Block):
        def forward(self, x: Tensor, outputs: Any) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            outputs.append(y * 2)
            return y

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, outputs = self.inp(x), []
            for block in self.blocks:
                x = block(x, outputs)
            return self.out(x) + sum(outputs)

    train(run, run.shard(Model(2, Appends), [Appends]))


@program("the output of a block is changed in place", unused=True)
def output_in_place(run: Run) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
                x += 1
                x.mul_(0.5)
            return self.out(x)

    train(run, run.shard(Model(), [Block]))


@program("a block returns its input in some steps", unused=True)
def output_is_input(run: Run) -> None:
    class Skips(Block):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            return x if self.skip else super().forward(x)

    model = run.shard(Net(2, Skips), [Skips])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        run.module(model).blocks[0].skip = step % 2 == 1
        update(run, model, optimizer, mean_square(model(x)))


@program("a block returns its weight for use outside", unused=True)
def output_weight(run: Run) -> None:
    class Gives(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.up.weight

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, total = self.inp(x), torch.zeros(())
            for block in self.blocks:
                x, weight = block(x)
                total = total + weight.square().mean()
            return self.out(x) + total

    train(run, run.shard(Model(2, Gives), [Gives]))


@program("a block returns a view of its output")
def output_view(run: Run) -> None:
    train_through(run, lambda x: x.view(2, 2, 8).transpose(0, 1), lambda o: o.reshape(4, 8))


@program("inputs by keyword only, with strings and None")
def keyword_inputs(run: Run) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleList(Block() for _ in range(2))
            self.out = nn.Linear(8, 8)

        def forward(self, *, x: Tensor, mask: Any = None, mode: str = "a") -> Tensor:
            for block in self.net:
                x = block(x=x)
            return self.out(x) if mode == "a" else x

    model = run.shard(Keyword(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x=x, mask=None, mode="a")))


@program("the model returns its loss, and logits without gradient")
def output_loss(run: Run) -> None:
    class Lossy(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"loss": mean_square(y), "logits": y.detach()}

    train(run, run.shard(Lossy(), [Block]), loss=lambda output: output["loss"])


@program("one output of two has no use on one rank", unused=True)
def output_unused_by_rank(run: Run) -> None:
    class Forked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = Block()

        def forward(self, x: Tensor) -> Any:
            x = self.inp(x)
            return self.out(self.blocks[1](self.blocks[0](x))), self.side(x)

    model = run.shard(Forked(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        first, second = model(x)
        loss = mean_square(first)
        if (run.rank + step) % 2:
            loss = loss + mean_square(second)
        update(run, model, optimizer, loss)


@program("a loss that is multiplied by zero on one rank")
def loss_zero_on_one_rank(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        update(run, model, optimizer, mean_square(model(x)) * ((run.rank + step) % 2))


@program("batches of different sizes on the ranks")
def ragged_batches(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        x = run.tensor(2 + run.rank + step, 8, key=step)
        update(run, model, optimizer, mean_square(model(x)))


@program("an empty batch on one rank")
def empty_batch(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        x = run.tensor(0 if step == 1 and run.rank else 4, 8, key=step)
        update(run, model, optimizer, model(x).square().sum() / 32)
