"""zerocore's stages and their peers, and how each wraps a model."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class System:
    """A way to train: `peer` is the library, `stage` its ZeRO stage, if any.

    `overlap` turns on FSDP2's explicit prefetching, see `prefetch_in_order`; `prefetch` is the
    number of units that zerocore gathers ahead, `reductions` the number that it reduces at a time.
    A `hybrid` system shards within replicas, over a 2-D mesh. With `offload` states are on the
    host. With `near` all gathers but the first come from that many consecutive ranks (hpZ). With
    `registered` the group's backend allocates the memory of collectives. With `static_graph` ranks
    promise the same calls in each pass. With `finds_units` zerocore chooses the units, and joins
    small blocks.
    """

    peer: str
    stage: int | None
    label: str
    overlap: bool = False
    prefetch: int = 1
    reductions: int = 1
    hybrid: bool = False
    offload: bool = False
    near: int | None = None
    registered: bool = False
    static_graph: bool = False
    finds_units: bool = False


@dataclass(frozen=True)
class Recipe:
    """The options of a step.

    `dtype` is fp32, or bf16 over fp32 weights; a step takes `accumulate` micro-batches and clips
    gradients to a norm of `clip`. `optimizer` is torch's fused AdamW or "zerocore", which only
    zerocore uses.
    """

    dtype: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    optimizer: str = "torch"

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that layers compute in, if it is not the model's."""
        return torch.bfloat16 if self.dtype == "bf16" else None


FP32 = Recipe()

# In the order in which they run: systems that are compared run right after each other.
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
    System("fully_shard", 3, "zerocore.fsdp"),
)
OURS = ("zerocore", "fully_shard")
PEERS = tuple(dict.fromkeys(s.peer for s in SYSTEMS if s.peer not in OURS))


def import_zerocore() -> ModuleType:
    """Imports zerocore as installed, or as built in this checkout. May raise ImportError."""
    root = str(Path(__file__).resolve().parents[3])
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
    if peer == "fully_shard":
        return is_installed("zerocore")
    return peer != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def wrap_model(
    system: System,
    model: nn.Module,
    blocks: nn.ModuleList,
    bucket_mb: float | None = None,
    recipe: Recipe = FP32,
    mesh: Any = None,
) -> nn.Module:
    """Wraps `model` for any system but DeepSpeed; `bucket_mb`: MiB of DDP's buckets.

    zerocore and FSDP2 shard over `mesh`, by default all ranks. In bf16 gradients are
    reduced in fp32 everywhere.
    """
    if system.peer == "ddp":
        # DDP's faster setting: gradients in buckets save a copy.
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
    if system.peer == "fsdp2":
        apply_fsdp2(
            model,
            blocks,
            reshard=system.near or system.stage == 3,
            mesh=mesh,
            dtype=recipe.compute_dtype,
            offload=system.offload,
        )
        if system.overlap:
            prefetch_in_order(model, blocks)
    elif system.peer == "fully_shard":
        import_zerocore()
        apply_fsdp2(
            model,
            blocks,
            reshard=system.near or True,
            mesh=mesh,
            dtype=recipe.compute_dtype,
            engine="zerocore.fsdp",
        )
    elif system.peer == "zerocore":
        units = None if system.finds_units else [*blocks]
        return _shard(system, model, units, recipe, mesh)
    return model


def _shard(
    system: System,
    model: nn.Module,
    units: list[nn.Module] | None,
    recipe: Recipe,
    mesh: Any,
) -> nn.Module:
    zerocore = import_zerocore()
    mixed = None
    if recipe.compute_dtype is not None:
        mixed = zerocore.MixedPrecision(recipe.compute_dtype, reduce_dtype=torch.float32)
    # Only options that are on: builds that are too old to have them are compared, too.
    options: dict[str, Any] = {}
    if system.near is not None:
        options["regather"] = system.near
    if system.reductions != 1:
        options["reductions_in_flight"] = system.reductions
    if system.static_graph:
        options["static_graph"] = True
    if system.registered:  # needs one communicator, with which memory is registered
        options |= {"registered": True, "overlap_reductions": False}
    if system.prefetch != 1:
        options["prefetch"] = system.prefetch
    if recipe.accumulate != 1:
        options["accumulate"] = "full"
    communication = {"communication": zerocore.Communication(**options)} if options else {}
    sharded: nn.Module = zerocore.shard(
        model,
        stage=system.stage,
        group=mesh,
        units=units,
        **communication,
        mixed_precision=mixed,
        offload=zerocore.Offload(states="cpu") if system.offload else None,
    )
    return sharded


def apply_fsdp2(
    model: nn.Module,
    blocks: nn.ModuleList,
    *,
    reshard: bool | int,
    mesh: Any = None,
    dtype: torch.dtype | None = None,
    engine: str = "torch.distributed.fsdp",
    offload: bool = False,
) -> None:
    """Shards each block and then the root in place, as FSDP2's manual advises.

    `engine` is FSDP2 itself or "zerocore.fsdp", which has its interface. With `reshard` the root
    keeps its default: it stays gathered after the forward, as the backward needs it at once. With
    `dtype` layers compute in it and gradients are reduced in fp32. With `offload` parameters,
    gradients and states are in host memory, which is pinned if there is a GPU.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    fully_shard = importlib.import_module(engine).fully_shard
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    last = None if reshard else False
    fully_shard(model, reshard_after_forward=last, **options)


def prefetch_in_order(model: Any, blocks: Any) -> None:
    """Lets FSDP2 gather one block ahead, forward and backward, as its manual advises.

    Without it, FSDP2 on CPU waits for each all-gather before it continues.
    """
    model._set_unshard_async_op(True)
    for earlier, later in itertools.pairwise([model, *blocks]):
        earlier.set_modules_to_forward_prefetch([later])
    for earlier, later in itertools.pairwise(blocks):
        later.set_modules_to_backward_prefetch([earlier])
