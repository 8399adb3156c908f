"""Installs zerocore's changes in torch and in this process: at import, and at the first shard."""

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
    """Tells torch about shards and the emulated backend, and the core about functions in other
    ``modules``, when ``zerocore`` is imported. Replaces nothing in torch."""
    late.modules.update(modules)
    define_grad(ShardedParameter)
    torch.serialization.add_safe_globals([rebuild_shard])
    make = partial(late.call, "make_group")
    dist.Backend.register_backend("emulated", make, extended_api=True, devices=["cpu", "cuda"])


@cache
def hook_into_torch() -> None:
    """Applies all patches, in the first ``shard`` or ``fully_shard``."""
    patches.install((CLIPS,))
    watch_imports()
