"""zerocore: shards training state over data-parallel ranks (ZeRO stages 0 to 3)."""

import torch  # noqa: F401  # loads the libraries the extension links to

import zerocore.extension  # noqa: F401  # an extension that does not fit is the first error
from zerocore import emulation, matrices, optim, planning, recovery, reporting, weights
from zerocore.api import register_forward_method, reset, shard, unsharded
from zerocore.checkpoint.checkpoints import Checkpoints
from zerocore.checkpoint.safetensors.models import load_safetensors, save_safetensors
from zerocore.emulation import emulate
from zerocore.install import register
from zerocore.model.as_ddp import no_sync
from zerocore.model.state import is_sharded
from zerocore.optim.clipping import clip_grad_norm_
from zerocore.optim.groups import param_groups
from zerocore.options.config import Communication
from zerocore.options.offload import Offload
from zerocore.options.parameter_mesh import ParameterMesh
from zerocore.options.precision import MixedPrecision
from zerocore.planning.plan import plan
from zerocore.planning.setting import Machine, Workload
from zerocore.recovery.elastic import run_elastic
from zerocore.recovery.retrying import retryable
from zerocore.recovery.snapshots import snapshot
from zerocore.recovery.verification import verify
from zerocore.reporting.description import describe
from zerocore.reporting.memory_usage import memory_usage
from zerocore.reporting.metrics import metrics
from zerocore.reporting.recording import trace
from zerocore.reporting.report import report
from zerocore.state_dict import full_optimizer_state_dict, full_state_dict, load_full_state_dict
from zerocore.tensor.functions import register_elementwise
from zerocore.tensor.parameter import ShardedParameter
from zerocore.weights.buckets import export
from zerocore.weights.clones import clone_sharded
from zerocore.weights.parked import parked

register()

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Communication",
    "Machine",
    "MixedPrecision",
    "Offload",
    "ParameterMesh",
    "ShardedParameter",
    "Workload",
    "clip_grad_norm_",
    "clone_sharded",
    "describe",
    "emulate",
    "emulation",
    "export",
    "full_optimizer_state_dict",
    "full_state_dict",
    "is_sharded",
    "load_full_state_dict",
    "load_safetensors",
    "matrices",
    "memory_usage",
    "metrics",
    "no_sync",
    "optim",
    "param_groups",
    "parked",
    "plan",
    "planning",
    "recovery",
    "register_elementwise",
    "register_forward_method",
    "report",
    "reporting",
    "reset",
    "retryable",
    "run_elastic",
    "save_safetensors",
    "shard",
    "snapshot",
    "trace",
    "unsharded",
    "verify",
    "weights",
]
