"""zerocore's stages and their peers behind one face: a function that takes one training step."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
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
    """A way to train: `peer` is the library, `stage` the ZeRO stage it amounts to, if any.

    `overlap` asks FSDP2 for explicit prefetching, see `prefetch_in_order`; `prefetch` is the number
    of units that zerocore gathers ahead.
    """

    peer: str
    stage: int | None
    label: str
    overlap: bool = False
    prefetch: int = 1


# In the order in which they run: those that are compared run right after each other.
SYSTEMS = (
    System("plain", None, "plain, no communication"),
    System("ddp", 0, "DDP"),
    System("zerocore", 0, "zerocore stage 0"),
    System("zerocore", 1, "zerocore stage 1"),
    System("deepspeed", 2, "DeepSpeed ZeRO-2"),
    System("fsdp2", 2, "FSDP2, no reshard"),
    System("fsdp2", 2, "FSDP2, no reshard, async", overlap=True),
    System("zerocore", 2, "zerocore stage 2"),
    System("deepspeed", 3, "DeepSpeed ZeRO-3"),
    System("fsdp2", 3, "FSDP2"),
    System("fsdp2", 3, "FSDP2, async", overlap=True),
    System("zerocore", 3, "zerocore stage 3"),
)
PEERS = tuple(dict.fromkeys(s.peer for s in SYSTEMS if s.peer != "zerocore"))


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
    return _torch_step(wrap_model(system, model, blocks), lr)


def wrap_model(
    system: System, model: nn.Module, blocks: nn.ModuleList, bucket_mb: float | None = None
) -> nn.Module:
    """`model` under any system but DeepSpeed; `bucket_mb` is the size of DDP's buckets in MiB."""
    if system.peer == "ddp":
        # With gradients in the buckets DDP saves a copy: its faster setting.
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
    if system.peer == "fsdp2":
        apply_fsdp2(model, blocks, reshard=system.stage == 3)
        if system.overlap:
            prefetch_in_order(model, blocks)
    elif system.peer == "zerocore":
        return import_zerocore().shard(model, stage=system.stage, prefetch=system.prefetch)
    return model


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


def prefetch_in_order(model: Any, blocks: Any) -> None:
    """Lets FSDP2 gather one block ahead, forward and backward, as its manual advises.

    On CPU it otherwise waits for each all-gather before it goes on.
    """
    model._set_unshard_async_op(True)
    for earlier, later in itertools.pairwise([model, *blocks]):
        earlier.set_modules_to_forward_prefetch([later])
    for earlier, later in itertools.pairwise(blocks):
        later.set_modules_to_backward_prefetch([earlier])


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
