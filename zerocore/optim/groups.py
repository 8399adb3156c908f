"""Parameter groups: weight decay for matrices, none for biases and norms."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trained parameters of ``model``, for any optimizer that knows ``weight_decay``.

    Those of two or more dimensions (matrices, embeddings, convolutions) decay, by their full shape;
    biases, norms and other vectors do not. Tied parameters come once.

    Returns:
        Two groups, the one with decay first; the same ones before and after ``shard``, at every
        stage. One that would be empty is left out.

    Raises:
        ValueError: the model has no parameters that require grad.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameters that require grad")
    groups = [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": weight_decay},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
