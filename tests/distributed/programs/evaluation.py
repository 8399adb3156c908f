"""Programs: evaluation at any place, parts used later or no more, flags that change in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    Words,
    adamw,
    mean_square,
    sgd,
    train,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run
from tests.distributed.programs.ways import Tower


def with_between(run: Run, between: Any, net: nn.Module | None = None) -> None:
    """Something between each forward and its backward."""
    model = run.shard(net or Net(), [Block])
    optimizer = adamw(model.parameters())
    for step, x in enumerate(run.batches()):
        loss = mean_square(model(x))
        between(model, x, step)
        update(run, model, optimizer, loss)


@program("evaluation under inference_mode between forward and backward")
def eval_between_inference(run: Run) -> None:
    def between(model: Any, x: Tensor, step: int) -> None:
        model.eval()
        with torch.inference_mode():
            run.record(model(x + 1).mean().item())
        model.train()

    with_between(run, between)


@program("a part alone evaluated between forward and backward: model.blocks[1](x)")
def eval_between_part(run: Run) -> None:
    def between(model: Any, x: Tensor, step: int) -> None:
        with torch.no_grad():
            run.record(run.module(model).blocks[1](x).mean())

    with_between(run, between)


@program("several batches evaluated between forward and backward, in other shapes")
def eval_between_batches(run: Run) -> None:
    def between(model: Any, x: Tensor, step: int) -> None:
        with torch.no_grad():
            for count in (1, 3, 7):
                run.record(model(run.tensor(count, 8, key=50 + count)).mean())

    with_between(run, between)


@program("a metric with gradients between forward and backward, its graph dropped")
def eval_between_with_grad(run: Run) -> None:
    def between(model: Any, x: Tensor, step: int) -> None:
        run.record(model(x + 1).mean().item())

    with_between(run, between)


@program("tokens generated between forward and backward")
def generate_between(run: Run) -> None:
    model = run.shard(Words(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        tokens = run.tokens(11, 2, 6, key=step)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        with torch.no_grad():
            made = tokens[:, :2]
            for _ in range(3):
                made = torch.cat([made, model(made)[:, -1:].argmax(-1)], 1)
        run.record(made)
        update(run, model, optimizer, loss)


@program("evaluation between two forwards of one loss")
def eval_between_forwards(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        first = model(x)
        with torch.no_grad():
            run.record(model(x + 1).mean())
        update(run, model, optimizer, mean_square(first + model(-x)))


@program("evaluation between two backwards of two losses")
def eval_between_backwards(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        first, second = mean_square(model(x)), mean_square(model(x + 1))
        first.backward()
        with torch.no_grad():
            run.record(model(x - 1).mean())
        second.backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("evaluation between the forward and the backward of recomputed blocks")
def eval_between_checkpoints(run: Run) -> None:
    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=index == 0)
            return self.out(self.norm(x))

    def between(model: Any, x: Tensor, step: int) -> None:
        with torch.no_grad():
            run.record(model(x + 1).mean())

    with_between(run, between, Recomputed())


@program("gradients enabled again inside of an evaluation (guidance by a classifier)")
def grad_inside_eval(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            point = x.clone()
            for _ in range(2):
                with torch.enable_grad():
                    point = point.detach().requires_grad_()
                    slope = torch.autograd.grad(model(point).sum(), point)[0]
                point = point + 0.1 * slope
            run.record(point)


@program("layers skipped by a coin of each rank, evaluation before the backward", unused=True)
def skipped_and_eval_between(run: Run) -> None:
    class Dropping(Net):
        kept: list[bool]

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block, kept in zip(self.blocks, self.kept, strict=True):
                x = block(x) if kept or not self.training else x
            return self.out(self.norm(x))

    model = run.shard(Dropping(3), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(5)):
        run.module(model).kept = (run.tensor(3, key=100 + step) > 0).tolist()
        loss = mean_square(model(x))
        model.eval()
        with torch.no_grad():
            run.record(model(x + 1).mean())
        model.train()
        update(run, model, optimizer, loss)


@program("a branch that one rank takes, evaluation of it between forward and backward", unused=True)
def branch_and_eval_between(run: Run) -> None:
    model = run.shard(Tower(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        loss = mean_square(model(x, run.rank == step % 2))
        with torch.no_grad():
            run.record(model(x, True).mean())
        update(run, model, optimizer, loss)


class Headed(Net):
    """A second head for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if extra else x


def head_in(run: Run, steps: Any, optimizer_of: Any = adamw, **options: Any) -> None:
    model = run.shard(Headed(), [Block])
    optimizer = optimizer_of(model.parameters(), **options)
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, mean_square(model(x, step in steps)))


@program("a head used in the first step only, AdamW with weight decay", unused=True)
def head_first_step(run: Run) -> None:
    head_in(run, (0,), weight_decay=0.5)


@program("a head used in the first step only, SGD with momentum", unused=True)
def head_first_step_momentum(run: Run) -> None:
    head_in(run, (0,), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@program("a head used from the third step on, AdamW with weight decay", unused=True)
def head_later(run: Run) -> None:
    head_in(run, (2, 3), weight_decay=0.5)


@program("a head used in every second step, AdamW with weight decay", unused=True)
def head_in_turn(run: Run) -> None:
    head_in(run, (0, 2), weight_decay=0.5)


@program("a head used in the first micro-batch of each step only", unused=True)
def head_first_micro_batch(run: Run) -> None:
    model = run.shard(Headed(), [Block])
    optimizer = adamw(model.parameters(), weight_decay=0.5)
    for step, x in enumerate(run.batches(4)):
        with run.no_sync(model):
            mean_square(model(x, step < 2)).backward()
        update(run, model, optimizer, mean_square(model(x + 1, False)))


@program("frozen between forward and backward: the backward still owes the gradient", unused=True)
def frozen_between(run: Run) -> None:
    def between(model: Any, x: Tensor, step: int) -> None:
        run.module(model).out.requires_grad_(False)

    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches()):
        loss = mean_square(model(x))
        between(model, x, step)
        update(run, model, optimizer, loss)
        run.module(model).out.requires_grad_(True)


@program("made trainable between forward and backward: it counts in the next forward", unused=True)
def unfrozen_between(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net = run.module(model)
    optimizer = sgd(model)
    for x in run.batches():
        net.blocks[0].requires_grad_(False)
        loss = mean_square(model(x))
        net.blocks[0].requires_grad_(True)
        update(run, model, optimizer, loss)


@program("a critic frozen for the generator's forward, trainable before its backward", unused=True)
def critic_thawed_before_backward(run: Run) -> None:
    generator, critic = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    g_optimizer, d_optimizer = sgd(generator), sgd(critic)
    for x in run.batches():
        fake = generator(x)
        run.module(critic).requires_grad_(False)
        g_loss = F.softplus(-critic(fake)).mean()
        run.module(critic).requires_grad_(True)
        update(run, generator, g_optimizer, g_loss)
        d_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        update(run, critic, d_optimizer, d_loss)


@program("layers frozen one by one in mid-run, momentum and decay go on for the rest", unused=True)
def frozen_by_step(run: Run) -> None:
    model = run.shard(Net(3), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step, x in enumerate(run.batches(5)):
        if step >= 2:
            run.module(model).blocks[step - 2].requires_grad_(False)
        update(run, model, optimizer, mean_square(model(x)))


@program("torch.autograd.grad for a GradientEdge of an inner activation")
def gradient_edge(run: Run) -> None:
    edges: list[Any] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        edges.append(get_gradient_edge(output))

    model = run.shard(Net(), [Block])
    run.module(model).blocks[0].up.register_forward_hook(keep)
    optimizer = sgd(model)
    for x in run.batches():
        edges.clear()
        loss = mean_square(model(x))
        run.record(torch.autograd.grad(loss, edges[0], retain_graph=True)[0])
        update(run, model, optimizer, loss)


@program("loss.backward(inputs=...) and torch.autograd.backward with a GradientEdge as the root")
def gradient_edge_root(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        torch.autograd.backward(get_gradient_edge(loss), torch.ones(()))
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


def padded(run: Run, key: int) -> tuple[Tensor, Tensor]:
    """A batch whose last positions are padding."""
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:], mask[1, 4:] = True, True
    return run.tensor(2, 5, SIZE, key=key), mask


def encoder(nested: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(SIZE, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def evaluate_padded(run: Run, net: nn.Module, units: Any) -> None:
    """Trains and evaluates with padding; records all positions."""
    model = run.shard(net, units)
    optimizer = sgd(model)
    for step in range(2):
        x, mask = padded(run, step)
        loss = (model(x, src_key_padding_mask=mask) * ~mask[..., None]).square().mean()
        update(run, model, optimizer, loss)
        model.eval()
        with torch.no_grad():
            run.record(model(x, src_key_padding_mask=mask))
        model.train()


@program("TransformerEncoder with a padding mask in eval, outputs at padding too")
def encoder_padding(run: Run) -> None:
    evaluate_padded(run, encoder(nested=True), None)


@program("the same, its layers as units, without nested tensors")
def encoder_padding_units(run: Run) -> None:
    evaluate_padded(run, encoder(nested=False), [nn.TransformerEncoderLayer])


@program("rank 0 alone evaluates a plain copy of the full state between forward and backward")
def eval_copy_on_rank_0(run: Run) -> None:
    twin = Net()

    def between(model: Any, x: Tensor, step: int) -> None:
        state = run.full_state(model)
        if run.rank == 0:
            twin.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
            with torch.no_grad():
                run.record(twin(x))

    with_between(run, between)


@program("evaluation with dropout on, several samples under no_grad (Monte Carlo)")
def eval_monte_carlo(run: Run) -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    model = run.shard(Noisy(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        with torch.no_grad():
            run.record(torch.stack([model(x) for _ in range(3)]).var(0))
        update(run, model, optimizer, loss)
    train(run, model)
