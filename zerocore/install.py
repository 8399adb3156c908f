"""All that zerocore changes in torch and in this process, and when."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import torch
import torch.distributed as dist

from zerocore._C import define_grad
from zerocore.checkpoint.dcp.patches import watch_imports
from zerocore.common import late
from zerocore.hooks import patches
from zerocore.hooks.patches import Patch
from zerocore.optim.clipping import over_meshes
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.shard import rebuild_shard

CLIPS = Patch("torch.nn.utils.clip_grad", "clip_grad_norm_", over_meshes)


def register(modules: Mapping[str, str]) -> None:
    """Called when ``zerocore`` is imported: torch loads shards and knows the emulated backend, and
    the core the ``modules`` of functions of other packages. Nothing of torch is replaced."""
    late.modules.update(modules)
    define_grad(ShardedParameter)
    torch.serialization.add_safe_globals([rebuild_shard])
    make = partial(late.call, "make_group")
    dist.Backend.register_backend("emulated", make, extended_api=True, devices=["cpu", "cuda"])


@cache
def hook_into_torch() -> None:
    """Called by the first ``shard`` or ``fully_shard``: applies all patches."""
    patches.install((CLIPS,))
    watch_imports()
