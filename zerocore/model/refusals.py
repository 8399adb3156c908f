"""Refuses what would train wrong: kinds of parameters and modules, and wrappers of sharded models.

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
from zerocore.tensor.rows import local_part
from zerocore.tensor.wrapped import POST, PRE, gathers_itself, is_wrapped, wrapper_of


def check_kinds(model: nn.Module, world_size: int) -> None:
    """Raises ValueError for the first parameter or module that cannot be sharded, with its name."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"'{name}' of a lazy module has no shape yet: call the model once with a batch on "
                "each rank before zerocore.shard"
            )
    for name, param in model.named_parameters():
        if is_wrapped(local_part(param)):
            _check_wrapped(name, param, local_part(param))
        check_trained(name, param)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ValueError(
                f"'{name or type(module).__name__}' is a module of TorchScript, whose code holds "
                "its parameters: they cannot be sharded. Leave it as a plain nn.Module "
                "(torch.compile works), and script a plain copy of the trained model"
            )
        limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if limited and world_size > 1:
            raise ValueError(
                f"'{name}' is an {type(module).__name__} with max_norm={module.max_norm}: each "
                "rank would renormalise the rows that it looks up, and their weights would differ. "
                "Set max_norm=None and renormalise inside of `with zerocore.unsharded(model, "
                "write_back=True):`"
            )


def check_trained(name: str, param: nn.Parameter) -> None:
    """Raises ValueError if it requires grad in a dtype whose gradients kernels do not sum."""
    if param.requires_grad and param.dtype not in (*CAST_DTYPES, torch.float64):
        raise ValueError(
            f"parameter '{name}' of dtype {param.dtype} requires grad; only parameters of "
            "float32, bfloat16, float16 and float64 can be trained. Call requires_grad_(False) on "
            "it, train it in one of these, or, if it is complex, train torch.view_as_real of it"
        )


def _check_wrapped(name: str, param: nn.Parameter, local: Tensor) -> None:
    kind = type(local).__name__
    if not gathers_itself(name, local):
        raise ValueError(
            f"parameter '{name}' is a {kind}, which has no memory of its own and does not say how "
            f"it is gathered: it lacks {PRE} and {POST}. Call zerocore.shard without quantized "
            "tensor classes on the model, or with one that has them"
        )
    if param.requires_grad and wrapper_of(local) is None:
        raise ValueError(
            f"parameter '{name}' is a {kind} of several tensors and requires grad; zerocore.shard "
            "trains tensors around one of their own shape and dtype. Freeze it, or use "
            "zerocore.fsdp"
        )


# By name, so that none of them must be imported; those of other packages go by the same names.
_WRAPPERS = {
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
}


def wrapper_name(module: nn.Module) -> str | None:
    """The wrapper's name if ``module`` is one, else None."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((name for name in names if name in _WRAPPERS), None)


def refusal(wrapper: str, model: str) -> TypeError:
    """The error where ``wrapper`` is put around a sharded ``model`` (the name of its class)."""
    return TypeError(
        f"{wrapper} around a sharded {model}: zerocore averages its gradients over the ranks "
        f"already, and {wrapper} would mix up the ranks' shards. Leave {wrapper} out and call the "
        "sharded model itself; where a trainer puts it around models, use zerocore.integrations "
        "(transformers, accelerate, lightning)"
    )


def elsewhere(param: ShardedParameter, name: str, owner: str) -> ValueError:
    """The error where a shard becomes parameter ``name`` of a module that does not gather it."""
    return ValueError(
        f"parameter '{param.fqn}' is sharded and cannot be registered as '{name}' of a {owner}, "
        "which would see this rank's shard only. Tie weights and register parametrizations before "
        "zerocore.shard"
    )


class _Registry(OrderedDict[str, Any]):
    """Where torch notes which of fully_shard and its kind were applied to a module."""

    model = "model"

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise refusal("fully_shard", self.model)
        return super().__contains__(name)


def refuse_fully_shard(module: nn.Module) -> None:
    """From now on FSDP2 refuses ``module``, before it does anything to it."""
    registry = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
    registry.model = type(module).__name__
    module.__dict__[REGISTRY_KEY] = registry


@around
def takes_no_sharded(validate: Any, module: Any, name: str, *args: Any) -> None:
    """FSDP2's check of a module that refuses one that holds sharded ones."""
    for each in module if isinstance(module, list | tuple) else [module]:
        if any(isinstance(param, ShardedParameter) for param in each.parameters()):
            raise refusal(name, type(each).__name__)
    validate(module, name, *args)


@around
def wraps_no_shards(init: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``FullyShardedDataParallel.__init__`` that refuses shards before its first collective."""
    if any(isinstance(param, ShardedParameter) for param in module.parameters()):
        raise refusal("FullyShardedDataParallel", type(module).__name__)
    init(self, module, *args, **kwargs)


@around
def takes_no_shard(
    init: Any, self: Any, modules: Any, original: Any, *args: Any, **kwargs: Any
) -> None:
    """``ParametrizationList.__init__`` that refuses a shard before it computes with it."""
    if isinstance(original, ShardedParameter):
        raise elsewhere(original, "original", "ParametrizationList")
    init(self, modules, original, *args, **kwargs)
