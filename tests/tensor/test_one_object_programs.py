"""Programs that key, mark, list or hook parameters, before `shard` or in calls, train as DDP."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.tensor.test_one_object import (
    FACES,
    accumulator,
    assert_same_weights,
    batch,
    full,
    seeded,
    sharded,
    train,
)

Program = Callable[[Any, list[Any], bool], None]  # (model, its parameters before, is plain)


def ranks_of(plain: bool) -> list[int]:
    """A plain model takes the batches of all ranks."""
    return list(range(dist.get_world_size())) if plain else [dist.get_rank()]


def private(model: Any, params: list[Any], plain: bool) -> None:
    """DP-SGD: hooks keep each sample's gradient on the parameter; their clipped sum is the step."""
    layer, inputs = model.blocks[1], []
    layer.register_forward_hook(lambda module, args, out: inputs.append(args[0].detach()))

    def sample(module: Any, grads: Any, outs: Any) -> None:
        each = torch.einsum("ni,nj->nij", outs[0], inputs.pop())
        module.weight.grad_sample = [*getattr(module.weight, "grad_sample", []), each]

    layer.register_full_backward_hook(sample)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank in ranks_of(plain):
            model(batch(step, rank)).square().mean().backward()
        marked = [param for param in params if getattr(param, "grad_sample", None)]
        assert len(marked) == 1
        samples = torch.cat(marked[0].grad_sample)
        marked[0].grad_sample = []
        norms = samples.flatten(1).norm(dim=1)
        clipped = (samples * (0.01 / (norms + 1e-6)).clamp(max=1)[:, None, None]).sum(0)
        if not plain:
            dist.all_reduce(clipped)
        optimizer.zero_grad()
        weight: Any = layer.weight
        if hasattr(weight, "device_mesh"):
            clipped = torch.distributed.tensor.distribute_tensor(
                clipped, weight.device_mesh, weight.placements
            )
        weight.grad = clipped
        optimizer.step()


def averaged(model: Any, params: list[Any], plain: bool) -> None:
    """A moving average of parameters in a list from before, which is evaluated at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = [full(param).clone() for param in params]
    for step in range(3):
        train(model, optimizer, 1, first=step, plain=plain)
        for mean, param in zip(shadow, params, strict=True):
            mean.lerp_(full(param), 0.3)
    for mean, param in zip(shadow, params, strict=True):
        param.data = mean
    model(batch(0, 0))


def layer_rates(model: Any, params: list[Any], plain: bool) -> None:
    """Rates by id and decay by a set of parameters, both made before."""
    rates, decayed = model.rates, model.decayed
    groups = [
        {"params": [p], "lr": rates[id(p)], "weight_decay": 0.1 * (p in decayed)} for p in params
    ]
    train(model, torch.optim.AdamW(groups), 3, plain=plain)


def scaled_by_gradient(model: Any, params: list[Any], plain: bool) -> None:
    """A forward that reads the gradient of the step before."""
    norms: list[float] = []

    def scale(module: Any, args: Any) -> Any:
        grad = module.weight.grad
        norms.append(0.0 if grad is None else float(full(grad.norm())))
        return (args[0] / (1 + norms[-1]),)

    model.blocks[1].register_forward_pre_hook(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses = [model(batch(step, rank)).square().mean() for rank in ranks_of(plain)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert norms[0] == 0 and norms[-1] > 0


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("program", [private, averaged, layer_rates, scaled_by_gradient])
def test_programs_train_as_plain_ones(face: int | str, program: Program) -> None:
    run_ranks(trained, 2, face, program)


def trained(face: int | str, program: Program) -> None:
    models = seeded(), seeded()
    for model, is_plain in zip(models, (False, True), strict=True):
        params = list(model.parameters())
        model.rates = {id(param): 0.1 / (n + 1) for n, param in enumerate(params)}
        model.decayed = {param for param in params if param.dim() > 1}
        if not is_plain:
            sharded(model, face)
        if face == "fsdp" and program is layer_rates:  # DTensors are other objects
            new = list(model.parameters())
            model.rates = {id(n): model.rates[id(p)] for n, p in zip(new, params, strict=True)}
            params, model.decayed = new, {param for param in new if param.dim() > 1}
        program(model, params, is_plain)
    assert_same_weights(*models)


def hooked_by_nodes(stage: int) -> None:
    """As Horovod: hooks on the nodes that add gradients count those that are ready."""
    model = seeded()
    ready: list[Any] = []
    nodes = [accumulator(param) for param in model.parameters()]
    for node, param in zip(nodes, list(model.parameters()), strict=True):
        node.register_hook(lambda *_, param=param: ready.append(param))
    sharded(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        train(model, optimizer, 1, first=step)
        assert {id(param) for param in ready} == {id(param) for param in model.parameters()}
        ready.clear()


def test_hooks_on_nodes_over_steps(stage: int) -> None:
    run_ranks(hooked_by_nodes, 2, stage)


def calls_leak(face: int | str) -> None:
    """10^5 calls leave as many objects, references and bytes as there were."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if face == "fsdp":
        zerocore.fsdp.fully_shard(model)
    else:
        zerocore.shard(model, stage=int(face), units=[nn.Linear])
    params, x = list(model.parameters()), torch.ones(1, 2)

    def call(count: int) -> None:
        for number in range(count):
            out = model(x)
            if number % 100 == 0:
                out.sum().backward()
                model.zero_grad()

    def measured() -> tuple[list[int], int, int]:
        gc.collect()
        kinds = sorted({type(param) for param in params}, key=id)
        counts = [sys.getrefcount(each) for each in (*params, *kinds, nn.Parameter)]
        return counts, len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    call(1000)
    tracemalloc.start()
    call(1000)
    before = measured()
    call(100_000)
    after = measured()
    tracemalloc.stop()
    assert before[0] == after[0]
    assert after[1] - before[1] < 100, (before[1], after[1])
    assert after[2] - before[2] < 50_000, (before[2], after[2])


@pytest.mark.nightly
@pytest.mark.parametrize("face", FACES)
def test_calls_leak_nothing(face: int | str) -> None:
    run_ranks(calls_leak, 1, face, timeout=300.0, fresh=True)


def trained_by_threads(stage: int) -> None:
    """Each thread trains a model of its own, and all look at the parameters of all."""
    models = [seeded() for _ in range(3)]
    plain = [seeded() for _ in range(3)]
    params = [param for model in models for param in model.parameters()]
    marks = {param: number for number, param in enumerate(params)}
    for model in models:
        sharded(model, stage)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            optimizer = torch.optim.SGD(models[number].parameters(), lr=0.1)
            for step in range(30):
                train(models[number], optimizer, 1, first=step + number)
                assert [marks[param] for param in params] == list(range(len(params)))
                assert all(param.shape in ((6, 6), (6,)) for param in params)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors, errors
    for number, each in enumerate(plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(30):
            train(each, optimizer, 1, first=step + number)
        assert_same_weights(models[number], each)


def test_threads_that_train(stage: int) -> None:
    run_ranks(trained_by_threads, 1, stage)


def copied_while_shown(face: int | str) -> None:
    """Copies and pickles of parameters in a hook are full values; between calls they are shards."""
    import copy
    import io

    model, plain = sharded(seeded(), face), seeded()
    found: list[Any] = []

    def keep(module: Any, *rest: Any) -> None:
        file = io.BytesIO()
        torch.save(module.weight, file)
        file.seek(0)
        found.extend((copy.deepcopy(module.weight), torch.load(file), module.weight.clone()))

    model.blocks[1].register_forward_hook(keep)
    model(batch(0, 0))
    for made in found:
        assert not hasattr(made, "place") and torch.equal(made.detach(), plain.blocks[1].weight)
    copied = copy.deepcopy(model.blocks[1].weight)
    assert torch.equal(full(copied), plain.blocks[1].weight)
    assert copied is not model.blocks[1].weight


@pytest.mark.parametrize("face", FACES)
def test_copies_in_a_hook_and_between_calls(face: int | str) -> None:
    run_ranks(copied_while_shown, 2, face)


class Block(nn.Module):
    """A forward to compile; torch skips those of its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def compiled(face: int | str) -> None:
    """A compiled block is one graph, and no other one with each step."""
    from torch._dynamo.utils import counters

    model, plain = seeded(), seeded()
    for each in (model, plain):
        torch.manual_seed(1)
        each.blocks[1] = Block()
    if face == "fsdp":
        sharded(model, face)
    else:
        zerocore.shard(model, stage=int(face), units=[Block])
    model.blocks[1].compile(backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    torch._dynamo.reset()
    counters.clear()
    train(model, optimizers[0], 4)
    train(plain, optimizers[1], 4, plain=True)
    assert_same_weights(model, plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"] and not counters["recompiles"]


@pytest.mark.parametrize("face", FACES)
def test_a_compiled_block_is_one_graph(face: int | str) -> None:
    run_ranks(compiled, 2, face, timeout=120.0)


class Policy(nn.Module):
    """Mean and deviation of an action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(x).chunk(2, -1)
        return mean, log_std.exp()


def ppo_loss(seed: int) -> tuple[nn.Module, nn.Module, Any]:
    """Networks and torchrl's PPO loss of them, which keeps their parameters in lists of its own."""
    from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
    from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    torch.manual_seed(seed)
    policy, value = Policy(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    actor: ProbabilisticTensorDictSequential = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return policy, value, ClipPPOLoss(actor, ValueOperator(value, in_keys=["observation"]))


def experience(rank: int) -> Any:
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(rank)
    values = {
        "observation": torch.randn(8, 4, generator=generator),
        "action": torch.randn(8, 2, generator=generator),
        "action_log_prob": -torch.rand(8, generator=generator),
        "advantage": torch.randn(8, 1, generator=generator),
        "value_target": torch.randn(8, 1, generator=generator),
    }
    return TensorDict(values, [8])


def trained_by_torchrl(face: int | str) -> None:
    made = [ppo_loss(0) for _ in range(2)]
    for number, (policy, value, loss) in enumerate(made):
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        for net in (policy, value) if number == 0 else ():
            zerocore.fsdp.fully_shard(net) if face == "fsdp" else zerocore.shard(
                net, stage=int(face)
            )
        for _ in range(3):
            torch.manual_seed(1)
            found = [loss(experience(rank)) for rank in ranks_of(number == 1)]
            keys = ("loss_objective", "loss_entropy", "loss_critic")
            torch.stack([sum(each[key] for key in keys) for each in found]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(made[0][:2], made[1][:2], strict=True):
        assert_same_weights(one, other)


@pytest.mark.parametrize("face", FACES)
def test_losses_of_torchrl(face: int | str) -> None:
    pytest.importorskip("torchrl")
    run_ranks(trained_by_torchrl, 2, face, timeout=120.0)
