"""torchtitan's ``apply_fsdp_to_decoder``, as it is, over ``zerocore.fsdp``: as over torch's FSDP2.

Its trainer asks for a device, so this calls what that trainer calls: the model is built on the meta
device, sharded, given memory and initialised; gradients are summed, and losses are divided by the
tokens of all ranks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from tests.fsdp.both import Block, full_params, tokens_of
from tests.integrations.fully_sharded import ENGINES, check_close, check_engine, engine

pytest.importorskip("torchtitan.distributed.fsdp")

STEPS = 5
SAVED = 3


class Decoder(nn.Module):
    """The attributes that torchtitan asks its decoders for."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(7, 10)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(3)})
        self.norm = nn.LayerNorm(10)
        self.lm_head = nn.Linear(10, 7, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))

    def init_weights(self) -> None:
        for name, param in self.named_parameters():
            if name.endswith(("norm.weight", "scale")):
                nn.init.ones_(param)
            else:
                nn.init.trunc_normal_(param, std=0.2)


def make(case: dict[str, Any], seed: int = 0) -> tuple[Any, Any]:
    """A sharded decoder and its optimizer, as torchtitan's trainer makes them."""
    sys.modules.pop("torchtitan.distributed.fsdp", None)  # it binds fully_shard when imported
    titan = importlib.import_module("torchtitan.distributed.fsdp")
    with torch.device("meta"):
        model = Decoder(case["tied"])
    titan.apply_fsdp_to_decoder(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        param_dtype=case["dtype"],
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=case["policy"],
    )
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            # torch's cannot divide by titan's factor of 1.0 on gloo without it.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    figures = []
    for step in range(first, last):
        tokens = tokens_of(step)
        labels = tokens[:, 1:].flatten()
        logits = model(tokens[:, :-1]).float().flatten(0, 1)
        count = labels.numel() * dist.get_world_size()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        figures += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return figures


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def train_save_and_resume(directory: str, case: dict[str, Any]) -> None:
    figures, values = {}, {}
    for name in ENGINES:
        with engine(name):
            made = make(case)
            check_engine(made[0], name)
            figures[name] = train(*made, 0, SAVED)
            dcp.save(states(*made), checkpoint_id=Path(directory, name))
            figures[name] += train(*made, SAVED, STEPS)
            values[name] = full_params(made[0])
    check_close(figures["zerocore"], figures["torch"])
    torch.testing.assert_close(values["zerocore"], values["torch"], rtol=1e-5, atol=1e-6)
    for writer, reader in case["resumes"]:
        with engine(reader):
            made = make(case, seed=1)
            read = states(*made)
            dcp.load(read, checkpoint_id=Path(directory, writer))
            set_state_dict(
                *made, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
            )
            check_close(train(*made, SAVED, STEPS), figures["torch"][2 * SAVED :])


CASES: tuple[dict[str, Any], ...] = (
    {
        "tied": False,
        "policy": "default",
        "dtype": torch.bfloat16,
        "resumes": [("zerocore", "zerocore")],
    },
    {
        "tied": True,
        "policy": "always",
        "dtype": torch.float32,
        "resumes": [("torch", "zerocore"), ("zerocore", "torch")],
    },
)


def all_cases(directory: str) -> None:
    for index, case in enumerate(CASES):
        train_save_and_resume(str(Path(directory, str(index))), case)


def test_its_decoders_train_as_over_fsdp2(tmp_path: Path) -> None:
    run_ranks(all_cases, 2, str(tmp_path), timeout=120, fresh=True)
