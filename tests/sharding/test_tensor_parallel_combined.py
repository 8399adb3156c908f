"""Tensor parallelism beside pipelines, FSDP2, Muon and Hugging Face models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import zerocore
from tests.distributed.harness import run_ranks
from tests.sharding.tensor_parallel import DIM, HIDDEN, batch_of, cut_model, loss_of
from tests.sharding.test_tensor_parallel import CLOSE, mesh_of, sharded


def pipeline_stage(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM))


def train_stages(kind: str) -> None:
    """World 8: two stages of a pipeline, each cut over two ranks and sharded over two more."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number, rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    part, truth = pipeline_stage(number), nn.Sequential(pipeline_stage(0), pipeline_stage(1))
    parallelize_module(part, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    zerocore.shard(part, group=mesh["dp"])
    stage = pipelining.PipelineStage(
        part, number, 2, torch.device("cpu"), group=mesh.get_group("pp")
    )
    is_multi = "Interleaved" in kind
    make: Any = getattr(pipelining, kind)
    schedule = make([stage] if is_multi else stage, 2, loss_fn=nn.functional.mse_loss)
    inputs = [batch_of(each, 0)[0].flatten(0, 1) for each in range(2)]
    for _ in range(2):
        part.zero_grad()
        given = (inputs[rank],) if number == 0 else ()
        schedule.step(*given, **({"target": inputs[rank] * 2} if number == 1 else {}))
    whole = torch.cat(inputs)
    nn.functional.mse_loss(truth(whole), whole * 2).backward()
    for param, full in zip(part.parameters(), truth[number].parameters(), strict=True):
        torch.testing.assert_close(param.grad.whole_tensor(), full.grad, **CLOSE)
    norm = zerocore.clip_grad_norm_(part, 0.1, across=mesh["pp"])
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(truth.parameters(), 0.1), **CLOSE)
    if number == 1:
        part[2].bias.grad.mul_(float("nan"))
    where = "'2.bias'" if number == 1 else "another rank of across="
    with pytest.raises(zerocore.optim.NonFiniteGradError, match=where):
        zerocore.clip_grad_norm_(part, 0.1, error_if_nonfinite=True, across=mesh["pp"])


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_stages_of_a_pipeline(kind: str) -> None:
    run_ranks(train_stages, 8, kind)


def compare_with_fsdp2() -> None:
    """FSDP2 gives the same gradients, and sums those of each replicated parameter by itself."""
    mesh = mesh_of((2, 2))
    theirs, (ours, rank, _) = cut_model(mesh["tp"]), sharded((2, 2), 3)
    for module in (*theirs.blocks, theirs):
        torch_fsdp.fully_shard(module, mesh=mesh["dp"])
    for model in (theirs, ours):
        loss_of(model, [rank], 0).backward()
    for (name, their), own in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        expected = their.grad.full_tensor()
        torch.testing.assert_close(own.grad.whole_tensor(), expected, msg=name, **CLOSE)


def test_beside_fsdp2() -> None:
    run_ranks(compare_with_fsdp2, 4)


def refuse_muon() -> None:
    model, _, _ = sharded((2, 2), 3)
    for optimizer in (
        zerocore.matrices.Muon,
        partial(zerocore.matrices.owned, torch.optim.Adagrad),
    ):
        with pytest.raises(ValueError, match=r"'blocks\.0\.\w+\.\w+'"):
            optimizer(model.parameters(), lr=0.01)


def test_muon_refuses_dtensors_by_name() -> None:
    run_ranks(refuse_muon, 4)


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


ENDS = ("self_attn.o_proj", "mlp.down_proj")


def cut_llama(mesh: DeviceMesh) -> nn.Module:
    model = llama()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"{layer}.self_attn.{name}"] = ColwiseParallel()
        plan |= {f"{layer}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {
            f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        }
    return parallelize_module(model, mesh, plan)


def tokens_of(rank: int) -> Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))


def train_llama(shape: tuple[int, int], on_meta: bool) -> None:
    """Embedding, attention and head are cut; norms stay plain. Also from the meta device."""
    mesh, truth = mesh_of(shape), llama()
    with torch.device("meta" if on_meta else "cpu"):
        model = cut_llama(mesh["tp"])
    zerocore.shard(model, group=mesh["dp"], device=torch.device("cpu"), init_fn=lambda module: None)
    zerocore.load_full_state_dict(model, truth.state_dict() if dist.get_rank() == 0 else None)
    for buffer, own in zip(model.buffers(), truth.buffers(), strict=True):
        buffer.copy_(own)
    own_tokens = tokens_of(mesh["dp"].get_local_rank())
    model(input_ids=own_tokens, labels=own_tokens).loss.backward()
    tokens = torch.cat([tokens_of(rank) for rank in range(shape[0])])
    truth(input_ids=tokens, labels=tokens).loss.backward()
    for (name, param), full in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad.whole_tensor(), full.grad, rtol=5e-6, atol=5e-7, msg=name
        )


@pytest.mark.one_by_day
@pytest.mark.parametrize(("shape", "on_meta"), [((2, 2), False), ((2, 2), True), ((4, 1), False)])
def test_llama(shape: tuple[int, int], on_meta: bool) -> None:
    run_ranks(train_llama, 4, shape, on_meta)
