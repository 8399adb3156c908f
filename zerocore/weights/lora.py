"""Adapters of PEFT's LoRA, merged into the weights that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PREFIX, BASE = "base_model.model.", ".base_layer"


@dataclass(frozen=True)
class Adapter:
    """One adapter of a weight: ``weight + scaling * B @ A``."""

    first: int  # the matrix A: the id of the parameter, or its place in a unit
    second: int  # the matrix B
    scaling: float
    transposed: bool  # the weight has its inputs first, as that of GPT-2's Conv1D

    def add_to(self, weight: Tensor, first: Tensor, second: Tensor) -> None:
        """Adds the product of the full matrices to ``weight``, in place, rounded as PEFT does."""
        dtype = second.dtype
        if first.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
            first, second = first.float(), second.float()
        delta = second @ first
        weight += ((delta.T if self.transposed else delta) * self.scaling).to(dtype)


def find_adapters(model: nn.Module) -> tuple[dict[int, list[Adapter]], set[int]]:
    """Active adapters by the id of the weight that they belong to, and ids of all that adapters
    have, which a merged model does not; raises ValueError for no LoRA layer, or one of a kind that
    is not merged here."""
    adapters: dict[int, list[Adapter]] = {}
    own: set[int] = set()
    for name, module in model.named_modules():
        layer: Any = module
        if not hasattr(module, "get_base_layer"):
            continue
        base = layer.get_base_layer()
        _check(name, layer, base)
        own |= {id(each) for each in module.parameters()} - {id(p) for p in base.parameters()}
        for key in layer.active_adapters:
            if key in layer.lora_A:
                pair = id(layer.lora_A[key].weight), id(layer.lora_B[key].weight)
                transposed = bool(getattr(layer, "fan_in_fan_out", False))
                found = Adapter(*pair, float(layer.scaling[key]), transposed)
                adapters.setdefault(id(base.weight), []).append(found)
    if not adapters:
        raise ValueError('merge="lora": the model has no active LoRA adapter, as PEFT makes them')
    return adapters, own


def saved_modules(model: nn.Module) -> dict[str, str]:
    """By the prefix of each module that PEFT trains as a copy (``modules_to_save``) that of the
    copy which a merged model has, or of the original one if no copy is active."""
    found = {}
    for name, module in model.named_modules():
        wrapper: Any = module
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            prefix = f"{name.replace('_checkpoint_wrapped_module.', '')}."
            active = [f"modules_to_save.{key}." for key in wrapper.active_adapters]
            found[prefix] = prefix + (active[0] if active else "original_module.")
    return found


def _check(name: str, layer: Any, base: nn.Module) -> None:
    if not hasattr(layer, "lora_A"):
        raise ValueError(
            f"merge=\"lora\": '{name}' is a {type(layer).__name__}, which is no LoRA layer and is "
            "not merged (as trainable_token_indices). Export the adapters apart, without merge="
        )
    has_bias = any(getattr(each, "bias", None) is not None for each in layer.lora_B.values())
    is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    if not is_linear or has_bias or getattr(layer, "lora_variant", {}) or layer.merged:
        raise ValueError(
            f"merge=\"lora\": '{name}' is a {type(layer).__name__} around a {type(base).__name__} "
            "that is merged already, or more than scaling * B @ A of a linear layer. Export the "
            "adapters apart, without merge="
        )
