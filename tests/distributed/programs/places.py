"""Programs: where parameters live, which are trained, and what the model looks like afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import (
    Block,
    Net,
    Words,
    adamw,
    mean_square,
    sgd,
    train,
    train_words,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


@program("a head tied to the embedding")
def tied_head(run: Run) -> None:
    train_words(run, run.shard(Words(tied=True), [Block]))


@program("one block at two places")
def shared_block(run: Run) -> None:
    net = Net(3)
    net.blocks[2] = net.blocks[0]
    train(run, run.shard(net, [Block]))


@program("two blocks that share one weight")
def tied_blocks(run: Run) -> None:
    net = Net(3)
    net.blocks[2].up.weight = net.blocks[0].up.weight
    train(run, run.shard(net, [Block]))


@program("tied and repeated blocks, one of them skipped in turn", unused=True)
def tied_repeated_skipped(run: Run) -> None:
    class Tied(Net):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 2, 0, 1):
                if index != self.step % 3:
                    x = self.blocks[index](x)
            return self.out(self.inp(x))

    net = Tied(3)
    net.blocks[2].down.weight = net.blocks[0].down.weight
    model = run.shard(net, [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        run.module(model).step = step
        update(run, model, optimizer, mean_square(model(x)))


@program("a ModuleList that is never called", unused=True)
def uncalled_list(run: Run) -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.ModuleList(Block() for _ in range(2))

    train(run, run.shard(Spare(), [Block]))


@program("a ParameterList and a ParameterDict")
def parameter_containers(run: Run) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(torch.randn(8, 8) for _ in range(2))
            self.named = nn.ParameterDict({"a": torch.randn(8), "b": torch.randn(8)})

        def forward(self, x: Tensor) -> Tensor:
            for row in self.rows:
                x = torch.tanh(x @ row)
            return x * self.named["a"] + self.named["b"]

    train(run, run.shard(Net(2, Held), [Held]))


@program("a scalar parameter")
def scalar_parameter(run: Run) -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    train(run, run.shard(Scaled(), [Block]))


@program("blocks in an inner module that has no parameters of its own")
def inner_body(run: Run) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.embed = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return x

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = Body(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.model(x))

    train(run, run.shard(Causal(), [Block]))


@program("the first block frozen from the start")
def frozen_block(run: Run) -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    model = run.shard(net, [Block])
    train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@program("only the head is trained, the rest frozen after sharding", unused=True)
def linear_probe(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for name, p in run.module(model).named_parameters():
        p.requires_grad_(name.startswith("out."))
    train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@program("progressive unfreezing, one block a step, with add_param_group")
def progressive_unfreezing(run: Run) -> None:
    net = Net(3)
    for block in net.blocks:
        block.requires_grad_(False)
    model = run.shard(net, [Block])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step, x in enumerate(run.batches(4)):
        if step:
            block = run.module(model).blocks[3 - step].requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.05})
        update(run, model, optimizer, mean_square(model(x)))


@program("requires_grad_ toggled in every step", unused=True)
def toggled(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step, x in enumerate(run.batches(4)):
        run.module(model).blocks[0].requires_grad_(step % 2 == 0)
        update(run, model, optimizer, mean_square(model(x)))


@program("learning rates by layer, from names")
def layerwise_rates(run: Run) -> None:
    model = run.shard(Net(), [Block])
    groups = [
        {"params": [p], "lr": 0.1 * (0.5 if "blocks.0" in name else 1.0)}
        for name, p in model.named_parameters()
    ]
    train(run, model, torch.optim.SGD(groups))


@program("weight decay for what has two dimensions: p.dim() >= 2")
def decay_by_dim(run: Run) -> None:
    model = run.shard(Net(), [Block])
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    train(run, model, adamw(groups))


@program("weight decay for what is no bias and no norm, by name")
def decay_by_name(run: Run) -> None:
    model = run.shard(Net(), [Block])
    named = list(model.named_parameters())
    bare = [p for name, p in named if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": rest, "weight_decay": 0.5}, {"params": bare, "weight_decay": 0.0}]
    train(run, model, adamw(groups))


@program("sum(p.numel() for p in model.parameters())")
def count_parameters(run: Run) -> None:
    model = run.shard(Net(), [Block])
    run.record(sum(p.numel() for p in model.parameters()))


@program("shapes of all parameters printed")
def print_shapes(run: Run) -> None:
    model = run.shard(Net(), [Block])
    run.record([tuple(p.shape) for p in model.parameters()])


@program("isinstance(model, Net) and the name of its class")
def type_of_model(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net = run.module(model)
    run.record(isinstance(net, Net), type(net).__name__.removeprefix("FSDP"))


@program("a second model made with type(model)()")
def made_by_type(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    twin = type(run.module(model))()
    run.record(twin(run.tensor(4, 8)).shape)


@program("copy.deepcopy(model) for an exponential average")
def deepcopy_model(run: Run) -> None:
    import copy

    model = run.shard(Net(), [Block])
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x)))
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.5)
    run.record(average(run.tensor(4, 8)))


@program("torch.func.functional_call with the model's own parameters")
def functional_call_own(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    net: Any = run.module(model)
    run.record(torch.func.functional_call(net, dict(net.named_parameters()), run.tensor(4, 8)))


@program("torch.func.functional_call with changed parameters")
def functional_call_changed(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net: Any = run.module(model)
    doubled = {name: p.detach() * 2 for name, p in net.named_parameters()}
    run.record(torch.func.functional_call(net, doubled, run.tensor(4, 8)))


@program("torch.func.functional_call with full parameters from elsewhere")
def functional_call_full(run: Run) -> None:
    model = run.shard(Net(), [Block])
    full = {name: torch.full_like(p, 0.1) for name, p in Net().named_parameters()}
    run.record(torch.func.functional_call(run.module(model), full, run.tensor(4, 8)))


@program("a parameter replaced after sharding: model.out = nn.Linear(8, 3)", unused=True)
def replaced_head(run: Run) -> None:
    model = run.shard(Net(), [Block])
    torch.manual_seed(1)
    run.module(model).out = nn.Linear(8, 3)
    train(run, model)


@program("model.apply(init) after sharding")
def apply_init(run: Run) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)
            nn.init.zeros_(module.bias)

    model = run.shard(Net(), [Block])
    model.apply(init)
    train(run, model)


@program("model.apply(init) with fan-in (kaiming, the same seed on all ranks)")
def apply_kaiming(run: Run) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight)

    model = run.shard(Net(), [Block])
    torch.manual_seed(3)
    model.apply(init)
    train(run, model)
