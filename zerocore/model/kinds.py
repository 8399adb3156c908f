"""Refuses kinds of parameters and modules that would train wrong when they are sharded."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def check_kinds(model: nn.Module, world_size: int) -> None:
    """Raises ValueError for the first parameter or module that cannot be sharded, with its name."""
    for name, param in model.named_parameters():
        if is_traceable_wrapper_subclass(param):
            raise ValueError(
                f"parameter '{name}' is a {type(param).__name__}, which has no memory of its own; "
                "zerocore shards plain tensors. Call zerocore.shard without tensor "
                "parallelism, fully_shard or quantized tensor classes on the model"
            )
        if param.requires_grad and not param.is_floating_point():
            raise ValueError(
                f"parameter '{name}' of dtype {param.dtype} requires grad; only floating-point "
                "parameters can be trained. Call requires_grad_(False) on it, or, if it is "
                "complex, train torch.view_as_real of it"
            )
    for name, module in model.named_modules():
        limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if limited and world_size > 1:
            raise ValueError(
                f"'{name}' is an {type(module).__name__} with max_norm={module.max_norm}: each "
                "rank would renormalise the rows that it looks up, and their weights would differ. "
                "Set max_norm=None and renormalise inside of `with zerocore.unsharded(model, "
                "write_back=True):`"
            )
