"""Every public function that takes a sharded model or its optimizer takes both kinds of shards."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.fsdp.both import loss_of, make_net, shard_blocks, tokens_of
from tests.repository.public_api import PACKAGES, is_fixed

TAKEN = ("nn.Module", "_Model", "Optimizer")  # in the annotation of a parameter
# Functions for models that are not sharded yet, and names of torch's FSDP2.
BEFORE = {"shard", "plan", "fully_shard", "register_fsdp_forward_method"}


@dataclass
class Case:
    """A model of either kind after a step, its optimizer, and a folder that all ranks share."""

    model: Any
    optimizer: torch.optim.Optimizer
    folder: Path

    def step(self) -> None:
        loss_of(self.model, tokens_of(0)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def within(context: Any) -> Any:
    with context as value:
        return value


def attempt(case: Case) -> None:
    with zerocore.retryable(case.model, case.optimizer) as tried:
        case.step()
    assert not tried.failed


def checkpointed(case: Case, kind: Any, name: str) -> None:
    checkpoints = kind(case.folder / name, case.model, case.optimizer)
    checkpoints.save(1)
    checkpoints.wait()
    assert checkpoints.load() == 1


def saved(case: Case) -> None:
    zerocore.save_safetensors(case.model, case.folder / "saved")
    zerocore.load_safetensors(case.model, case.folder / "saved")


def loaded(case: Case) -> None:
    full = zerocore.full_state_dict(case.model, rank0_only=False)
    zerocore.load_full_state_dict(case.model, full)


def forward_method(case: Case) -> None:
    case.model.twice = lambda tokens: 2 * case.model.forward(tokens)
    zerocore.register_forward_method(case.model, "twice")
    case.model.twice(tokens_of(0))


def averaged(case: Case) -> None:
    zerocore.weights.EMA(case.model.parameters()).update()


def stepped(case: Case, optimizer: torch.optim.Optimizer) -> None:
    Case(case.model, optimizer, case.folder).step()


def by_name(model: nn.Module) -> Any:
    return model.named_parameters()


CALLS: dict[str, Callable[[Case], Any]] = {
    "Checkpoints": lambda case: checkpointed(case, zerocore.Checkpoints, "checkpoints"),
    "EMA": averaged,
    "AdamW": lambda case: stepped(case, zerocore.optim.AdamW(case.model.parameters())),
    "Muon": lambda case: stepped(
        case, zerocore.matrices.Muon(by_name(case.model), adamw={"lr": 1e-3})
    ),
    "PeerCheckpoints": lambda case: checkpointed(case, zerocore.recovery.PeerCheckpoints, "peers"),
    "clip_grad_norm_": lambda case: zerocore.clip_grad_norm_(case.model, 1.0),
    "clone_sharded": lambda case: zerocore.clone_sharded(case.model, make_net),
    "copy_weights": lambda case: zerocore.weights.copy_weights(case.model, case.model),
    "describe": lambda case: zerocore.describe(case.model),
    "explain_out_of_memory": lambda case: within(
        zerocore.reporting.explain_out_of_memory(case.model)
    ),
    "export": lambda case: list(zerocore.export(case.model)),
    "export_info": lambda case: zerocore.weights.export_info(case.model),
    "full_optimizer_state_dict": lambda case: zerocore.full_optimizer_state_dict(case.optimizer),
    "full_state_dict": lambda case: zerocore.full_state_dict(case.model),
    "load_full_state_dict": loaded,
    "load_safetensors": saved,
    "memory_usage": lambda case: zerocore.memory_usage(case.model, case.optimizer),
    "metrics": lambda case: zerocore.metrics(case.model),
    "no_sync": lambda case: within(zerocore.no_sync(case.model)),
    "owned": lambda case: stepped(
        case, zerocore.matrices.owned(torch.optim.SGD, case.model.parameters(), lr=0.1)
    ),
    "param_groups": lambda case: zerocore.param_groups(case.model, 0.1),
    "parked": lambda case: within(zerocore.parked(case.model, case.optimizer)),
    "predict_events": lambda case: zerocore.planning.predict_events(case.model),
    "predict_memory": lambda case: zerocore.planning.predict_memory(case.model),
    "record_events": lambda case: within(zerocore.reporting.record_events(case.model)),
    "register_forward_method": forward_method,
    "report": lambda case: zerocore.report(case.model),
    "reset": lambda case: zerocore.reset(case.model),
    "retryable": attempt,
    "save_safetensors": saved,
    "shards": lambda case: zerocore.weights.shards(case.model),
    "snapshot": lambda case: zerocore.snapshot(case.model, case.optimizer),
    "trace": lambda case: within(zerocore.trace(case.model)),
    "unsharded": lambda case: within(zerocore.unsharded(case.model)),
    "verify": lambda case: zerocore.verify(case.model, case.optimizer),
}


def names_taking_models() -> set[str]:
    found = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or (isinstance(value, type) and not is_fixed(value)):
                continue
            signature = inspect.signature(value)
            if "ShardState" in str(signature):  # made by functions, not by programs
                continue
            taken = [str(each.annotation) for each in signature.parameters.values()]
            if any(kind in text for text in taken for kind in TAKEN):
                found.add(name)
    return found


def test_the_table_has_every_function() -> None:
    # Optimizers and averages take parameters, which say nothing of a model.
    of_parameters = {"AdamW", "EMA", "Muon"}
    assert names_taking_models() - BEFORE | of_parameters == CALLS.keys()


def call_all(folder: Path) -> None:
    for kind in ("flat", "rows"):
        for name, call in CALLS.items():
            net = make_net()
            model = zerocore.shard(net) if kind == "flat" else shard_blocks(zerocore.fsdp, net)
            optimizer = zerocore.optim.AdamW(model.parameters())
            case = Case(model, optimizer, folder / kind / name)
            case.step()
            print(kind, name, flush=True)
            call(case)


def test_all_take_both_kinds(tmp_path: Path) -> None:
    run_ranks(call_all, 2, tmp_path, timeout=240)
