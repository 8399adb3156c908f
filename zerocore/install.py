"""All that zerocore changes in torch and in this process, and when."""

from __future__ import annotations

from functools import cache

import torch

from zerocore._C import define_grad
from zerocore.checkpoint.dcp.patches import watch_imports
from zerocore.emulation import backend
from zerocore.hooks import patches
from zerocore.hooks.patches import Patch
from zerocore.optim.clipping import over_meshes
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.shard import rebuild_shard


def register() -> None:
    """Called when ``zerocore`` is imported: torch loads shards and knows the emulated backend.

    Nothing of torch is replaced.
    """
    define_grad(ShardedParameter)
    torch.serialization.add_safe_globals([rebuild_shard])
    backend.register()


@cache
def hook_into_torch() -> None:
    """Called by the first ``shard`` or ``fully_shard``: applies all patches."""
    clips = Patch("torch.nn.utils.clip_grad", "clip_grad_norm_", over_meshes)
    patches.install((clips,))
    watch_imports()
