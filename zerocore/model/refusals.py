"""Rejects parameters, modules and wrappers that would train wrong.

Wrappers are DDP, DataParallel, FSDP, FSDP2, and parametrizations.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parameter import is_lazy

from zerocore.common.patching import around
from zerocore.options.precision import CAST_DTYPES
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import held_shard, local_part
from zerocore.tensor.wrapped import POST, PRE, gathers_itself, is_wrapped, wrapper_of


def check_kinds(model: nn.Module) -> None:
    """Rejects the first parameter or module that cannot be sharded, by name (ValueError)."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"'{name}' belongs to a lazy module and has no shape yet: call the model once with "
                "a batch on each rank before zerocore.shard"
            )
    for name, param in model.named_parameters():
        if is_wrapped(local_part(param)):
            _check_wrapped(name, param, local_part(param))
        check_trained(name, param)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ValueError(
                f"'{name or type(module).__name__}' is a TorchScript module: its compiled code "
                "holds its parameters, so they cannot be sharded. Leave it as a plain nn.Module "
                "(torch.compile works), and script a plain copy of the trained model"
            )


_OWN_DTYPES = (torch.float64, torch.complex64, torch.complex128)  # trained, and never cast


def check_trained(name: str, param: nn.Parameter) -> None:
    """Rejects a parameter that requires grad in a dtype that zerocore's kernels cannot sum."""
    if param.requires_grad and param.dtype not in (*CAST_DTYPES, *_OWN_DTYPES):
        raise ValueError(
            f"parameter '{name}' of dtype {param.dtype} requires grad; only parameters of "
            "float32, bfloat16, float16, float64, complex64 and complex128 can be trained. Call "
            "requires_grad_(False) on it, or train it in one of these dtypes"
        )


def _check_wrapped(name: str, param: nn.Parameter, local: Tensor) -> None:
    kind = type(local).__name__
    if not gathers_itself(name, local):
        raise ValueError(
            f"parameter '{name}' is a {kind}, a class around other tensors that does not say how "
            f"to gather it: it lacks {PRE} and {POST}. Use a (quantized) tensor class that has "
            "them, or plain tensors"
        )
    if param.requires_grad and wrapper_of(local) is None:
        raise ValueError(
            f"parameter '{name}' is a {kind} of several tensors and requires grad; zerocore.shard "
            "trains only classes around one tensor of their own shape and dtype. Freeze it, or use "
            "zerocore.fsdp"
        )


# By name, to import none of them; other packages use the same class names.
_WRAPPERS = {
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
}


def wrapper_name(module: nn.Module) -> str | None:
    """Returns the wrapper's name if ``module`` is one, else None."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((name for name in names if name in _WRAPPERS), None)


def refusal(wrapper: str, model: str) -> TypeError:
    """Returns the error for a ``wrapper`` around a sharded ``model`` (both are class names)."""
    return TypeError(
        f"{wrapper} around a sharded {model}: zerocore averages its gradients over the ranks "
        f"already, and {wrapper} would mix up the ranks' shards. Leave {wrapper} out and call the "
        "sharded model itself; if a trainer puts it around models, use zerocore.integrations "
        "(transformers, accelerate, lightning)"
    )


def elsewhere(param: ShardedParameter, name: str, owner: str) -> ValueError:
    """Returns the error for a shard that is registered in a module which does not unshard it."""
    return ValueError(
        f"parameter '{param.fqn}' is sharded and cannot be registered as '{name}' of a {owner}, "
        "for which zerocore does not gather it. Tie weights and register parametrizations before "
        "zerocore.shard"
    )


class _Registry(OrderedDict[str, Any]):
    """Torch's registry of a module (fully_shard and its like), which rejects ``fully_shard``."""

    model = "model"

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise refusal("fully_shard", self.model)
        return super().__contains__(name)


def refuse_fully_shard(module: nn.Module) -> None:
    """Makes FSDP2 reject ``module`` from now on, before it changes it."""
    registry = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
    registry.model = type(module).__name__
    module.__dict__[REGISTRY_KEY] = registry


@around
def takes_no_sharded(validate: Any, module: Any, name: str, *args: Any) -> None:
    """Wraps FSDP2's check of a module: rejects one that holds a sharded model."""
    for root in module if isinstance(module, list | tuple) else [module]:
        if any(held_shard(param) is not None for param in root.parameters()):
            raise refusal(name, type(root).__name__)
    validate(module, name, *args)


@around
def wraps_no_shards(init: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wraps ``FullyShardedDataParallel.__init__``: rejects shards before its first collective."""
    if any(held_shard(param) is not None for param in module.parameters()):
        raise refusal("FullyShardedDataParallel", type(module).__name__)
    init(self, module, *args, **kwargs)


@around
def takes_no_shard(
    init: Any, self: Any, modules: Any, original: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``ParametrizationList.__init__``: rejects a shard before it computes with it."""
    if (shard := held_shard(original)) is not None:
        raise elsewhere(shard, "original", "ParametrizationList")
    init(self, modules, original, *args, **kwargs)
