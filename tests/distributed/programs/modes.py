"""Programs: evaluation, checkpointing, compilation, and torch's contexts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Checkpointed(Net):
    """Recomputes its blocks in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(self.norm(x))


def evaluated(run: Run, context: Any) -> None:
    """Evaluates before and between the steps."""
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        model.eval()
        with context():
            run.record(model(x + 1).mean().item())
        model.train()
        update(run, model, optimizer, mean_square(model(x)))


@program("evaluation between steps under no_grad")
def eval_no_grad(run: Run) -> None:
    evaluated(run, torch.no_grad)


@program("evaluation between steps under inference_mode")
def eval_inference(run: Run) -> None:
    evaluated(run, torch.inference_mode)


@program("evaluation between steps without either")
def eval_with_grad(run: Run) -> None:
    evaluated(run, contextlib.nullcontext)


@program("evaluation in the middle of accumulation")
def eval_in_accumulation(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with run.no_sync(model):
            mean_square(model(x)).backward()
        with torch.no_grad():
            run.record(model(x + 1).mean())
        update(run, model, optimizer, mean_square(model(x - 1)))


@program("evaluation between forward and backward")
def eval_before_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        with torch.no_grad():
            run.record(model(x + 1).mean())
        update(run, model, optimizer, loss)


@program("a frozen part under no_grad inside of the forward", unused=True)
def no_grad_inside(run: Run) -> None:
    class Part(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.inp(x))
            return self.out(self.blocks[1](x))

    train(run, run.shard(Part(), [Block]))


@program("set_grad_enabled by step")
def set_grad_enabled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        with torch.set_grad_enabled(step % 2 == 0):
            loss = mean_square(model(x))
        run.record(loss)
        if step % 2 == 0:
            update(run, model, optimizer, loss)


@program("checkpointed blocks, use_reentrant=False")
def checkpoint_plain(run: Run) -> None:
    train(run, run.shard(Checkpointed(), [Block]))


@program("checkpointed blocks, use_reentrant=True")
def checkpoint_reentrant(run: Run) -> None:
    class Reentrant(Checkpointed):
        reentrant = True

    train(run, run.shard(Reentrant(), [Block]))


@program("checkpointed halves of a sequence (checkpoint_sequential)")
def checkpoint_segments(run: Run) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(8, 8)
            self.body = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.body, 2, self.inp(x), use_reentrant=False)

    train(run, run.shard(Segments(), [Block]))


@program("the root checkpoints a function that uses its own layers")
def checkpoint_function(run: Run) -> None:
    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    train(run, run.shard(Whole(), [Block]))


@program("a checkpointed block that keeps an auxiliary loss")
def checkpoint_auxiliary(run: Run) -> None:
    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return x + torch.tanh(self.l(x)), self.g(x).square().mean()

    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            total = torch.zeros(())
            for block in self.blocks:
                x, aux = checkpoint(block, x, use_reentrant=False)
                total = total + aux
            return self.out(self.norm(self.inp(x))), total

    train(run, run.shard(Model(2, Aux), [Aux]), loss=lambda o: mean_square(o[0]) + o[1])


@program("a block compiled with block.compile() (eager)")
def compiled_block(run: Run) -> None:
    net = Net()
    model = run.shard(net, [Block])
    for block in run.module(model).blocks:
        block.compile(backend="eager")
    train(run, model)


@program("torch.func.grad of a functional_call with full parameters")
def func_grad(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net: Any = run.module(model)
    full = {name: p.detach().clone() for name, p in Net().named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, x).square().mean()

    grads = torch.func.grad(loss)(full, run.tensor(4, 8))
    run.record([grads[name] for name in sorted(grads)])


@program("gradients of each sample: vmap of grad of functional_call")
def func_vmap(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net: Any = run.module(model)
    params = dict(net.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, x.unsqueeze(0)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, run.tensor(4, 8))
    run.record(grads["out.bias"].norm())


@program("a Jacobian of the outputs by torch.autograd.functional.jacobian")
def jacobian(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    run.record(torch.autograd.functional.jacobian(model, run.tensor(2, 8)))


@program("activations kept on the CPU: torch.autograd.graph.save_on_cpu")
def save_on_cpu(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        with torch.autograd.graph.save_on_cpu():
            loss = mean_square(model(x))
        update(run, model, optimizer, loss)


@program("saved_tensors_hooks that double and halve")
def packed_tensors(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2)
    for x in run.batches():
        with hooks:
            loss = mean_square(model(x))
        update(run, model, optimizer, loss)


@program("detect_anomaly")
def detect_anomaly(run: Run) -> None:
    model = run.shard(Net(), [Block])
    with torch.autograd.set_detect_anomaly(True):
        train(run, model)


@program("a method other than forward, declared, in the training step")
def declared_method(run: Run) -> None:
    class Model(Net):
        def features(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x @ self.out.weight

    model = run.shard(Model(), [Block])
    net: Any = run.module(model)
    run.method(net, "features")
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(net.features(x)))


@program("a method other than forward that uses the root's own layers, not declared")
def undeclared_method(run: Run) -> None:
    class Model(Net):
        def features(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x @ self.out.weight

    model = run.shard(Model(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(run.module(model).features(x)))


@program("predictions inside of the full parameters' context")
def predict_unsharded(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    with run.unsharded(model), torch.no_grad():
        run.record(run.module(model)(run.tensor(4, 8)))
    train(run, model)


@program("DistributedDataParallel around the model")
def ddp_around(run: Run) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = run.shard(Net(), [Block])
    train(run, DistributedDataParallel(run.module(model)))


def encoder_in_evaluation(run: Run, units: Any) -> None:
    """Evaluates with padding, between steps: torch computes without what is padded, if it can."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))
    model = run.shard(nn.Sequential(nn.Linear(8, 8), encoder), units)
    net, optimizer = run.module(model), sgd(model)
    padding = torch.arange(5).expand(4, 5) >= torch.tensor([[5], [3], [2], [4]])
    attention = net[1].layers[0].self_attn
    for x in run.batches(3, 4, 5, 8):
        update(run, model, optimizer, mean_square(model(x)))
        model.eval()
        with torch.no_grad():
            run.record(model(x), net[1](x, src_key_padding_mask=padding))
            run.record(net[1].layers[0](x, src_key_padding_mask=padding))
            run.record(attention(x, x, x, need_weights=False)[0])
        update(run, model, optimizer, mean_square(model(2 * x)))
        model.train()


@program("nn.TransformerEncoder evaluated with src_key_padding_mask, its layers being units")
def encoder_padded(run: Run) -> None:
    encoder_in_evaluation(run, [nn.TransformerEncoderLayer])


@program("the same, attention, linear layers and norms being units")
def encoder_padded_fine(run: Run) -> None:
    encoder_in_evaluation(run, [nn.MultiheadAttention, nn.LayerNorm])
