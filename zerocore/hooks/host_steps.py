"""Steps of torch's optimizers over shards on the host whose gradients a device keeps.

Such a step wants both in one memory, so it is shown the gradients that were sent to the host, and
the device's are back in their place when it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerocore._C import show_grad
from zerocore.hooks.optimizer_states import params_of
from zerocore.tensor import pending_host_updates
from zerocore.tensor.functions import Args, Kwargs
from zerocore.tensor.parameter import ShardedGrad, ShardedParameter

# The tensors that each optimizer sees in a step: the parameter, the device's gradient, the host's.
_Shown = list[tuple[ShardedParameter, Tensor, Tensor]]
_shown: WeakKeyDictionary[Optimizer, _Shown] = WeakKeyDictionary()


def with_host_gradients(
    optimizer: Optimizer, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shows the host's gradients to a step, and again where its closure goes backward."""
    _show_host_gradients(optimizer)
    own, *rest = args
    if rest and rest[0] is not None:
        return (own, _wrapped(rest[0], optimizer), *rest[1:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _wrapped(kwargs["closure"], optimizer)}
    return args, kwargs


def show_device_gradients(optimizer: Optimizer) -> None:
    """Puts the device's gradients back where nobody has set others."""
    with torch._C.DisableTorchFunctionSubclass():
        for param, grad, host in _shown.pop(optimizer, []):
            if param.grad is host:
                show_grad(param, grad)


def _show_host_gradients(optimizer: Optimizer) -> None:
    pending_host_updates.finish()
    shown = _shown.setdefault(optimizer, [])
    with torch._C.DisableTorchFunctionSubclass():
        for param in params_of(optimizer):
            grad = param.grad
            if grad is None or not isinstance(param, ShardedParameter) or not param.on_host:
                continue
            if grad.device != param.device:
                state: Any = param.state_ref()
                host = state.engine.arrived_gradient(param.unit, param.position)
                host = ShardedGrad.make(host, param.place, param.state_ref)
                show_grad(param, host)
                shown.append((param, grad, host))


def _wrapped(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    @wraps(closure)
    def run() -> Any:
        show_device_gradients(optimizer)
        result = closure()
        _show_host_gradients(optimizer)
        return result

    return run
