"""Tiny random-weight Hugging Face models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo_case import Batch, Case

VOCABULARY = 61  # a prime: no dimension is a multiple of a world size
LENGTH = 7

PRELOAD = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("gpt2", "qwen3", "llama", "mixtral", "t5", "bert", "vit")
)

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _build(model: str, config: str, **settings: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    built: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**settings, attn_implementation="sdpa")
    )
    return built.train()


def _tokens(generator: torch.Generator, num_samples: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (num_samples, LENGTH), generator=generator)


def _language(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    tokens = _tokens(generator, num_samples)
    return {"input_ids": tokens, "labels": tokens}


def _skewed_language(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    # Each rank repeats its own token, so that its tokens go to few experts.
    tokens = torch.full((num_samples, LENGTH), 3 + 7 * rank)
    return {"input_ids": tokens, "labels": _tokens(generator, num_samples)}


def _translation(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    batch = _padded(generator, rank, num_samples)
    return {**batch, "labels": _tokens(generator, num_samples)}


def _padded(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    tokens = _tokens(generator, num_samples)
    lengths = torch.randint(2, LENGTH + 1, (num_samples, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _images(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    pixels = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 3, (num_samples,), generator=generator),
    }


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _case(name: str, build: Callable[[], nn.Module], make_batch: Any = _language) -> Case:
    return Case(f"hf_{name}", build, make_batch, _loss)


CASES = (
    _case(
        "gpt2_tied",
        partial(
            _build,
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    ),
    *(
        _case(
            f"qwen3_{'tied' if tied else 'untied'}",
            partial(
                _build,
                "Qwen3ForCausalLM",
                "Qwen3Config",
                **DECODER,
                head_dim=8,
                tie_word_embeddings=tied,
            ),
        )
        for tied in (True, False)
    ),
    _case("llama", partial(_build, "LlamaForCausalLM", "LlamaConfig", **DECODER)),
    _case(
        "mixtral",
        partial(_build, "MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
        _skewed_language,
    ),
    _case(
        "t5",
        partial(
            _build,
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=20,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        _translation,
    ),
    _case(
        "bert",
        partial(_build, "BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, **ENCODER),
        _padded,
    ),
    _case(
        "vit",
        partial(
            _build,
            "ViTForImageClassification",
            "ViTConfig",
            **ENCODER,
            image_size=8,
            patch_size=4,
            num_labels=3,
        ),
        _images,
    ),
)
