"""Programs: hooks on parameters, modules, activations and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


@program("optimizer in backward: register_post_accumulate_grad_hook")
def optimizer_in_backward(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Any) -> None:
        run.average_one(p)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x in run.batches():
        loss = mean_square(model(x))
        loss.backward()
        run.record(loss)


@program("register_post_accumulate_grad_hook that only counts")
def post_accumulate_count(run: Run) -> None:
    model = run.shard(Net(), [Block])
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    train(run, model, steps=2)
    run.record(len(fired))


def with_parameter_hooks(run: Run, hook: Any) -> None:
    """Trains with a hook on every gradient."""
    model = run.shard(Net(), [Block])
    for p in model.parameters():
        p.register_hook(hook)
    train(run, model)


@program("p.register_hook that scales gradients")
def hook_scales(run: Run) -> None:
    with_parameter_hooks(run, lambda grad: grad * 0.5)


@program("p.register_hook that masks what is negative")
def hook_masks(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for p in model.parameters():
        mask = (p.detach() > 0).float()
        p.register_hook(lambda grad, mask=mask: grad * mask)
    train(run, model)


@program("p.register_hook on the embedding of frozen rows")
def hook_rows(run: Run) -> None:
    net = Net()
    mask = torch.ones(8, 8)
    mask[:3] = 0
    net.inp.weight.register_hook(lambda grad: grad * mask)
    train(run, run.shard(net, [Block]))


@program("features kept by forward hooks, used in the loss")
def features_in_loss(run: Run) -> None:
    model = run.shard(Net(3), [Block])
    optimizer = sgd(model)
    features: list[Tensor] = []
    for block in run.module(model).blocks:
        block.register_forward_hook(lambda module, args, output: features.append(output))
    for x in run.batches():
        features.clear()
        output = model(x)
        loss = mean_square(output) + sum(f.square().mean() for f in features)
        update(run, model, optimizer, loss)


@program("a loss on an intermediate feature only; the model's output is not used", unused=True)
def features_only(run: Run) -> None:
    model = run.shard(Net(3), [Block])
    optimizer = sgd(model)
    features: list[Tensor] = []
    run.module(model).blocks[1].register_forward_hook(lambda m, args, out: features.append(out))
    for x in run.batches():
        features.clear()
        model(x)
        update(run, model, optimizer, mean_square(features[0]))


@program("a loss on a feature from inside of a block, kept by a hook on its child")
def features_inside(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    features: list[Tensor] = []
    for block in run.module(model).blocks:
        block.up.register_forward_hook(lambda module, args, output: features.append(output))
    for x in run.batches():
        features.clear()
        output = model(x)
        update(run, model, optimizer, mean_square(output) + sum(mean_square(f) for f in features))


@program("hooks registered before sharding")
def hooks_before(run: Run) -> None:
    net = Net()
    seen: list[float] = []
    net.blocks[0].register_forward_hook(lambda m, args, out: seen.append(out.mean().item()))
    net.blocks[1].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].sum().item()))
    train(run, run.shard(net, [Block]))
    run.record(seen)


@program("a forward hook that changes the output of a block")
def hook_changes_output(run: Run) -> None:
    model = run.shard(Net(), [Block])
    run.module(model).blocks[0].register_forward_hook(lambda m, args, output: output * 0.5)
    train(run, model)


@program("a forward pre-hook that changes the input of a block")
def pre_hook_changes_input(run: Run) -> None:
    model = run.shard(Net(), [Block])
    run.module(model).blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    train(run, model)


@program("a forward pre-hook that normalises the weight of its module")
def pre_hook_weight(run: Run) -> None:
    model = run.shard(Net(), [Block])

    def clamp(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.2, 0.2)

    for block in run.module(model).blocks:
        block.up.register_forward_pre_hook(clamp)
    train(run, model)


@program("a forward pre-hook that logs the norm of its module's weight")
def pre_hook_reads(run: Run) -> None:
    model = run.shard(Net(), [Block])
    seen: list[float] = []
    for module in run.module(model).modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args: seen.append(m.weight.norm().item()))
    train(run, model)
    run.record(seen)


@program("full backward hooks that scale the gradient of the input")
def backward_hook(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for block in run.module(model).blocks:
        block.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 0.5,))
    train(run, model)


@program("full backward pre-hooks that clamp the gradient of the output")
def backward_pre_hook(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for block in run.module(model).blocks:
        block.register_full_backward_pre_hook(lambda m, grad: (grad[0].clamp(-0.01, 0.01),))
    train(run, model)


@program("full backward hooks on linear layers (Grad-CAM, K-FAC)")
def backward_hook_inner(run: Run) -> None:
    model = run.shard(Net(), [Block])
    seen: list[Tensor] = []
    for module in run.module(model).modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(
                lambda m, grad_in, grad_out: seen.append(grad_out[0].norm())
            )
    train(run, model)
    run.record(seen)


@program("a hook on an activation that reverses its gradient", unused=True)
def gradient_reversal(run: Run) -> None:
    class Reversed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.inp(x))
            if x.requires_grad:
                x.register_hook(lambda grad: -grad)
            return self.out(self.blocks[1](x))

    train(run, run.shard(Reversed(), [Block]))


@program("retain_grad on an activation", unused=True)
def retain_grad(run: Run) -> None:
    class Kept(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.blocks[0](self.inp(x))
            self.kept.retain_grad()
            return self.out(self.blocks[1](self.kept))

    model = run.shard(Kept(), [Block])
    train(run, model)
    run.record(run.module(model).kept.grad)


@program("hooks before and after optimizer.step")
def optimizer_hooks(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)

    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(scale)
    train(run, model, optimizer)


@program("a forward pre-hook of the root that sees keyword arguments")
def pre_hook_kwargs(run: Run) -> None:
    model = run.shard(Net(), [Block])
    seen: list[int] = []
    run.module(model).register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(len(args)), with_kwargs=True
    )
    train(run, model)
    run.record(seen)


@program("a global forward hook that logs every module")
def global_hook(run: Run) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    model = run.shard(Net(), [Block])
    seen: list[Tensor] = []
    handle = register_module_forward_hook(
        lambda m, args, out: seen.append(out.detach().mean()) if isinstance(m, nn.Linear) else None
    )
    try:
        train(run, model)
    finally:
        handle.remove()
    run.record(seen)
