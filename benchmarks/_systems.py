"""zerocore's stages and their peers behind one face: a function that takes one training step."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# (inputs, targets) -> loss of this rank's batch, in nats
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class System:
    """A way to train: `peer` is the library, `stage` the ZeRO stage it amounts to, if any."""

    peer: str
    stage: int | None
    label: str


SYSTEMS = (
    System("plain", None, "plain, no communication"),
    System("ddp", 0, "DDP"),
    System("fsdp2", 2, "FSDP2, no reshard"),
    System("fsdp2", 3, "FSDP2"),
    System("deepspeed", 2, "DeepSpeed ZeRO-2"),
    System("deepspeed", 3, "DeepSpeed ZeRO-3"),
    *(System("zerocore", stage, f"zerocore stage {stage}") for stage in range(4)),
)
PEERS = tuple(dict.fromkeys(system.peer for system in SYSTEMS))


def import_zerocore() -> ModuleType:
    """zerocore as installed, or as built in place in this checkout. Raises ImportError."""
    root = str(Path(__file__).resolve().parents[1])
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module("zerocore")


def is_installed(peer: str) -> bool:
    """Whether the systems of `peer` can run here."""
    if peer == "zerocore":
        try:
            return hasattr(import_zerocore(), "shard")
        except ImportError:
            return False
    return peer != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def build_step(system: System, model: nn.Module, blocks: nn.ModuleList, lr: float) -> Step:
    """Makes `model` (same weights on every rank) train under `system` with fused AdamW.

    `blocks` are the repeated blocks inside `model`; FSDP2 has to be told about them.
    """
    if system.peer == "deepspeed":
        return _deepspeed_step(model, lr, system.stage)
    if system.peer == "ddp":
        # With gradients in the buckets DDP saves a copy: its faster setting.
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif system.peer == "fsdp2":
        apply_fsdp2(model, blocks, reshard=system.stage == 3)
    elif system.peer == "zerocore":
        model = import_zerocore().shard(model, stage=system.stage)
    return _torch_step(model, lr)


def apply_fsdp2(
    model: nn.Module, blocks: nn.ModuleList, *, reshard: bool, mesh: Any = None
) -> None:
    """Shards each block and then the root in place, as FSDP2's manual advises.

    With `reshard` the root keeps its default: it stays gathered after the forward, as the backward
    needs it at once.
    """
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)


def _torch_step(model: nn.Module, lr: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _deepspeed_step(model: nn.Module, lr: float, stage: int | None) -> Step:
    deepspeed = importlib.import_module("deepspeed")
    config = {
        # DeepSpeed insists on knowing the batch; nothing here depends on it.
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        # Its default clips to a norm of 1, which would make the losses differ from all the others.
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
        config=config,
        dist_init_required=not dist.is_initialized(),
    )

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step
