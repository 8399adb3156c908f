"""All that importing zerocore changes in torch and in this process."""

from __future__ import annotations

from zerocore import emulated
from zerocore.checkpoint.dcp.patches import watch_imports
from zerocore.hooks.broadcasts import refuse_broadcasts
from zerocore.hooks.moves import watch_moves
from zerocore.hooks.optimizer_rules import watch_optimizers
from zerocore.hooks.optimizer_steps import watch_steps
from zerocore.hooks.registration import watch_modules
from zerocore.model.state import watch_forks
from zerocore.model.wrappers import refuse_parametrizations
from zerocore.tensor.initialisers import watch_initialisers
from zerocore.tensor.parameter import make_shards_known


def hook_into_torch() -> None:
    """Makes shards and the emulated backend known to torch, and watches what could hurt a shard.

    Called once, when ``zerocore`` is imported; backwards and pipelines are first watched when a
    model is sharded.
    """
    make_shards_known()
    watch_initialisers()
    watch_modules()
    watch_moves()
    watch_optimizers()
    watch_steps()
    watch_forks()
    refuse_parametrizations()
    refuse_broadcasts()
    watch_imports()
    emulated.register()
