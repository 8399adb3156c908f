"""zerocore: shards training state over data-parallel ranks (ZeRO stages 0 to 3)."""

import torch  # noqa: F401  # loads the libraries the extension links to

import zerocore.extension  # noqa: F401  # an extension that does not fit is the first error
from zerocore import emulated, optim
from zerocore.api import register_forward_method, reset, shard, unsharded
from zerocore.checkpoint.checkpoints import Checkpoints, PendingSave
from zerocore.checkpoint.safetensors.models import load_safetensors, save_safetensors
from zerocore.common.events import Event
from zerocore.common.links import Link
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.emulated import Emulation, emulate
from zerocore.install import register
from zerocore.model.as_ddp import no_sync
from zerocore.model.config import Communication
from zerocore.model.offload import Offload
from zerocore.model.parts import ParameterMesh
from zerocore.model.precision import MixedPrecision
from zerocore.model.state import is_sharded
from zerocore.optim.clipping import NonFiniteGradError, clip_grad_norm_
from zerocore.optim.groups import param_groups
from zerocore.planning.plan import plan
from zerocore.planning.prediction import predict_events, predict_memory
from zerocore.planning.result import Plan, StagePlan
from zerocore.planning.setting import Machine, Workload
from zerocore.recovery.elastic import Life, run_elastic
from zerocore.recovery.peers import PeerCheckpoints
from zerocore.recovery.retrying import Attempt, retryable
from zerocore.recovery.snapshots import Snapshot, snapshot
from zerocore.recovery.verification import Difference, Verification, verify
from zerocore.reporting.description import Description, describe
from zerocore.reporting.memory_usage import memory_usage
from zerocore.reporting.metrics import metrics
from zerocore.reporting.out_of_memory import OutOfMemory, explain_out_of_memory
from zerocore.reporting.recording import record_events, trace
from zerocore.reporting.report import Report, report
from zerocore.reporting.timeline import Timeline
from zerocore.state_dict import full_optimizer_state_dict, full_state_dict, load_full_state_dict
from zerocore.tensor.functions import register_elementwise
from zerocore.tensor.parameter import ShardedGrad, ShardedParameter
from zerocore.tensor.place import Place
from zerocore.tensor.shard import LocalShard
from zerocore.weights.buckets import Bucket, Export, export
from zerocore.weights.clones import clone_sharded, copy_weights
from zerocore.weights.info import ExportInfo, export_info, fused
from zerocore.weights.parked import parked
from zerocore.weights.shards import Shard, shards

register()

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Bucket",
    "Checkpoints",
    "Communication",
    "Description",
    "Difference",
    "Emulation",
    "Event",
    "Export",
    "ExportInfo",
    "Life",
    "Link",
    "LocalShard",
    "Machine",
    "MemoryBytes",
    "MixedPrecision",
    "NonFiniteGradError",
    "Offload",
    "OutOfMemory",
    "ParameterMesh",
    "PeerCheckpoints",
    "PendingSave",
    "Place",
    "Plan",
    "Report",
    "Shard",
    "ShardedGrad",
    "ShardedParameter",
    "Snapshot",
    "StagePlan",
    "Timeline",
    "Verification",
    "Workload",
    "clip_grad_norm_",
    "clone_sharded",
    "copy_weights",
    "describe",
    "emulate",
    "emulated",
    "explain_out_of_memory",
    "export",
    "export_info",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fused",
    "is_sharded",
    "load_full_state_dict",
    "load_safetensors",
    "memory_usage",
    "metrics",
    "no_sync",
    "optim",
    "param_groups",
    "parked",
    "plan",
    "predict_events",
    "predict_memory",
    "record_events",
    "register_elementwise",
    "register_forward_method",
    "report",
    "reset",
    "retryable",
    "run_elastic",
    "save_safetensors",
    "shard",
    "shards",
    "snapshot",
    "trace",
    "unsharded",
    "verify",
]
