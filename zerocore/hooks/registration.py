"""Rejects parameters that are added to a sharded model: their gradients would not be averaged.

Also checks what a state dict loads into shards: this rank's shards, or full values.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zerocore.common import late
from zerocore.common.agreement import together
from zerocore.common.alarm import operation
from zerocore.model.refusals import elsewhere, refusal, refuse_fully_shard, wrapper_name
from zerocore.model.state import ShardState, find_state, live_states
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed


def watch_registrations(model: nn.Module, state: ShardState) -> None:
    """Makes ``model`` reject new parameters, and wrappers such as DDP, from now on."""
    _adopt(model, state, "")
    for module in model.modules():
        refuse_fully_shard(module)
        vars(module)["__deepcopy__"] = partial(_copy, ref(module))


def _copy(module_ref: ref[nn.Module], memo: dict[Any, Any]) -> Any:
    return late.call("copy_module", module_ref(), memo)


def _adopt(module: nn.Module, state: ShardState, prefix: str) -> None:
    for name, inner in module.named_modules(prefix=prefix):
        state.modules[inner] = name


def _home_of(module: nn.Module) -> tuple[ShardState, str] | None:
    """Returns the state of the model that has the module, and the module's name there."""
    homes = ((state, state.modules.get(module)) for state in live_states())
    return next(((state, name) for state, name in homes if name is not None), None)


def check_param(module: nn.Module, name: str, param: Any) -> None:
    """Checks each registration of a parameter in the process (a torch hook)."""
    home = _home_of(module)
    if home is None and isinstance(param, ShardedParameter):
        raise elsewhere(param, name, type(module).__name__)
    if home is None or param is None:
        return
    state, prefix = home
    fqn = f"{prefix}.{name}" if prefix else name
    if _renames(state, module, name, fqn, param):
        return
    for known in state.params():
        if any(owner is module and key == name for owner, key in known.owners):
            if param is not known.object:
                raise ValueError(
                    f"parameter '{fqn}' is sharded and cannot be replaced by another "
                    f"{type(param).__name__}. Change its values in place inside `with "
                    "zerocore.unsharded(model, write_back=True):`, or replace it before "
                    "zerocore.shard"
                )
            return
    # weight_norm, spectral_norm and pruning replace a parameter by ones with these names.
    parts = tuple(f"{fqn}_{part}" for part in ("g", "v", "orig"))
    parts += (fqn.removesuffix(name) + f"parametrizations.{name}.",)
    if any(known.fqn.startswith(parts) for known in state.params()):
        raise ValueError(
            f"the parametrization of '{fqn}' cannot be removed: the model is sharded. "
            "Remove it before zerocore.shard; to export, load zerocore.full_state_dict(model) into "
            "a plain copy of the model and remove it there"
        )
    raise _refusal(fqn)


def _renames(state: ShardState, module: nn.Module, name: str, fqn: str, param: Any) -> bool:
    """Renames a parameter that its module registers again under another name, as pruning does.
    Returns whether it was renamed."""
    known = next((each for each in state.params() if each.object is param), None)
    owners = [] if known is None else [owner for owner, _ in known.owners]
    if known is None or module not in owners or (module, name) in known.owners:
        return False
    known.fqns[owners.index(module)] = fqn
    known.owners[owners.index(module)] = (module, name)
    return True


def take_buffer(module: nn.Module, name: str, buffer: Any) -> Any:
    """Makes a shard that a sharded model registers as a buffer a full tensor (a torch hook)."""
    is_shard = isinstance(buffer, Placed) and _home_of(module) is not None
    return buffer.full_tensor() if is_shard else None


def check_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checks each registration of a module in the process (a torch hook)."""
    home = _home_of(module)
    if child is None or not live_states():
        return
    if (wrapper := wrapper_name(module)) is not None and find_state(child) is not None:
        raise refusal(wrapper, type(child).__name__)
    if home is None:
        return
    state, prefix = home
    path = f"{prefix}.{name}" if prefix else name
    ours = {id(param.object) for param in state.params()}
    for fqn, param in child.named_parameters(prefix=path):
        if id(param) not in ours:
            raise _refusal(fqn)
    _adopt(child, state, path)


def _refusal(fqn: str) -> ValueError:
    return ValueError(
        f"parameter '{fqn}' is added to a model that is sharded already: it would not be sharded, "
        "nor its gradient averaged over the ranks. Complete the model first (adapters too: "
        "peft.get_peft_model; weight_norm, spectral_norm), then call zerocore.shard on the "
        "outermost module"
    )


def watch_state_dicts(model: nn.Module, state: ShardState) -> None:
    """Checks values that are loaded into sharded parameters, and saves shards, even within a call,
    from now on. All ranks must load: if a value does not fit on one rank, all ranks raise."""

    @operation("load_state_dict")
    def check(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if recording.get():
            return
        with together(state.ranks.groups, state.device):
            for param in state.params():
                for fqn in param.fqns:
                    _check_place(prefix + fqn, state_dict.get(prefix + fqn), param.shard)
        state.finish_reads()

    model.register_load_state_dict_pre_hook(check)
    for module in {owner for param in state.params() for owner, _ in param.owners}:
        module.register_load_state_dict_pre_hook(_check)
    _watch_saves(model, state)


def _watch_saves(model: nn.Module, state: ShardState) -> None:
    saved: nn.Module | None = None  # the outermost one within a call

    def begin(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nonlocal saved
        if state.engine.in_call:  # modules show full parameters
            saved = module
            state.engine.set_hiding(True)

    def end(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        nonlocal saved
        if module is saved:
            saved = None
            state.engine.set_hiding(False)

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # has no state-dict hooks
            module.register_state_dict_pre_hook(begin)
            module.register_state_dict_post_hook(end)


recording = ContextVar("recording", default=False)  # within a load that only records values


def is_our_hook(hook: Any) -> bool:
    """Whether :func:`watch_state_dicts` has registered a loading hook."""
    return getattr(hook, "hook", hook).__module__ == __name__


def _check(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """Rejects shards of other elements, even of the same number. Makes ``assign=True`` copy: of a
    full value, it copies this rank's part."""
    assigns = metadata.pop("assign_to_params_buffers", False)
    for name, param in module._parameters.items():
        if isinstance(param, ShardedParameter):
            value = state_dict.get(prefix + name)
            _check_place(prefix + name, value, param)
            if assigns and isinstance(value, Tensor) and value.dtype != param.dtype:
                raise ValueError(
                    f"parameter '{prefix + name}': assign=True would make it {value.dtype}, but "
                    f"the sharded model keeps it as {param.dtype}; leave assign out, or cast the "
                    "values"
                )


def _check_place(key: str, value: Any, param: ShardedParameter) -> None:
    if not isinstance(value, Placed):
        return
    saved, place = value.place, param.place
    if not place.can_take(saved):
        raise ValueError(
            f"parameter '{key}': the state dict holds elements {saved.text}{saved.origin}, this "
            f"rank {place.text}. Shards load on the rank, stage and number of ranks that saved "
            "them; to load elsewhere, use torch.distributed.checkpoint or zerocore.Checkpoints, or "
            "zerocore.full_state_dict"
        )
