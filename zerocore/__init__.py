"""zerocore: shards training state over data-parallel ranks (ZeRO stages 0 to 3)."""

import torch  # noqa: F401  # loads the libraries the extension links to

import zerocore.extension  # noqa: F401  # an extension that does not fit is the first error
from zerocore import emulated, optim
from zerocore.api import no_sync, register_forward_method, reset, shard, unsharded
from zerocore.checkpoint.checkpoints import Checkpoints, PendingSave
from zerocore.checkpoint.safetensors_models import load_safetensors, save_safetensors
from zerocore.checkpoint.torch_seams import watch_imports
from zerocore.clipping import NonFiniteGradError, clip_grad_norm_
from zerocore.config import ShardConfig
from zerocore.description import Description, describe
from zerocore.emulated import Emulation, emulate
from zerocore.estimate import plan
from zerocore.events import Event
from zerocore.links import Link
from zerocore.memory import MemoryBytes, memory_usage, predict_events, predict_memory
from zerocore.out_of_memory import OutOfMemory, explain_out_of_memory
from zerocore.place import Place
from zerocore.plans import Plan, StagePlan
from zerocore.precision import MixedPrecision
from zerocore.recording import record_events, trace
from zerocore.reports import Report, report
from zerocore.state_dict import full_state_dict, load_full_state_dict
from zerocore.tensor import LocalShard, ShardedGrad, ShardedParameter
from zerocore.timeline import Timeline

emulated.register()
watch_imports()

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Description",
    "Emulation",
    "Event",
    "Link",
    "LocalShard",
    "MemoryBytes",
    "MixedPrecision",
    "NonFiniteGradError",
    "OutOfMemory",
    "PendingSave",
    "Place",
    "Plan",
    "Report",
    "ShardConfig",
    "ShardedGrad",
    "ShardedParameter",
    "StagePlan",
    "Timeline",
    "clip_grad_norm_",
    "describe",
    "emulate",
    "explain_out_of_memory",
    "full_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "memory_usage",
    "no_sync",
    "optim",
    "plan",
    "predict_events",
    "predict_memory",
    "record_events",
    "register_forward_method",
    "report",
    "reset",
    "save_safetensors",
    "shard",
    "trace",
    "unsharded",
]
