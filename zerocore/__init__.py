"""zerocore: shards training state over data-parallel ranks (ZeRO stages 0 to 3).

Names are imported at their first use.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerocore import emulation, fsdp, matrices, optim, planning, recovery, reporting, weights
    from zerocore.api import register_forward_method, reset, shard, unsharded
    from zerocore.checkpoint.checkpoints import Checkpoints
    from zerocore.checkpoint.safetensors.models import load_safetensors, save_safetensors
    from zerocore.emulation.backend import emulate
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
    "fsdp",
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

_PLACES = {
    "api": "register_forward_method reset shard unsharded",
    "checkpoint.checkpoints": "Checkpoints",
    "checkpoint.safetensors.models": "load_safetensors save_safetensors",
    "emulation.backend": "emulate",
    "model.as_ddp": "no_sync",
    "model.state": "is_sharded",
    "optim.clipping": "clip_grad_norm_",
    "optim.groups": "param_groups",
    "options.config": "Communication",
    "options.offload": "Offload",
    "options.parameter_mesh": "ParameterMesh",
    "options.precision": "MixedPrecision",
    "planning.plan": "plan",
    "planning.setting": "Machine Workload",
    "recovery.elastic": "run_elastic",
    "recovery.retrying": "retryable",
    "recovery.snapshots": "snapshot",
    "recovery.verification": "verify",
    "reporting.description": "describe",
    "reporting.memory_usage": "memory_usage",
    "reporting.metrics": "metrics",
    "reporting.recording": "trace",
    "reporting.report": "report",
    "state_dict": "full_optimizer_state_dict full_state_dict load_full_state_dict",
    "tensor.functions": "register_elementwise",
    "tensor.parameter": "ShardedParameter",
    "weights.buckets": "export",
    "weights.clones": "clone_sharded",
    "weights.parked": "parked",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}


@cache
def load_core() -> None:
    """Imports what any use of zerocore needs, torch among it."""
    import torch  # noqa: F401  # loads the libraries the extension links to

    import zerocore.extension  # noqa: F401  # an extension that does not fit is the first error
    from zerocore.common import late
    from zerocore.install import register

    register(
        {
            late.explain_forward: "zerocore.reporting.out_of_memory:explain_forward",
            late.explain_backward: "zerocore.reporting.out_of_memory:explain_backward",
            late.explain_step: "zerocore.reporting.out_of_memory:explain_step",
            late.check_budget: "zerocore.planning.changes:check_budget",
            late.make_emulated_group: "zerocore.emulation.backend:make_group",
        }
    )


def _is_command_line() -> bool:
    """Whether this process runs the command line, whose help needs no torch."""
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1 :] if "-m" in arguments else []
    return module[:1] == ["zerocore"] or Path(*sys.argv[:1]).name == "zerocore"


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'zerocore' has no attribute '{name}'")
        load_core()
        if name not in _MODULES:
            return import_module(f"zerocore.{name}")
        value = globals()[name] = getattr(import_module(f"zerocore.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _is_command_line():
    load_core()
