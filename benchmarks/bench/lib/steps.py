"""Wraps every system in one interface: a function that takes one training step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.lib.systems import Recipe, System, import_zerocore, wrap_model

MicroBatch = tuple[Tensor, Tensor]  # inputs, targets
# Takes this rank's micro-batches of a step; returns their mean loss in nats.
Step = Callable[[Sequence[MicroBatch]], float]


def build_step(
    system: System, model: nn.Module, blocks: nn.ModuleList, lr: float, recipe: Recipe
) -> Step:
    """Makes `model` (same weights on every rank) train under `system` with fused AdamW.

    `blocks` are the repeated blocks of `model`, which FSDP2 needs.
    """
    if system.peer == "deepspeed":
        return _deepspeed_step(model, lr, system, recipe)
    model = wrap_model(system, model, blocks, recipe=recipe)
    if system.peer == "zerocore" and recipe.optimizer == "zerocore":
        optimizer = import_zerocore().optim.AdamW(
            model.parameters(), lr=lr, clip_grad_norm=recipe.clip
        )
        return _torch_step(system, model, optimizer, recipe, clips_itself=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    return _torch_step(system, model, optimizer, recipe)


def _torch_step(
    system: System,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    clips_itself: bool = False,
) -> Step:
    # FSDP2 and zerocore cast parameters; DDP and a plain model need autocast.
    casts = recipe.compute_dtype is not None and system.peer in ("plain", "ddp")
    share = 1 / recipe.accumulate

    def step(batches: Sequence[MicroBatch]) -> float:
        total = 0.0
        for index, (inputs, targets) in enumerate(batches):
            with _sync(system, model, index == len(batches) - 1):
                with torch.autocast(inputs.device.type, torch.bfloat16, enabled=casts):
                    loss = model(inputs, targets)
                (loss * share if share != 1 else loss).backward()
            total += float(loss.detach())
        if recipe.clip is not None and not clips_itself:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total * share

    return step


def _sync(system: System, model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Returns the context of a micro-batch, which reduces gradients only in the last one."""
    if system.peer == "fsdp2":
        model.set_requires_gradient_sync(is_last)
    if is_last or system.peer in ("plain", "fsdp2"):
        return nullcontext()
    no_sync: AbstractContextManager[Any] = (
        model.no_sync() if system.peer == "ddp" else import_zerocore().no_sync(model)
    )
    return no_sync


def _deepspeed_step(model: nn.Module, lr: float, system: System, recipe: Recipe) -> Step:
    deepspeed = importlib.import_module("deepspeed")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    zero: dict[str, Any] = {"stage": system.stage}
    if system.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        adam: Any = importlib.import_module("deepspeed.ops.adam")
        optimizer = adam.DeepSpeedCPUAdam(
            model.parameters(), lr=lr, weight_decay=0.01, adamw_mode=True
        )
    config: dict[str, Any] = {
        # DeepSpeed requires a batch size; nothing here depends on it.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": recipe.accumulate,
        "zero_optimization": zero,
        # The default clips to a norm of 1, and losses would differ from the other systems'.
        "gradient_clipping": recipe.clip or 0.0,
    }
    if recipe.compute_dtype is not None:
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        dist_init_required=not dist.is_initialized(),
    )

    def step(batches: Sequence[MicroBatch]) -> float:
        total = 0.0
        for inputs, targets in batches:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total / len(batches)

    return step
