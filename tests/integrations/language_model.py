"""A small Qwen3 with random weights and tokens to train it on, alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64
# Hugging Face's Trainer: two micro-batches a step, clipping, evaluation and a checkpoint every
# second step.
TRAINER_OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-5,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}


def build_model() -> Any:
    """Two layers, tied embeddings, float32, always the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def samples(count: int, length: int = 12, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random token ids, which are their own labels."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCABULARY, (count, length), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]
