"""Stage 0: parameters, gradients and states are plain, as under DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import views_of
from zerocore.tensor.rows import held_shard, shard_of


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def look() -> None:
    plain = net()
    before = list(plain.parameters())
    plain[0].weight.mark = "mine"
    optimizer = torch.optim.AdamW(before)
    model = zerocore.shard(plain, stage=0)
    for param, other in zip(model.parameters(), before, strict=True):
        assert param is other and type(param) is nn.Parameter
        assert not zerocore.is_sharded(param)
    assert model[0].weight.mark == "mine" and zerocore.is_sharded(model)
    model(batch(0)).sum().backward()
    assert all(type(param.grad) is Tensor and param.grad.is_leaf for param in before)
    optimizer.step()
    for state in optimizer.state.values():
        assert all(type(value) is Tensor for value in state.values())
    file = io.BytesIO()
    torch.save([before, model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    params, state, _ = torch.load(file)
    assert torch.equal(params[0], model[0].weight) and type(state["0.bias"]) is Tensor
    assert torch.equal(copy.deepcopy(model[0].weight), model[0].weight)


def test_programs_hold_plain_tensors() -> None:
    run_ranks(look, 2)


def look_at_exceptions() -> None:
    """With main weights, or offload, parameters are shards at stage 0, too."""
    mixed = zerocore.MixedPrecision(param_dtype=torch.bfloat16)
    for options in ({"mixed_precision": mixed}, {"offload": zerocore.Offload()}):
        model = zerocore.shard(net(), stage=0, **options)
        assert all(isinstance(p, zerocore.ShardedParameter) for p in model.parameters())


def test_main_weights_and_offload_have_shards() -> None:
    run_ranks(look_at_exceptions, 2)


def set_data(p: Any, values: Tensor) -> None:
    p.data = values


def fill_row(p: Any, values: Tensor) -> None:
    with torch.no_grad():
        p[0] = 0.5


def other_order(p: Any, values: Tensor) -> None:
    p.data = values.t().contiguous().t() if values.dim() == 2 else values


WRITES: dict[str, Callable[[Any, Tensor], None]] = {
    "data=": set_data,
    "row": fill_row,
    "strides": other_order,
    "copy_": lambda p, values: p.data.copy_(values),
    "numpy": lambda p, values: p.detach().numpy().fill(0.25),
}


def write(name: str) -> None:
    """The next forward, step and state dict see what a program has written."""
    model, plain = zerocore.shard(net(), stage=0), net()  # DDP mixes up values of other strides
    own = zerocore.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            values = torch.full(param.shape, 0.1 * step).add_(torch.arange(param.shape[-1]))
            WRITES[name](param, values.clone())
            WRITES[name](other, values.clone())
        full = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(full, dict(plain.state_dict()))
        losses = [m(batch(step)).square().mean() for m in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for each in (own, optimizer):
            each.step()
            each.zero_grad()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param, other)
    loaded = {key: value * 0 + 3 for key, value in net().state_dict().items()}
    zerocore.load_full_state_dict(model, loaded)
    assert all(bool((param == 3).all()) for param in model.parameters())


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_a_program(name: str) -> None:
    run_ranks(write, 2, name)


def keep_gradients() -> None:
    """Gradients, and what shares their memory, keep their values when they were dropped."""
    model, ddp = zerocore.shard(net(), stage=0), DistributedDataParallel(net())
    kept: list[list[Any]] = [[], []]
    for step in range(3):
        for held, each in zip(kept, (model, ddp), strict=True):
            each(batch(step)).square().sum().backward()
            grads = [p.grad for p in each.parameters()]
            held += [*grads, *(g.data for g in grads), *(g.flatten()[1:] for g in grads)]
            if step == 0:
                each.zero_grad(set_to_none=False)  # zeroes what is kept as well
            else:
                for p in each.parameters():
                    p.grad = p.grad.detach() if step == 1 else None
        for own, right in zip(*kept, strict=True):
            torch.testing.assert_close(own, right)


def test_gradients_that_programs_keep() -> None:
    run_ranks(keep_gradients, 2)


def train_flat() -> None:
    """Weights and gradients are views of two flat buffers, through which the program works."""
    losses: list[list[Tensor]] = [[], []]
    for found, sharded in zip(losses, (True, False), strict=True):
        model = zerocore.shard(net(), stage=0) if sharded else DistributedDataParallel(net())
        params: list[Any] = list(model.parameters())
        weights = torch.cat([p.detach().flatten() for p in params])
        grads = torch.zeros_like(weights)
        pairs = zip(params, views_of(weights, params), views_of(grads, params), strict=True)
        for p, weight, grad in pairs:
            p.data, p.grad = weight, grad
        for step in range(4):
            loss = model(batch(step)).square().mean()
            loss.backward()
            norm = grads.norm()
            weights.sub_(grads * torch.clamp(0.1 / norm, max=1.0)).mul_(0.9)
            found += [loss.detach(), norm, weights.clone()]
            grads.zero_()
    torch.testing.assert_close(*losses)


def test_flat_buffers_of_a_program() -> None:
    run_ranks(train_flat, 2)
    run_ranks(train_flat, 3)


def park() -> None:
    """Gradients come back, those that a program keeps and those that it has set as well."""
    model, ddp = zerocore.shard(net(), stage=0), DistributedDataParallel(net())
    kept: list[list[Tensor]] = [[], []]
    for held, each in zip(kept, (model, ddp), strict=True):
        each(batch(0)).sum().backward()
        params = list(each.parameters())
        held += [p.grad.data for p in params[:2]]
        params[0].grad = None
        params[2].grad = params[2].grad * 2
    with zerocore.parked(model):
        pass
    for each in (model, ddp):
        each(batch(1)).sum().backward()
    for own, right in zip(*kept, strict=True):
        torch.testing.assert_close(own, right)
    for own, right in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad)


def test_parked_gradients() -> None:
    run_ranks(park, 2)


def square() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def swap(m: Any) -> None:
    m[0].weight.data, m[2].weight.data = m[2].weight.data, m[0].weight.data


def turn(m: Any) -> None:
    m[0].weight.data = m[0].weight.data.t()


def own_memory(m: Any) -> None:
    m[2].bias.data = torch.full((5,), 0.5)


MOVES: dict[str, Callable[[Any], None]] = {"swap": swap, "turn": turn, "own memory": own_memory}


def move(name: str, moment: str, folder: Path) -> None:
    """Parameters lie where a program puts them, also within the engine's memory."""
    model, plain = zerocore.shard(square(), stage=0), square()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        losses = []
        for m in (model, plain):
            if moment == "before":
                MOVES[name](m)
            losses.append(m(batch(step)).square().mean())
            if moment == "between" and step == 1:
                MOVES[name](m)
        if step == 2:
            zerocore.save_safetensors(model, folder / "saved")
            with zerocore.parked(model):
                pass
        for loss in losses:
            loss.backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(other.grad)
            other.grad /= dist.get_world_size()
            torch.testing.assert_close(param.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        full = zerocore.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(full, dict(plain.state_dict()))
    zerocore.load_safetensors(model, folder / "saved")
    zerocore.load_full_state_dict(model, full)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, full[shard_of(param).fqn])
        torch.testing.assert_close(param, other)


@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize("name", MOVES)
def test_parameters_that_a_program_moves(name: str, moment: str, tmp_path: Path) -> None:
    if (name, moment) != ("own memory", "between"):  # autograd computes with the new values
        run_ranks(move, 2, name, moment, tmp_path)


def park_moved() -> None:
    """Parameters and gradients that a program has exchanged, also between units."""
    model = zerocore.shard(square(), stage=0, units=[nn.Linear])
    model(batch(0)).square().mean().backward()
    swap(model)
    first, last = model[0].weight, model[2].weight
    first.grad, last.grad = last.grad, first.grad
    tensors = [t for p in model.parameters() for t in (p.detach(), p.grad)]
    expected = [tensor.clone() for tensor in tensors]
    with zerocore.parked(model):
        if torch.__version__ >= "2.13":  # before, such a read ends the process
            with pytest.raises(RuntimeError, match="is parked"):
                first.sum()
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)


def test_parked_parameters_that_a_program_has_moved() -> None:
    run_ranks(park_moved, 1)


def add_to_differing() -> None:
    """The next backward with sync averages also what each rank had in ``grad``, as DDP does."""
    for change in ("set", "in place", "dropped", "no_sync"):
        model, ddp = zerocore.shard(net(), stage=0), DistributedDataParallel(net())
        for each in (model, ddp):
            with each.no_sync() if change == "no_sync" else nullcontext():
                each(batch(0)).square().sum().backward()
            for p in each.parameters():
                if change == "set":
                    p.grad = torch.full_like(p, float(dist.get_rank()))
                elif change == "in place":
                    p.grad.mul_(dist.get_rank() + 1)
                elif change == "dropped" and dist.get_rank() == 1:
                    p.grad = None
            each(batch(1)).square().sum().backward()
        for own, right in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(own.grad, right.grad, msg=change)


def test_gradients_of_each_rank_are_averaged() -> None:
    run_ranks(add_to_differing, 2)
    run_ranks(add_to_differing, 3)


def keep_an_array() -> None:
    model = zerocore.shard(nn.Linear(2000, 1000), stage=0)
    model(torch.ones(1, 2000)).sum().backward()
    array = model.weight.grad.numpy()
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2000)).sum().backward()
    del model
    gc.collect()
    torch.empty(3_000_000).fill_(7.0)  # may lie where freed memory was
    assert (array == 1.0).all()


def test_an_array_keeps_its_memory() -> None:
    run_ranks(keep_an_array, 2)


def set_differing() -> None:
    """If the gradients that a program sets differ, all ranks raise in the next pass."""
    model = zerocore.shard(net(), stage=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    own = torch.autograd.grad(model(batch(0)).sum(), params)
    for p, g in zip(params, own, strict=True):
        p.grad = g
    optimizer.step()
    with pytest.raises(ValueError, match=r"'0\.weight'.*\.grad was set.*dist\.all_reduce"):
        model(batch(1)).sum().backward()
    for p, g in zip(params, own, strict=True):
        dist.all_reduce(g)
        p.grad = g
    optimizer.step()
    model(batch(1)).sum().backward()


def test_gradients_that_a_program_sets() -> None:
    run_ranks(set_differing, 2)


def hook_late() -> None:
    """A post-accumulate-grad hook sees the average, and may step an optimizer."""
    model, ddp = zerocore.shard(net(), stage=0), DistributedDataParallel(net())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    expected = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        for each in (model, ddp):
            each(batch(number)).square().mean().backward()
        expected.step()
        expected.zero_grad()
        for own, right in zip(model.parameters(), ddp.parameters(), strict=True):
            assert own.grad is None
            torch.testing.assert_close(own, right)


def test_hooks_see_averages() -> None:
    run_ranks(hook_late, 2)


def outlive() -> None:
    """Parameters and graphs that outlive the model are those of a plain one."""
    model = zerocore.shard(net(), stage=0)
    params, loss = list(model.parameters()), model(batch(0)).sum()
    del model
    gc.collect()
    plain = net()
    plain(batch(0)).sum().backward()
    loss.backward()
    for own, right in zip(params, plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad)
        assert held_shard(own) is None or held_shard(own).state_ref() is None
        own.grad = None
        own.data.mul_(2)


def test_parameters_outlive_the_model() -> None:
    run_ranks(outlive, 2)
