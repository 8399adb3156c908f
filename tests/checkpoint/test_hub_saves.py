"""Calls ``save_pretrained`` of sharded models: the files are those of plain models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from tests.distributed.harness import run_ranks, run_to_end

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from safetensors.torch import load_file  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 31}


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def check_files(folder: Path, right: Path) -> None:
    found = load_file(folder / "model.safetensors")
    torch.testing.assert_close(found, load_file(right / "model.safetensors"), rtol=1e-6, atol=1e-6)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert len(dict(loaded.named_parameters())) == len(found)


def save(folder: Path, stage: int, tied: bool, alone: bool) -> None:
    plain = llama(tied)
    train(plain)
    rank = dist.get_rank()
    plain.save_pretrained(folder / f"plain-{rank}")
    model = zerocore.shard(llama(tied), stage=stage)
    train(model)
    if rank == 0 or not alone:
        model.save_pretrained(folder / "sharded", is_main_process=rank == 0)
    if rank == 0:
        check_files(folder / "sharded", folder / "plain-0")
    train(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_save(tmp_path: Path, stage: int, world_size: int, tied: bool) -> None:
    run_ranks(save, world_size, tmp_path, stage, tied, False)


def test_rank_0_saves_alone(tmp_path: Path, stage: int) -> None:
    if stage < 3:
        run_ranks(save, 2, tmp_path, stage, True, True)
        return
    for outcome in run_to_end(save, 2, tmp_path, stage, True, True, group_timeout=600.0):
        error = str(outcome.error)
        assert "rank 0 waits in save_pretrained (test_hub_saves.py:" in error, error
        assert "The ranks wait for each other" in error


def save_adapters(folder: Path, stage: int) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    plain = peft.get_peft_model(llama(), config)
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config)
    zerocore.shard(model, stage=stage)
    for each in (plain, model):
        train(each)
    rank = dist.get_rank()
    plain.save_pretrained(folder / f"plain-{rank}")
    model.save_pretrained(folder / f"sharded-{rank}")
    name = "adapter_model.safetensors"
    found, right = (load_file(folder / f"{kind}-{rank}" / name) for kind in ("sharded", "plain"))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_adapters(tmp_path: Path, stage: int) -> None:
    run_ranks(save_adapters, 2, tmp_path, stage)
