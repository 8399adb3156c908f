"""Installs zerocore's changes in torch and in this process: at import, and at the first shard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import torch
import torch.distributed as dist

from zerocore._C import define_grad
from zerocore.common import late
from zerocore.hooks import patches
from zerocore.hooks.patches import Patch
from zerocore.optim.clipping import over_meshes
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.shard import rebuild_shard

# Rows: a module of torch.distributed.checkpoint, an attribute below torch.distributed to replace on
# its import, and the wrapper. If a torch lacks one, the shards' rules reject the operation.
_CHECKPOINTS = (
    ("staging", "_state_dict_utils._create_cpu_state_dict", "copies"),
    ("staging", "checkpoint.staging._create_cpu_state_dict", "copies"),
    (
        "_state_dict_stager",
        "checkpoint._state_dict_stager.StateDictStager._offload_tensor",
        "stages",
    ),
    ("state_dict", "checkpoint.state_dict._gather_state_dict", "gathers"),
    ("state_dict", "checkpoint.state_dict._init_optim_state", "makes_states"),
    ("default_planner", "checkpoint.default_planner.create_default_local_load_plan", "plans"),
    ("hf_storage", "checkpoint.hf_storage.HuggingFaceStorageWriter.write_data", "refuses"),
)
MORE_PATCHES = (
    Patch("torch.nn.utils.clip_grad", "clip_grad_norm_", over_meshes),
    *(
        Patch(
            f"torch.distributed.{path}".rpartition(".")[0],
            path.rpartition(".")[2],
            f"zerocore.checkpoint.dcp.patches.{wrapper}",
            when=f"torch.distributed.checkpoint.{module}",
            is_needed=False,
        )
        for module, path, wrapper in _CHECKPOINTS
    ),
)


def register(modules: Mapping[str, str]) -> None:
    """Registers shards and the emulated backend with torch, and functions of other ``modules`` with
    the core. Runs when ``zerocore`` is imported, and replaces nothing in torch."""
    late.modules.update(modules)
    define_grad(ShardedParameter)
    torch.serialization.add_safe_globals([rebuild_shard])
    make = partial(late.call, "make_group")
    dist.Backend.register_backend("emulated", make, extended_api=True, devices=["cpu", "cuda"])


@cache
def hook_into_torch() -> None:
    """Applies all patches, in the first ``shard`` or ``fully_shard``."""
    patches.install(MORE_PATCHES)
