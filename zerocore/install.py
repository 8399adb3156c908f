"""All that zerocore changes in torch and in this process, and when."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from zerocore._C import define_grad
from zerocore.checkpoint.dcp.patches import watch_imports
from zerocore.common import late
from zerocore.common.late import LateFunction
from zerocore.hooks import patches
from zerocore.hooks.patches import Patch
from zerocore.optim.clipping import over_meshes
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.shard import rebuild_shard


def register(places: Mapping[LateFunction[Any], str]) -> None:
    """Called when ``zerocore`` is imported: torch loads shards and knows the emulated backend, and
    the core the ``places`` of functions of other packages. Nothing of torch is replaced."""
    late.register(places)
    define_grad(ShardedParameter)
    torch.serialization.add_safe_globals([rebuild_shard])
    dist.Backend.register_backend(
        "emulated", late.make_emulated_group, extended_api=True, devices=["cpu", "cuda"]
    )


@cache
def hook_into_torch() -> None:
    """Called by the first ``shard`` or ``fully_shard``: applies all patches."""
    clips = Patch("torch.nn.utils.clip_grad", "clip_grad_norm_", over_meshes)
    patches.install((clips,))
    watch_imports()
