"""Merges adapters of PEFT's LoRA into their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PREFIX, BASE = "base_model.model.", ".base_layer"


@dataclass(frozen=True)
class Adapter:
    """One adapter of a weight: ``weight + scaling * B @ A``."""

    first: int  # the matrix A: the parameter's id, or its position in a unit
    second: int  # the matrix B
    scaling: float
    transposed: bool  # the weight's first dimension is the input, as in GPT-2's Conv1D

    def add_to(self, weight: Tensor, first: Tensor, second: Tensor) -> None:
        """Adds the product of the full matrices to ``weight``, in place, rounded as PEFT does."""
        dtype = second.dtype
        if first.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
            first, second = first.float(), second.float()
        delta = second @ first
        weight += ((delta.T if self.transposed else delta) * self.scaling).to(dtype)


def find_adapters(model: nn.Module) -> tuple[dict[int, list[Adapter]], set[int]]:
    """Returns active adapters by their weight's id, and ids of all adapters' parameters, which a
    merged model lacks. Raises ValueError without a LoRA layer, or for an unsupported kind."""
    adapters: dict[int, list[Adapter]] = {}
    inner: set[int] = set()
    for name, module in model.named_modules():
        layer: Any = module
        if not hasattr(module, "get_base_layer"):
            continue
        base = layer.get_base_layer()
        _check(name, layer, base)
        inner |= {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}
        for key in layer.active_adapters:
            if key in layer.lora_A:
                pair = id(layer.lora_A[key].weight), id(layer.lora_B[key].weight)
                transposed = bool(getattr(layer, "fan_in_fan_out", False))
                adapter = Adapter(*pair, float(layer.scaling[key]), transposed)
                adapters.setdefault(id(base.weight), []).append(adapter)
    if not adapters:
        raise ValueError('merge="lora": the model has no active LoRA adapter of PEFT')
    return adapters, inner


def saved_modules(model: nn.Module) -> dict[str, str]:
    """Returns the prefixes of modules that PEFT trains as copies (``modules_to_save``). Each maps
    to the prefix of its active copy; without one, to the original's."""
    prefixes = {}
    for name, module in model.named_modules():
        wrapper: Any = module
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            prefix = f"{name.replace('_checkpoint_wrapped_module.', '')}."
            active = [f"modules_to_save.{key}." for key in wrapper.active_adapters]
            prefixes[prefix] = prefix + (active[0] if active else "original_module.")
    return prefixes


def _check(name: str, layer: Any, base: nn.Module) -> None:
    if not hasattr(layer, "lora_A"):
        raise ValueError(
            f"merge=\"lora\": '{name}' is a {type(layer).__name__}, which is not a LoRA layer and "
            "cannot be merged (as trainable_token_indices). Export the adapters apart, without "
            "merge="
        )
    has_bias = any(getattr(matrix, "bias", None) is not None for matrix in layer.lora_B.values())
    is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    if not is_linear or has_bias or getattr(layer, "lora_variant", {}) or layer.merged:
        raise ValueError(
            f"merge=\"lora\": '{name}' is a {type(layer).__name__} around a {type(base).__name__} "
            "that is merged already, or more than scaling * B @ A of a linear layer. Export the "
            "adapters apart, without merge="
        )
