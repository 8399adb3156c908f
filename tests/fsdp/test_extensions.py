"""Parameters that say themselves what is gathered do as under ``torch.distributed.fsdp``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import (
    ENGINES,
    Block,
    Net,
    Trained,
    check_plan,
    check_same,
    full_params,
    loss_of,
    make_net,
    shard_blocks,
    tokens_of,
    train,
    train_both,
)

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Halves(Tensor):
    """A float32 tensor that is gathered as two of its bfloat16 parts: high bits and a rest."""

    asked = 0

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        """Around ``data``."""
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype,
            device=data.device,
        )  # fmt: skip

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Halves(inner["_data"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Rows of all ranks are as many, so the last ones may be padded."""
        Halves.asked += 1
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear)
        rows = math.ceil(outer_size[0] / mesh.size())
        padded = self._data.new_zeros(rows, *outer_size[1:])
        padded[: len(self._data)] = self._data
        high = padded.bfloat16()
        rest = (padded - high.float()).bfloat16()
        return (high, rest), tuple(outer_size)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """A plain tensor."""
        high, rest = outputs
        value = (high.float() + rest.float())[: metadata[0]].to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value)
            return None
        return value, (value,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(tensor: Halves) -> Tensor:
            return tensor._data

        out = func(
            *pytree.tree_map_only(Halves, plain, args),
            **pytree.tree_map_only(Halves, plain, kwargs or {}),
        )
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            return out  # activations and gradients are plain
        return pytree.tree_map_only(Tensor, cls, out)


def make_halves() -> nn.Module:
    """Two of a block's weights say themselves what is gathered, the others do not."""
    model = make_net()
    for block in model.blocks:
        assert isinstance(block, Block)
        for layer in (block.qkv, block.up):
            layer.weight = nn.Parameter(Halves(layer.weight.detach()))
    return model


def trains(shape: tuple[int, ...], **options: Any) -> Callable[..., Trained]:
    def run(fsdp: Any, model: Any) -> Trained:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        shard_blocks(fsdp, model, mesh=mesh, **options)
        Halves.asked = 0
        trained = train(model)
        assert Halves.asked >= 4 * 6
        return trained

    return run


def accumulates(fsdp: Any, model: Any) -> Trained:
    shard_blocks(fsdp, model)

    def step(model: Any, index: int) -> float:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, tokens_of(index, micro))
            loss.backward()
        with torch.no_grad():
            model.blocks[0].unshard()
            assert model.blocks[0].qkv.weight.shape == (30, 10)
            model.blocks[0].reshard()
            total = loss.item() + loss_of(model, tokens_of(9)).item()
            model.reshard()
            return total

    return train(model, step)


def recomputes(fsdp: Any, model: Any) -> Trained:
    """Blocks are called once more in the backward."""
    for block in model.blocks:
        checkpoint(block)
    return train(shard_blocks(fsdp, model))


def parity(*shape: int) -> None:
    check_same(train_both(trains(shape), make_halves), rtol=1e-4, atol=1e-5)
    check_same(
        train_both(trains(shape, reshard_after_forward=False), make_halves), rtol=1e-4, atol=1e-5
    )


def more_parity() -> None:
    parity(2)
    mixed = trains((2,), mp_policy=MIXED)
    check_same(train_both(mixed, make_halves), rtol=1e-2, atol=1e-2)
    check_same(train_both(accumulates, make_halves), rtol=1e-4, atol=1e-5)
    check_same(train_both(recomputes, make_halves), rtol=1e-4, atol=1e-5)


def figures() -> None:
    """Of the bytes that travel, and of memory."""
    model = shard_blocks(zerocore.fsdp, make_halves())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        loss_of(model, tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for each, asked_again in ((model, False), (shard_blocks(zerocore.fsdp, make_net()), True)):
        group = each.blocks[0]._get_fsdp_state()._fsdp_param_group  # as TransformerEngine reads
        assert group._reshard_after_forward == asked_again
        assert group._training_state.name == "FORWARD"
    text = str(zerocore.describe(model))
    assert "gathered as bfloat16" in text, text
    check_plan(model, "parameters", "gradients", "pool_reserved")


def checkpoints(folder: Path) -> None:
    """Torch's own hold the values; ``Checkpoints`` would write what it does not know."""
    model = shard_blocks(zerocore.fsdp, make_halves())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens_of(0)).backward()
    optimizer.step()
    with pytest.raises(NotImplementedError, match=r"qkv\.weight.*Halves.*distributed\.checkpoint"):
        zerocore.Checkpoints(folder / "own", model, optimizer).save(1)
    expected = {name: plain(value) for name, value in full_params(model).items()}
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "dcp")
    loss_of(model, tokens_of(1)).backward()
    optimizer.step()
    torch.serialization.add_safe_globals([Halves])
    dcp.load(get_model_state_dict(model), checkpoint_id=folder / "dcp")
    for name, value in full_params(model).items():
        assert torch.equal(plain(value), expected[name]), name
    loss_of(model, tokens_of(0)).backward()


def plain(value: Tensor) -> Tensor:
    return value._data if isinstance(value, Halves) else value


def columns(param: Tensor) -> Shard | None:
    return Shard(1) if isinstance(param, Halves) else None


def refusals() -> None:
    model = shard_blocks(zerocore.fsdp, make_halves())
    with pytest.raises(TypeError, match=r"is a Halves.*use torch\.optim\.AdamW"):
        zerocore.optim.AdamW(model.parameters())
    model = make_halves()
    zerocore.fsdp.fully_shard(model, shard_placement_fn=columns)
    with pytest.raises(NotImplementedError, match=r"qkv\.weight.*fsdp_pre_all_gather.*dimension 1"):
        loss_of(model, tokens_of(0))
    half: Any = make_net()
    half.head.weight.fsdp_post_all_gather = None
    zerocore.fsdp.fully_shard(half)
    half.head.weight._local_tensor.fsdp_post_all_gather = None
    with pytest.raises(AssertionError, match=r"'head\.weight': both fsdp_pre_all_gather and"):
        loss_of(half, tokens_of(0))


def changes_shape() -> None:
    """A parameter that says another shape than before is named."""
    model: Net = shard_blocks(zerocore.fsdp, make_halves())
    loss_of(model, tokens_of(0)).backward()
    weight: Any = model.blocks[1].up.weight
    weight._local_tensor.fsdp_pre_all_gather = lambda mesh: ((torch.ones(3, 3),), None)
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight': fsdp_pre_all_gather ret"):
        loss_of(model, tokens_of(0))


def on_two() -> None:
    more_parity()
    figures()
    refusals()
    changes_shape()


def run_torchao() -> None:
    """Float8, int8 and NF4 below LoRA, to the bit."""
    from tests.fsdp import torchao_models

    for name, make in torchao_models.MODELS.items():
        for policy in (MixedPrecisionPolicy(), MIXED):
            trained = {
                engine: torchao_models.train(fsdp, make(), policy)  # NF4 takes no deepcopy
                for engine, fsdp in ENGINES.items()
            }
            assert trained["torch"].losses == trained["zerocore"].losses, name
            assert trained["torch"].losses[0] != trained["torch"].losses[-1]


def test_parameters_gather_what_they_say() -> None:
    run_ranks(on_two, 2, timeout=180)


def test_uneven_rows() -> None:
    run_ranks(parity, 3, 3, timeout=120)


@pytest.mark.nightly
def test_replicas() -> None:
    run_ranks(parity, 4, 2, 2, timeout=120)


@pytest.mark.nightly
def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(checkpoints, 2, tmp_path, timeout=120)


def test_torchao() -> None:
    pytest.importorskip("torchao", minversion="0.18")
    run_ranks(run_torchao, 2, timeout=180)
