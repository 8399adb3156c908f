"""Programs: parts taken out, traced, fused, hashed and put in, between the steps of a training."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tests.distributed.programs.models import (
    SIZE,
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


@program(
    "a part's state_dict in a plain part: model.blocks[0].state_dict(), and back into another part"
)
def part_state_dict(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    module, plain = run.module(model), Block()
    plain.load_state_dict(module.blocks[0].state_dict())
    run.record(plain(run.tensor(2, SIZE)).detach())
    module.blocks[1].load_state_dict(plain.state_dict())
    train(run, model)


@program("a pretrained layer loaded in mid-run by its own load_state_dict, the head made zero")
def part_loaded(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(run, model, optimizer)
    pretrained = nn.Linear(SIZE, SIZE)
    module = run.module(model)
    module.inp.load_state_dict(pretrained.state_dict())
    module.out.weight.data = torch.zeros(SIZE, SIZE)
    module.out.bias.data.zero_()
    train(run, model, optimizer)


@program("torch.jit.trace of the model in eval between steps, and what it says of another batch")
def traced_between(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for step in range(2):
        train(run, model, optimizer, steps=1)
        model.eval()
        with torch.no_grad():
            traced = torch.jit.trace(run.module(model), run.tensor(2, SIZE), check_trace=False)
            run.record(traced(run.tensor(2, SIZE, key=step)))
        model.train()


@program("torch.export of a plain copy of the full state, run on another batch")
def exported_copy(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    plain = Net()
    plain.load_state_dict(run.full_state(model))
    graph = torch.export.export(plain.eval(), (run.tensor(2, SIZE),))
    run.record(graph.module()(run.tensor(2, SIZE, key=1)).detach())


@program("a deepcopy whose norms are folded into convolutions, evaluated, and the training goes on")
def folded_norms(run: Run) -> None:
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 1, 3))
    model = run.shard(net)
    optimizer = sgd(model)
    for step in range(2):
        update(run, model, optimizer, mean_square(model(run.tensor(4, 1, SIZE, key=step)) - 1))
        twin = copy.deepcopy(run.module(model)).eval()
        folded = nn.Sequential(fuse_conv_bn_eval(twin[0], twin[1]), twin[2], twin[3])
        with torch.no_grad():
            run.record(folded(run.tensor(2, 1, SIZE, key=10 + step)))


@program("a checksum of the weights on each rank: md5 of numpy's bytes, compared over steps")
def hashed_weights(run: Run) -> None:
    model = run.shard(Net(), [Block])
    for step in range(2):
        digest = hashlib.md5()
        for _, param in sorted(run.module(model).named_parameters()):
            digest.update((param.detach().cpu().numpy() * 100).round().astype("int8").tobytes())
        if step == 0:  # later ones differ in their last bits
            run.record(digest.hexdigest())
        train(run, model)


@program("torch.save of a dict of numpy arrays by all ranks, read and loaded by load_state_dict")
def numpy_state(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    module, file = run.module(model), io.BytesIO()
    torch.save({name: p.detach().cpu().numpy() for name, p in module.named_parameters()}, file)
    train(run, model)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    train(run, model)


class Averages:
    """Shadows of parameters, which stand in for them in a context (torch_ema)."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.shadows = [p.clone().detach() for p in self.params]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.shadows, [p.detach() for p in self.params], 0.3)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The shadows' values within."""
        kept = [p.clone() for p in self.params]
        for param, shadow in zip(self.params, self.shadows, strict=True):
            param.data.copy_(shadow.data)
        yield
        for param, value in zip(self.params, kept, strict=True):
            param.data.copy_(value.data)


@program("an average moved by torch._foreach_lerp_, in the weights' place within a context")
def averages_in_context(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer, averages = adamw(model.parameters()), Averages(model)
    for step in range(3):
        train(run, model, optimizer, steps=1)
        averages.update()
        with averages.used(), torch.no_grad():
            run.record(model(run.tensor(2, SIZE, key=10 + step)))


@program(
    "a buffer registered after sharding, an attribute changed by step, and a child without weights"
)
def added_parts(run: Run) -> None:
    class Warm(Net):
        heat = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.heat + getattr(self, "shift", 0.0)

    model = run.shard(Warm(), [Block])
    module = run.module(model)
    module.register_buffer("shift", torch.ones(SIZE), persistent=False)
    module.blocks.append(nn.Dropout(0.0))
    optimizer = sgd(model)
    for step in range(3):
        module.heat = 1.0 + step
        module.shift.mul_(0.5)
        train(run, model, optimizer, steps=1)


@program("an embedding grown by the full state: a new model with more rows, new rows at the mean")
def grown_vocabulary(run: Run) -> None:
    model = run.shard(Words(11), [Block])
    train_words(run, model)
    state, larger = run.full_state(model), Words(13)
    for name in ("embed.weight", "head.weight"):
        state[name] = torch.cat([state[name], state[name].mean(0, keepdim=True).expand(2, -1)])
    larger.load_state_dict(state)
    train_words(run, run.shard(larger, [Block]), vocabulary=13)


@program("stacking: a model of twice the depth begins with each block twice, rates warm up again")
def stacked_depth(run: Run) -> None:
    model = run.shard(Net(2), [Block])
    train(run, model, adamw(model.parameters()))
    state, deep = run.full_state(model), Net(4)
    for index in range(4):
        for name, value in deep.blocks[index].state_dict().items():
            value.copy_(state[f"blocks.{index // 2}.{name}"])
    deep.load_state_dict({n: v for n, v in state.items() if "blocks" not in n}, strict=False)
    model = run.shard(deep, [Block])
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    for step in range(3):
        update(run, model, optimizer, mean_square(model(run.tensor(4, SIZE, key=step))))
        schedule.step()


@program("a frozen encoder that two trained models share; each has a head of its own")
def shared_encoder(run: Run) -> None:
    class Headed(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(SIZE, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    encoder = Net(1).requires_grad_(False)
    models = [run.shard(Headed(encoder), [Block]) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = F.cross_entropy(model(run.tensor(4, SIZE, key=step)), run.tokens(3, 4, key=step))
            update(run, model, optimizer, loss)
