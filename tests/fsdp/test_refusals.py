"""``zerocore.fsdp`` refuses by name, where it does not do as FSDP2; classes are FSDP2's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    Net,
    Trained,
    check_same,
    full_params,
    loss_of,
    make_net,
    shard_blocks,
    tokens_of,
    train,
    train_both,
)

fully_shard = zerocore.fsdp.fully_shard


def shard_in_vain() -> None:
    """Each message says what to do, and comes before anything is changed."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        fully_shard(nn.ModuleList([model]), mesh=mesh)
    both = [nn.Sequential(model, nn.Linear(4, 4)) for _ in range(2)]
    fully_shard(both[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded already, by a call"):
        fully_shard(both[1], mesh=mesh)
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"expects an nn\.Module"):
        fully_shard(model.weight, mesh=mesh)
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1))
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(
            nn.Linear(3, 4), mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1)
        )
    with pytest.raises(ValueError, match=r"expected Shard\(dim\), a ShardPlacementResult or None"):
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Replicate())
    with pytest.raises(ValueError, match="factor of 2"):
        fully_shard(model, mesh=mesh, reshard_after_forward=3)
    with pytest.raises(ValueError, match="1D or 2D"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1, 1)))
    with pytest.raises(TypeError, match=r"zerocore\.shard has sharded"):
        fully_shard(zerocore.shard(nn.Linear(4, 4)), mesh=mesh)
    narrow = fully_shard(nn.Linear(4, 4).to(torch.float8_e4m3fn), mesh=mesh)
    with pytest.raises(ValueError, match=r"'weight' of dtype .*float8_e4m3fn requires"):
        narrow(torch.ones(1, 4))
    strange = nn.Linear(4, 4)
    strange.weight = nn.Parameter(strange.weight.detach().t())
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        fully_shard(strange, mesh=mesh)
    strange.weight = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar parameters"):
        fully_shard(strange, mesh=mesh)
    assert type(model) is nn.Linear
    assert not isinstance(model.weight, DTensor)


def use_in_vain() -> None:
    tied = make_net()
    tied.blocks[1].out.weight = tied.blocks[0].out.weight
    fully_shard(tied.blocks[0])
    fully_shard(tied)
    with pytest.raises(
        ValueError, match=r"'blocks\.1\.out.*'blocks\.0\.out|'blocks.0.out.*'blocks.1"
    ):
        loss_of(tied, tokens_of(0))
    model = shard_blocks(zerocore.fsdp, make_net())
    with pytest.raises(AssertionError, match="applied to a module once"):
        fully_shard(model)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    inner = shard_blocks(zerocore.fsdp, make_net())
    inner.blocks[0](torch.ones(2, 10))
    with pytest.raises(RuntimeError, match=r"already been lazily initialized for blocks\.0"):
        loss_of(inner, tokens_of(0))
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(RuntimeError, match=r"still on meta device: \['embed.weight'"):
        loss_of(shard_blocks(zerocore.fsdp, empty), tokens_of(0))
    model.head.bias = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"'head\.bias' was replaced by Parameter"):
        loss_of(model, tokens_of(0))


def matrices_by_muon(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=lr)


def train_by_muon(fsdp: Any, model: nn.Module) -> Trained:
    return train(shard_blocks(fsdp, model), make_optimizer=matrices_by_muon)


def use_what_the_refusal_says() -> None:
    check_same(train_both(train_by_muon), rtol=1e-3, atol=1e-3)  # Newton-Schulz in bfloat16


def look_at_classes() -> None:
    model = make_net()
    sharded = shard_blocks(zerocore.fsdp, model, reshard_after_forward=True)
    assert sharded is model
    assert type(model).__name__ == "FSDPNet"
    assert isinstance(model, Net)
    assert isinstance(model, zerocore.fsdp.FSDPModule)
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert type(type(model.blocks[0])(10)).__name__ == "Block"  # a new one is not sharded
    rank = torch.distributed.get_rank()
    full = make_net().blocks[0].up.weight
    for _ in range(2):  # before the first forward and after it
        weight: Any = model.blocks[0].up.weight
        expected = list(full.chunk(3))[rank]
        assert weight.placements == (Shard(0),)
        assert weight.shape == full.shape
        assert torch.equal(weight.to_local(), expected)
        assert model.blocks[0].scale.to_local().shape == ((1,) if rank == 0 else (0,))
        loss_of(model, tokens_of(0)).backward()
    assert weight.grad.placements == (Shard(0),)
    assert weight.grad.to_local().shape == expected.shape


def read_states() -> None:
    """By the names of FSDP2's own state, as torch.distributed.pipelining reads it."""
    model = shard_blocks(zerocore.fsdp, make_net())
    states = [fully_shard.state(module) for module in (model, *model.blocks)]
    assert fully_shard.state(model.head) is None
    assert states[0] is model._get_fsdp_state()
    states[0]._lazy_init()
    assert [state._is_root for state in states] == [True, False, False, False]
    assert states[3]._state_ctx.all_states == states
    with pytest.raises(RuntimeError, match="requires a single root module"):
        several = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
        several[0].unshard()  # may be before the root is known
        several[0](torch.ones(2))
    params = states[2]._fsdp_param_group
    assert params._module_fqn == "blocks.1"
    assert params.fsdp_params[-1]._param_fqn == "blocks.1.down.bias"
    assert not params.is_unsharded
    model.blocks[1].unshard()
    assert params.is_unsharded


def fail_and_go_on() -> None:
    """A forward that raises, and a backward that does, leave nothing behind."""
    model = shard_blocks(zerocore.fsdp, make_net())
    expected = loss_of(model, tokens_of(0)).item()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3, 4, 5).long()[..., None].expand(-1, -1, -1, -1, 99).float())
    loss = loss_of(model, tokens_of(0))
    with pytest.raises(RuntimeError, match="once"):
        hook = model.blocks[1].up.weight
        del hook
        handle = model.blocks[1].register_full_backward_hook(_raise)
        loss_of(model, tokens_of(0)).backward()
    handle.remove()
    model.reset_iter_state()
    loss = loss_of(model, tokens_of(0))
    assert loss.item() == expected
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def _raise(*args: Any) -> None:
    raise RuntimeError("once")


def leave_some_unused() -> None:
    """A parameter without a gradient on any rank keeps none; one that some rank used has one."""
    model = shard_blocks(zerocore.fsdp, make_net())
    model.blocks[2].down.register_forward_hook(lambda *args: args[-1].detach())
    loss_of(model, tokens_of(0)).backward()
    assert model.blocks[2].up.weight.grad is None
    assert model.blocks[2].out.weight.grad is not None


def run_installed() -> None:
    stock = torch_fsdp.fully_shard
    with zerocore.fsdp.installed():
        from torch.distributed.fsdp import FSDPModule, fully_shard

        model = shard_blocks(torch_fsdp, make_net())
        assert fully_shard is zerocore.fsdp.fully_shard
        assert isinstance(model, FSDPModule)
        assert isinstance(model, zerocore.fsdp.FSDPModule)
    assert torch_fsdp.fully_shard is stock
    assert not isinstance(shard_blocks(torch_fsdp, make_net()), zerocore.fsdp.FSDPModule)
    assert full_params(model).keys() == dict(make_net().named_parameters()).keys()


def run_all() -> None:
    shard_in_vain()
    use_in_vain()
    read_states()
    fail_and_go_on()
    leave_some_unused()
    run_installed()


def test_torchs_muon_takes_these_parameters() -> None:
    run_ranks(use_what_the_refusal_says, 2)


def test_mistakes_are_named_and_survived() -> None:
    run_ranks(run_all, 2, timeout=120)


def test_classes_and_rows_are_as_fsdp2_makes_them() -> None:
    run_ranks(look_at_classes, 3)
