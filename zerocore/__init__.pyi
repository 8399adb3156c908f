"""Public names and the modules that they are imported from, at their first use."""

from zerocore import emulation as emulation
from zerocore import fsdp as fsdp
from zerocore import matrices as matrices
from zerocore import optim as optim
from zerocore import planning as planning
from zerocore import recovery as recovery
from zerocore import reporting as reporting
from zerocore import weights as weights
from zerocore.api import register_forward_method as register_forward_method
from zerocore.api import reset as reset
from zerocore.api import shard as shard
from zerocore.api import unsharded as unsharded
from zerocore.checkpoint.checkpoints import Checkpoints as Checkpoints
from zerocore.checkpoint.safetensors.models import load_safetensors as load_safetensors
from zerocore.checkpoint.safetensors.models import save_safetensors as save_safetensors
from zerocore.emulation.backend import emulate as emulate
from zerocore.model.as_ddp import no_sync as no_sync
from zerocore.model.state import is_sharded as is_sharded
from zerocore.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from zerocore.optim.groups import param_groups as param_groups
from zerocore.options.config import Communication as Communication
from zerocore.options.offload import Offload as Offload
from zerocore.options.parameter_mesh import ParameterMesh as ParameterMesh
from zerocore.options.precision import MixedPrecision as MixedPrecision
from zerocore.planning.plan import plan as plan
from zerocore.planning.setting import Machine as Machine
from zerocore.planning.setting import Workload as Workload
from zerocore.recovery.elastic import run_elastic as run_elastic
from zerocore.recovery.retrying import retryable as retryable
from zerocore.recovery.snapshots import snapshot as snapshot
from zerocore.recovery.verification import verify as verify
from zerocore.reporting.description import describe as describe
from zerocore.reporting.memory_usage import memory_usage as memory_usage
from zerocore.reporting.metrics import metrics as metrics
from zerocore.reporting.recording import trace as trace
from zerocore.reporting.report import report as report
from zerocore.state_dict import full_optimizer_state_dict as full_optimizer_state_dict
from zerocore.state_dict import full_state_dict as full_state_dict
from zerocore.state_dict import load_full_state_dict as load_full_state_dict
from zerocore.tensor.functions import register_elementwise as register_elementwise
from zerocore.tensor.parameter import ShardedParameter as ShardedParameter
from zerocore.weights.buckets import export as export
from zerocore.weights.clones import clone_sharded as clone_sharded
from zerocore.weights.parked import parked as parked

__version__: str
__all__: list[str]

def load_core() -> None: ...
