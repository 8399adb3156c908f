"""Parameter groups: weight decay for matrices, none for biases and norms."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups the trained parameters of ``model``, for any optimizer with ``weight_decay``.

    Parameters whose full shape has two or more dimensions (matrices, embeddings, convolutions)
    decay; biases, norms and other vectors do not. A tied parameter appears once.

    Returns:
        Two groups, the one with decay first, without an empty one; the same groups before and
        after ``shard``, at every stage.

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
