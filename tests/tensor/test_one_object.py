"""A parameter is one object: what is keyed, marked or kept by it holds in and outside of calls."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from zerocore.model.state import find_state

FACES = (0, 1, 2, 3, "fsdp")


class Net(nn.Module):
    """Two blocks and a head that is tied to the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def seeded() -> Any:
    torch.manual_seed(0)
    return Net()


def sharded(model: Any, face: int | str) -> Any:
    if face == "fsdp":
        zerocore.fsdp.fully_shard(model.blocks[1])
        return zerocore.fsdp.fully_shard(model)
    return zerocore.shard(model, stage=int(face), units=[nn.Linear])


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def full(param: Any) -> Tensor:
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def train(model: Any, optimizer: Any, steps: int = 3, first: int = 0, plain: bool = False) -> None:
    for step in range(first, first + steps):
        ranks = range(dist.get_world_size()) if plain else [dist.get_rank()]
        losses = [model(batch(step, rank)).square().mean() for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_weights(model: Any, plain: Any) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other.detach(), rtol=1e-4, atol=1e-6)


def same_objects(face: int | str) -> None:
    model = seeded()
    before = list(model.parameters())
    if face == "fsdp":
        sharded(model, face)
        before = list(model.parameters())
    else:
        marks = {param: number for number, param in enumerate(before)}
        before[0].mask = "kept"
        sharded(model, face)
        assert before[0].mask == "kept" and marks[model.head.weight] == 0
    ids = {id(param) for param in before}
    seen: list[Any] = []

    def note(module: Any, *rest: Any) -> None:
        seen.extend(module.parameters(recurse=False))
        module.bias.gain = 3
        assert module.weight.shape == (6, 6) and isinstance(module.weight, nn.Parameter)

    for block in (*model.blocks, model.head):
        block.register_forward_hook(note)
        block.register_full_backward_hook(note)
    assert [id(param) for param in model.parameters()] == [id(param) for param in before]
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert len(seen) == 3 * 3 * 4 and {id(param) for param in seen} == ids
    assert model.head.weight is model.blocks[0].weight is before[0]
    assert all(block.bias.gain == 3 for block in model.blocks)
    assert [id(param) for param in model.parameters()] == [id(param) for param in before]


@pytest.mark.parametrize("face", FACES)
def test_modules_and_programs_hold_one_object(face: int | str) -> None:
    run_ranks(same_objects, 2, face)


class Guarded(dict[str, Any]):
    """Parameters of a module, which nobody writes."""

    def __setitem__(self, *args: Any) -> None:
        raise AssertionError("_parameters was written")


def unwritten(face: int | str) -> None:
    model = sharded(seeded(), face)
    for module in model.modules():
        module.__dict__["_parameters"] = Guarded(module._parameters)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("face", FACES)
def test_calls_write_no_parameters(face: int | str) -> None:
    run_ranks(unwritten, 2, face)


def optimizer_before(face: int | str, kind: str) -> None:
    """Also groups by id, a scheduler, and lists of parameters for clipping."""
    model, plain = seeded(), seeded()
    optimizers, lists = [], []
    for each in (model, plain):
        fast = {id(param) for param in each.head.parameters()}
        groups = [
            {"params": [p for p in each.parameters() if (id(p) in fast) is is_fast], "lr": rate}
            for is_fast, rate in ((True, 0.1), (False, 0.02))
        ]
        optimizers.append(getattr(torch.optim, kind)(groups, lr=0.1))
        lists.append(list(each.parameters()))
    sharded(model, face)
    for _ in range(2):
        for each, optimizer, params in zip((model, plain), optimizers, lists, strict=True):
            ranks = range(dist.get_world_size()) if each is plain else [dist.get_rank()]
            losses = [each(batch(0, rank)).square().mean() for rank in ranks]
            torch.stack(losses).mean().backward()
            norm = nn.utils.clip_grad_norm_(params, 0.01)
            assert float(full(norm)) > 0.01
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)
    saved = optimizers[0].state_dict()["state"]
    assert len(saved) == (0 if kind == "SGD" else 5)


BEFORE = [(face, kind) for face in FACES for kind in ("SGD", "AdamW", "Adafactor")]
BEFORE.remove(("fsdp", "Adafactor"))  # it takes no DTensors


@pytest.mark.parametrize(("face", "kind"), BEFORE)
def test_an_optimizer_built_before(face: int | str, kind: str) -> None:
    run_ranks(optimizer_before, 2, face, kind)


def states_before(stage: int, kind: str) -> None:
    """States of steps before `shard` are cut as their parameters are, or stay as they are."""
    model, plain = seeded(), seeded()
    made = [getattr(torch.optim, kind)(each.parameters(), lr=0.05) for each in (model, plain)]
    for each, optimizer in zip((model, plain), made, strict=True):
        train(each, optimizer, 2, plain=True)
    sharded(model, stage)
    train(model, made[0], 2, first=2)
    train(plain, made[1], 2, first=2, plain=True)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "Adafactor"])
def test_an_optimizer_that_has_stepped_before(stage: int, kind: str) -> None:
    run_ranks(states_before, 2, stage, kind)


def refused_before() -> None:
    model = seeded()
    optimizer = torch.optim.SparseAdam(model.parameters())
    sharded(model, 3)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(ValueError, match=r"SparseAdam cannot update 'blocks\.0\.weight'"):
        optimizer.step()


def test_an_optimizer_built_before_that_cannot_update_shards() -> None:
    run_ranks(refused_before, 2)


def stepped_before_rows() -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    sharded(model, "fsdp")
    model(batch(0, 0)).sum().backward()
    with pytest.raises(ValueError, match=r"stepped before fully_shard: .*'\w+.*weight'"):
        optimizer.step()


def test_an_optimizer_that_has_stepped_before_fully_shard() -> None:
    run_ranks(stepped_before_rows, 2)


def asked_in_calls(face: int | str) -> None:
    """`grad` and `optimizer.state` while a module runs are those between calls."""
    model = sharded(seeded(), face)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []

    def ask(module: Any, *rest: Any) -> None:
        found.append((module.weight.grad, optimizer.state.get(module.weight)))

    train(model, optimizer, 1)
    model(batch(1, dist.get_rank())).sum().backward()
    expected = model.blocks[1].weight.grad
    handle = model.blocks[1].register_forward_hook(ask)
    model(batch(1, dist.get_rank()))
    handle.remove()
    ((grad, state),) = found
    assert grad is expected and state is optimizer.state[model.blocks[1].weight]
    assert float(full(grad.norm())) > 0

    def drop(module: Any, *rest: Any) -> None:
        module.weight.grad = None

    handle = model.blocks[1].register_forward_hook(drop)
    model(batch(1, dist.get_rank()))
    handle.remove()
    assert model.blocks[1].weight.grad is None

    def assign(module: Any, *rest: Any) -> None:
        module.weight.grad = torch.ones(6, 6)

    model.blocks[1].register_full_backward_hook(assign)
    refused = pytest.raises(RuntimeError, match=r"\.grad of parameter .* within a backward.*_hook")
    with nullcontext() if face == 0 else refused:  # at stage 0 gradients are the program's own
        model(batch(1, dist.get_rank())).sum().backward()


@pytest.mark.parametrize("face", FACES)
def test_gradients_and_states_asked_in_calls(face: int | str) -> None:
    run_ranks(asked_in_calls, 2, face)


def clipped_in_calls(face: int | str) -> None:
    model, norms = sharded(seeded(), face), []
    params = list(model.parameters())
    model(batch(0, dist.get_rank())).square().mean().backward()
    clips: list[Any] = [torch.nn.utils.clip_grad_norm_, zerocore.clip_grad_norm_]
    hooks = [
        part.register_forward_hook(lambda *_: norms.extend(clip(params, 1e9) for clip in clips))
        for part in (model, model.blocks[1], model.head)
    ]
    model(batch(1, dist.get_rank()))
    for hook in hooks:
        hook.remove()
    right = zerocore.clip_grad_norm_(params, 1e9)
    torch.testing.assert_close(torch.stack([full(norm) for norm in norms]), right.expand(6))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_clipped_in_calls(face: int | str, world_size: int) -> None:
    run_ranks(clipped_in_calls, world_size, face)


def saved_after_a_failure(stage: int) -> None:
    model = sharded(seeded(), stage)
    found: list[Any] = []

    def save(*_: Any) -> None:
        found.append({key: type(value) for key, value in model.state_dict().items()})

    def fail(*_: Any) -> None:
        raise KeyError("a hook of the program's")

    model(batch(0, 0))  # the order of calls is known
    broken = model.blocks[1].register_state_dict_pre_hook(fail)
    hook = model.blocks[1].register_forward_hook(save)
    with pytest.raises(KeyError):
        model(batch(0, 0))
    broken.remove()
    model(batch(0, 0))
    hook.remove()
    save()
    assert found[0] == found[1], found


@pytest.mark.parametrize("stage", [1, 3])
def test_saves_in_a_call_behind_one_that_failed(stage: int) -> None:
    run_ranks(saved_after_a_failure, 2, stage)


def accumulator(param: Any) -> Any:
    """As Horovod finds the node that accumulates a gradient."""
    return param.expand_as(param).grad_fn.next_functions[0][0]


def hooks_on_nodes(stage: int, before: bool) -> None:
    model = seeded()
    nodes, calls = [], []

    def register() -> None:
        for param in model.parameters():
            node = accumulator(param)
            node.register_hook(lambda *_, param=param: calls.append(param))
            nodes.append(node)

    if before:
        register()
    sharded(model, stage)
    if not before:
        register()
    model(batch(0, 0)).sum().backward()
    assert len(calls) == 5 and {id(p) for p in calls} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_nodes_that_accumulate(stage: int, before: bool) -> None:
    run_ranks(hooks_on_nodes, 2, stage, before)


def hooks_in_calls(stage: int) -> None:
    """A hook is called once a backward, wherever it was registered."""
    model = sharded(seeded(), stage)
    calls: list[str] = []
    model.blocks[1].weight.register_hook(lambda grad: calls.append("outside"))
    model.blocks[1].weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))

    def register(module: Any, *rest: Any) -> None:
        module.weight.register_hook(lambda grad: calls.append("inside"))
        module.weight.register_post_accumulate_grad_hook(lambda p: calls.append("after inside"))
        handle.remove()

    handle = model.blocks[1].register_forward_pre_hook(register)
    for step in range(2):
        model(batch(step, 0)).sum().backward()
    assert sorted(calls) == sorted(2 * ["outside", "inside", "after", "after inside"])


def test_hooks_registered_in_calls(stage: int) -> None:
    run_ranks(hooks_in_calls, 2, stage)


def private(run_model: Any, optimizer: Any, params: list[Any], plain: bool) -> None:
    """DP-SGD: hooks keep each sample's gradient on the parameter, which is clipped and averaged."""
    layer = run_model.blocks[1]
    inputs: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, out: inputs.append(args[0].detach()))

    def sample(module: Any, grads: Any, outs: Any) -> None:
        module.weight.grad_sample = torch.einsum("ni,nj->nij", outs[0], inputs.pop())

    layer.register_full_backward_hook(sample)
    ranks = range(dist.get_world_size()) if plain else [dist.get_rank()]
    torch.stack([run_model(batch(0, r)).square().mean() for r in ranks]).mean().backward()
    for param in params:
        if hasattr(param, "grad_sample"):
            each: Tensor = param.grad_sample
            norms = each.flatten(1).norm(dim=1)
            clipped = (each * (0.01 / (norms + 1e-6)).clamp(max=1)[:, None, None]).sum(0)
            if not plain:
                dist.all_reduce(clipped)
            param.grad = clipped
    assert sum(hasattr(param, "grad_sample") for param in params) == 1
    optimizer.step()


def trained_privately(stage: int) -> None:
    model, plain = seeded(), seeded()
    params = [list(model.parameters()), list(plain.parameters())]
    made = [torch.optim.SGD(each, lr=0.1) for each in params]
    sharded(model, stage)
    layer = model.blocks[1]
    layer.weight.grad_sample = None
    del layer.weight.grad_sample
    private(model, made[0], params[0], plain=False)
    assert type(params[0][2].grad_sample) is Tensor
    with pytest.raises(AttributeError):
        params[0][0].grad_sample  # noqa: B018
    del plain


def test_samples_gradients_on_parameters(stage: int) -> None:
    run_ranks(trained_privately, 2, stage)


def pruned(face: int | str) -> None:
    """Masks in a dict keyed by parameter, applied in a hook of the forward and after the step."""
    model, plain = seeded(), seeded()
    for each in (model, plain):
        if each is model and face == "fsdp":
            sharded(model, face)
        masks = {p: (full(p).abs() > 0.2).float() for p in each.parameters() if p.dim() > 1}
        if each is model and face != "fsdp":
            sharded(model, face)
        found: list[Any] = []

        def check(module: Any, *rest: Any, masks: Any = masks, found: Any = found) -> None:
            found.append(masks[module.weight])
            assert module.weight.detach()[masks[module.weight] == 0].abs().max() == 0

        def prune(each: Any = each, masks: Any = masks) -> None:
            for param, mask in masks.items():
                value = full(param) * mask
                with torch.no_grad():
                    param.data = value

        prune()
        each.blocks[1].register_forward_hook(check)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            train(each, optimizer, 1, first=step, plain=each is plain)
            prune()
        assert len(found) == 3 * (dist.get_world_size() if each is plain else 1)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("face", FACES)
def test_masks_by_parameter(face: int | str) -> None:
    run_ranks(pruned, 2, face)


class Inner(nn.Module):
    """Its forward trains: steps, clips, drops gradients and saves within the root's call."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.net, self.scale = inner, nn.Parameter(torch.ones(6))
        self.saved: list[Any] = []

    def forward(self, x: Tensor, optimizer: Any, closes: bool) -> None:
        def closure() -> Tensor:
            loss: Tensor = (self.net(x) * self.scale).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            return loss

        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        self.zero_grad()
        assert self.scale.grad is None
        self.saved.append(self.state_dict())


def trains_inside(stage: int, closes: bool) -> None:
    model, plain = Inner(seeded()), Inner(seeded())
    zerocore.shard(model, stage=stage, units=[nn.Linear])
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for step in range(3):
            each(batch(step, 0), optimizer, closes)
    assert_same_weights(model, plain)
    for one, other in zip(model.saved, plain.saved, strict=True):
        for key, value in one.items():
            assert zerocore.is_sharded(value) == (stage > 0)
            assert value.shape == other[key].shape
    last = {key: full(value) for key, value in model.saved[-1].items()}
    torch.testing.assert_close(last, dict(plain.saved[-1]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("closes", [False, True])
def test_training_and_saving_inside_of_a_call(stage: int, closes: bool) -> None:
    run_ranks(trains_inside, 2, stage, closes)


def built_inside(stage: int) -> None:
    """An optimizer that was built, and steps, where parameters are shown in full."""
    model, plain = seeded(), seeded()
    sharded(model, stage)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with zerocore.unsharded(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        train(plain, twin, plain=True)
        assert_same_weights(model, plain)
    train(model, optimizer)
    train(plain, twin, plain=True)
    assert_same_weights(model, plain)


def test_an_optimizer_built_inside_of_unsharded(stage: int) -> None:
    run_ranks(built_inside, 2, stage)


def copied_in_full(stage: int) -> None:
    """Copies and pickles of what is shown in full are plain parameters, with the attributes."""
    model = sharded(seeded(), stage)
    model.head.bias.gain = 3
    with zerocore.unsharded(model):
        params = [model.head.bias, model.blocks[1].bias]
        assert type(params[0]).__name__ == "Parameter" and isinstance(params[0], nn.Parameter)
        for copies in (copy.deepcopy(params), loaded := pickle.loads(pickle.dumps(params))):
            for made, param in zip(copies, params, strict=True):
                assert type(made) is nn.Parameter and torch.equal(made, param)
                assert not any("zerocore" in key or key == "place" for key in vars(made))
        assert loaded[0].gain == 3


def test_copies_of_shown_parameters(stage: int) -> None:
    run_ranks(copied_in_full, 1, stage)


def listed_before() -> None:
    """Functions of parameters from before `fully_shard` are those of the DTensors."""
    model = seeded()
    listed, average = list(model.parameters()), copy.deepcopy(list(model.parameters()))
    sharded(model, "fsdp")
    optimizer = torch.optim.SGD(listed, lr=0.1)
    train(model, optimizer, 2)
    for old, new in zip(listed, model.parameters(), strict=True):
        assert torch.equal(old.full_tensor(), new.full_tensor())
    assert any(not torch.equal(full(p), a) for p, a in zip(listed, average, strict=True))


def test_lists_from_before_fully_shard() -> None:
    run_ranks(listed_before, 2)


def leaks() -> None:
    """10^5 calls leave as many objects and references as there were."""
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3)
    engine = find_state(model).engine  # type: ignore[union-attr]
    params = list(model.parameters())
    facts: list[Callable[[], Any]] = [
        lambda: [sys.getrefcount(param) for param in params],
        lambda: [sys.getrefcount(kind) for kind in sorted({type(p) for p in params}, key=id)],
        lambda: sys.getrefcount(nn.Parameter),
    ]
    counts = []
    with torch.no_grad(), zerocore.unsharded(model):
        for num_pairs in (100, 100, 50_000):  # the first calls import and free
            for hides in num_pairs * (True, False):
                engine.set_hiding(hides)
                assert isinstance(params[0], zerocore.ShardedParameter) is hides
            for _ in range(200):
                model(torch.ones(1, 2))
            gc.collect()
            counts.append(([each() for each in facts], len(gc.get_objects())))
    assert counts[1][0] == counts[2][0], counts
    assert abs(counts[1][1] - counts[2][1]) < 100, counts


def test_exchanges_leak_nothing() -> None:
    run_ranks(leaks, 1, fresh=True)


def read_by_threads(stage: int) -> None:
    """A thread that looks at parameters sees a shard or the full one, whole."""
    model = sharded(seeded(), stage)
    params, ended, errors = list(model.parameters()), threading.Event(), []

    def look() -> None:
        while not ended.is_set():
            for param in params:
                try:
                    assert param.shape in ((6, 6), (6,)) and param.requires_grad
                    assert isinstance(param, nn.Parameter) and id(param) and repr(type(param))
                except Exception as error:
                    errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        train(model, torch.optim.SGD(params, lr=0.1), 30)
    finally:
        ended.set()
        thread.join()
    assert not errors


def test_threads_that_look_at_parameters() -> None:
    run_ranks(read_by_threads, 2, 3)
