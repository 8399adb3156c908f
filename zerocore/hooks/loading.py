"""Finds which values a model's own loading hooks and overrides would copy, and loads nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.hooks.registration import is_our_hook, recording
from zerocore.tensor.functions import name_of
from zerocore.tensor.parameter import ShardedParameter

EXTRA_STATE = "_extra_state"
_NORM: Any = nn.modules.batchnorm._NormBase
_PLAIN = (nn.Module._load_from_state_dict, _NORM._load_from_state_dict)


def has_extra_state(model: nn.Module) -> bool:
    """Whether some module saves other values than tensors."""
    return any(type(m).set_extra_state is not nn.Module.set_extra_state for m in model.modules())


def has_own_loading(model: nn.Module) -> bool:
    """Whether some module changes a state dict while it loads it."""
    return any(
        type(module)._load_from_state_dict not in _PLAIN
        or any(not is_our_hook(hook) for hook in module._load_state_dict_pre_hooks.values())
        for module in model.modules()
    )


class _Recorder(Tensor):
    """A stand-in for a tensor of a module: it notes the value copied to it."""

    value: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if name_of(func) in ("copy_", "data="):
            args[0].value = args[1]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_loaded(model: nn.Module, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values that ``model.load_state_dict`` would copy, by their ``state_dict`` names.

    Without loading hooks, returns ``values``. Raises ValueError if they do not fit the model."""
    if not has_own_loading(model):
        return values
    rest = {key: value for key, value in values.items() if not key.endswith(EXTRA_STATE)}
    state_dict: Any = OrderedDict(rest)
    if hasattr(values, "_metadata"):
        state_dict._metadata = values._metadata
    with _recording(model):
        try:
            mismatch = model.load_state_dict(state_dict, strict=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        both = (_tensors_by_name(model), model.state_dict(keep_vars=True))
    loaded = {
        key: tensor.value
        for names in both
        for key, tensor in names.items()
        if isinstance(tensor, _Recorder) and hasattr(tensor, "value")
    }
    unexpected = {k: state_dict[k] for k in mismatch.unexpected_keys if k in state_dict}
    extra = {key: value for key, value in values.items() if key not in rest}
    return {**loaded, **unexpected, **extra}


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors whose names are in ``state_dict``, before its hooks replace any."""
    saved = model.state_dict().keys()
    return {
        key: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and (key := f"{prefix}.{name}" if prefix else name) in saved
    }


def changed_by_hooks(model: nn.Module) -> list[str]:
    """Returns the names in ``model.state_dict()`` whose tensor a state-dict hook has replaced."""
    saved = model.state_dict(keep_vars=True)
    return [key for key, tensor in _tensors_by_name(model).items() if saved[key] is not tensor]


@contextmanager
def _recording(model: nn.Module) -> Iterator[None]:
    """Shows recorders in place of all parameters and buffers."""
    token = recording.set(True)
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    recorders: dict[int, Any] = {}
    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                kept.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if isinstance(tensor, Tensor):
                        recorder = recorders.setdefault(id(tensor), _recorder(tensor))
                        dict.__setitem__(tensors, name, recorder)
        yield
    finally:
        recording.reset(token)
        for tensors, before in kept:
            for name, tensor in before.items():
                dict.__setitem__(tensors, name, tensor)


def _recorder(tensor: Tensor) -> Any:
    shape, dtype = tensor.shape, tensor.dtype
    if isinstance(tensor, ShardedParameter):
        shape, dtype = tensor.place.whole_shape, tensor.full.dtype
    # One element, expanded: takes no memory. Not on the meta device: torch would not copy to it.
    return torch.empty((), dtype=dtype, device="cpu").expand(shape).as_subclass(_Recorder)
