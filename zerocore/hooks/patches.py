"""All patches and hooks that the first ``shard`` or ``fully_shard`` installs in the process.

A patch of a module that few programs import waits until a program imports it. Only then is the
module of zerocore with the wrapper imported, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import init
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils._device import _device_constructors

from zerocore._C import ask_before_typed, replace_in_modules
from zerocore.common import alarm, groups
from zerocore.hooks import (
    backwards,
    collectives,
    module_moves,
    optimizer_rules,
    optimizer_steps,
    registration,
)
from zerocore.model import refusals, state, unit_call
from zerocore.tensor import conversions, rows, rules
from zerocore.tensor.parameter import ShardedGrad, ShardedParameter, UnreducedGrad, note_kind
from zerocore.tensor.shard import LocalShard


class Patch(NamedTuple):
    """An attribute of torch to replace."""

    owner: str  # dotted path of its module or class
    name: str  # the attribute
    wrap: Callable[[Any], Any] | str  # makes the new value from the old one; or its dotted path
    before: str | None = None  # the first release of torch that lacks the name, or needs no patch
    when: str | None = None  # a module: the patch waits until it is imported
    is_needed: bool = True  # if torch lacks the name, shards would get wrong values


_STAGES = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_COMM_MODE = "torch.distributed.tensor.debug._comm_mode"
_HUB = "transformers.modeling_utils"
_PEFT = "peft.peft_model"
_INITIALISERS = [name for name in dir(init) if name.endswith("_") and not name.startswith("_")]
_ELEMENTWISE = [cls.__name__ for cls in optimizer_rules.ELEMENTWISE]

PATCHES = (
    *(Patch("torch.nn.init", name, rules.initialises_shards) for name in _INITIALISERS),
    Patch("torch.nn.Module", "_apply", module_moves.leaves_shards_in_place),
    Patch("torch.nn.Module", "compile", unit_call.compiles_inside),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        "_validate_module",
        refusals.takes_no_sharded,
    ),
    Patch("torch.distributed.fsdp.FullyShardedDataParallel", "__init__", refusals.wraps_no_shards),
    Patch("torch.nn.utils.parametrize.ParametrizationList", "__init__", refusals.takes_no_shard),
    Patch("torch.distributed.tensor.DTensor", "data", rows.counts_writes),
    Patch("torch.optim.Optimizer", "add_param_group", optimizer_rules.checks_shards),
    *(Patch(f"torch.optim.{name}", "step", optimizer_rules.without_rules) for name in _ELEMENTWISE),
    *(Patch(*place, conversions.converts_in_full) for place in conversions.CONVERSIONS),
    *(Patch(*place, conversions.transforms_full_values) for place in conversions.TRANSFORMS),
    Patch("torch.jit.ScriptFunction", "__call__", conversions.asks_in_full),
    Patch("torch.nested", "nested_tensor", conversions.asks_in_full),
    Patch("torch.Tensor", "as_subclass", conversions.keeps_class),
    Patch("torch.Tensor", "_make_subclass", conversions.subclasses_in_full),
    Patch("torch.Tensor", "data", conversions.takes_full_data),
    Patch("torch.Tensor", "__new__", conversions.constructs_in_full),
    Patch("torch.autograd.Variable", "__new__", conversions.constructs_in_full),
    Patch("torch.autograd", "backward", backwards.notes_backward),
    Patch("torch.autograd", "grad", backwards.notes_backward),
    Patch("torch.autograd.function._SingleLevelFunction", "apply", backwards.reads_in_full),
    Patch("torch.distributed", "barrier", alarm.watched_barrier),
    Patch("torch.distributed.distributed_c10d", "_process_group_name", groups.named_by_thread),
    Patch("torch.distributed", "_broadcast_coalesced", collectives.sends_no_shards),
    *(
        Patch("torch.distributed", name, collectives.asks_shards, before="2.13")
        for name in collectives.UNASKED
    ),
    *(
        Patch(_STAGES, name, f"zerocore.hooks.pipelines.{function}", when=_STAGES)
        for name, function in (
            ("stage_backward_input", "for_full_weights"),
            ("stage_backward_weight", "adds_to_full_weights"),
        )
    ),
    Patch(
        f"{_STAGES}._PipelineStageBase",
        "perform_reduce_grad",
        "zerocore.hooks.pipelines.reduces_deferred",
        when=_STAGES,
    ),
    Patch(
        f"{_SCHEDULES}.PipelineScheduleMulti",
        "step",
        "zerocore.hooks.pipelines.reduces_at_the_end",
        when=_SCHEDULES,
    ),
    *(
        Patch(f"{_COMM_MODE}.CommDebugMode", name, wrapper, when=_COMM_MODE, is_needed=False)
        for name, wrapper in (
            ("__enter__", "zerocore.hooks.comm_counts.begins_to_count"),
            ("__exit__", "zerocore.hooks.comm_counts.counts_issued"),
        )
    ),
    *(
        Patch(owner, name, f"zerocore.hooks.hub_saves.{wrap}", when=when, is_needed=False)
        for owner, name, wrap, when in (
            (f"{_HUB}.PreTrainedModel", "save_pretrained", "saves_full_values", _HUB),
            (_PEFT, "get_peft_model_state_dict", "returns_full_values", _PEFT),
        )
    ),
)


def find_targets(patches: Sequence[Patch]) -> list[tuple[Patch, Any, Any]]:
    """Returns the patches that this torch needs, each with the owner and the attribute to replace.
    Raises RuntimeError if torch lacks one: without the patch, a shard would get wrong values."""
    targets = []
    for patch in patches:
        if patch.before is not None and torch.__version__ >= patch.before:
            continue
        try:
            owner = resolve_name(patch.owner)
            targets.append((patch, owner, getattr(owner, patch.name)))
        except (AttributeError, ImportError) as error:
            if not patch.is_needed:
                continue
            raise RuntimeError(
                f"torch {torch.__version__} lacks {patch.owner}.{patch.name}, which zerocore "
                "replaces. Use torch 2.11 to 2.15, or a zerocore that knows this release"
            ) from error
    return targets


def _apply(targets: Sequence[tuple[Patch, Any, Any]]) -> None:
    functions: list[tuple[Any, Any]] = []  # old and new
    for patch, owner, old in targets:
        wrap: Any = resolve_name(patch.wrap) if isinstance(patch.wrap, str) else patch.wrap
        new = wrap(old)
        setattr(owner, patch.name, new)
        if patch.when is None and isinstance(owner, ModuleType):
            functions.append((old, new))
    replace_in_modules(functions)  # in modules that imported the old ones


class _AfterImport(MetaPathFinder):
    """An import hook that applies patches when the modules that they wait for are imported."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._waiting: dict[str, list[Patch]] = {}
        for patch in patches:
            self._waiting.setdefault(patch.when or "", []).append(patch)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in self._waiting else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _apply(find_targets(self._waiting.pop(fullname, ())))

        loader.exec_module = exec_module
        return spec


@cache
def install(more: tuple[Patch, ...]) -> None:
    """Applies the patches and ``more`` of higher packages, and registers hooks with torch, once per
    process. Raises RuntimeError, and changes nothing, if torch lacks an attribute to replace."""
    # Torch caches the functions that `with torch.device(...)` and the default device apply to.
    # Fill the cache with the original functions, because the replacements call these.
    _device_constructors()
    patches = (*PATCHES, *more)
    due = [patch for patch in patches if patch.when is None or patch.when in sys.modules]
    _apply(find_targets(due))
    sys.meta_path.insert(0, _AfterImport(patch for patch in patches if patch not in due))
    ask_before_typed(torch._tensor_classes, conversions.typed_in_full)
    torch_modules.register_module_parameter_registration_hook(registration.check_param)
    torch_modules.register_module_module_registration_hook(registration.check_module)
    torch_modules.register_module_buffer_registration_hook(registration.take_buffer)
    torch_optimizers.register_optimizer_step_pre_hook(optimizer_steps.before_step)
    torch_optimizers.register_optimizer_step_post_hook(optimizer_steps.after_step)
    for kind in (ShardedParameter, ShardedGrad, UnreducedGrad, LocalShard):
        note_kind(kind)
    os.register_at_fork(after_in_child=state.mark_forked)
