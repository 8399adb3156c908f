"""TRL's trainers over a sharded model, with their own defaults, do what they do over DDP."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocore
from tests.distributed.harness import run_ranks

pytest.importorskip("trl")
pytest.importorskip("accelerate")

STEPS = 3
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}
FIGURES = ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "reward", "entropy")


@cache
def lines() -> list[str]:
    """Of a module of Python's own, those that have some words."""
    words = (re.findall(r"[a-z]+", line) for line in Path(random.__file__).read_text().splitlines())
    return [" ".join(found[:6]) for found in words if len(found) > 3]


@cache
def vocabulary() -> dict[str, int]:
    """Of the words that come most often."""
    counts = Counter(word for line in lines() for word in line.split())
    words = ["<pad>", "<eos>", "<unk>", *(word for word, _ in counts.most_common(61))]
    return {word: index for index, word in enumerate(words)}


def tokenizer() -> Any:
    """One of whole words."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary(), "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def build_model(kind: str = "Qwen3ForCausalLM", **changes: Any) -> Any:
    """Two layers, float32, always the same weights; the head is apart from the embedding."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        **changes,
    )
    return getattr(transformers, kind)(config)


def rows(*columns: str) -> Any:
    """A data set whose columns are lines of text."""
    import datasets

    found = lines()[: 16 * len(columns)]
    parts = (found[index :: len(columns)] for index in range(len(columns)))
    return datasets.Dataset.from_dict(dict(zip(columns, parts, strict=True)))


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """A reward for GRPO: how many words a completion has."""
    return [float(len(set(text.split()))) for text in completions]


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make(kind: str, stage: int | None, folder: str) -> Any:
    """A trainer over DDP where there is no stage."""
    import trl

    from zerocore.integrations.transformers import ShardedTrainerMixin

    name, _, adapted = kind.partition("-")
    more: dict[str, Any] = {"processing_class": tokenizer()}
    args: dict[str, Any] = {"output_dir": folder}
    if name == "SFT":
        more["train_dataset"] = rows("text")
        model = build_model()
    elif name == "DPO":
        more["train_dataset"] = rows("prompt", "chosen", "rejected")
        more["ref_model"] = None if adapted else build_model()
        model = build_model()
    elif name == "Reward":
        more["train_dataset"] = rows("chosen", "rejected")
        model = build_model("Qwen3ForSequenceClassification", num_labels=1)
    else:
        more.update(train_dataset=rows("prompt"), reward_funcs=distinct_words)
        args.update(num_generations=2, max_completion_length=5)
        model = build_model()
    if adapted:
        more["peft_config"] = lora()
    arguments = getattr(trl, f"{name}Config")(**OPTIONS, **args)
    trainer: Any = getattr(trl, f"{name}Trainer")
    if stage is not None:
        trainer = type(trainer.__name__, (ShardedTrainerMixin, trainer), {})
        more["shard"] = {"stage": stage}
    return trainer(model=model, args=arguments, **more)


def figures(trainer: Any) -> list[dict[str, float]]:
    """The logged figures by step."""
    history = trainer.state.log_history
    return [{key: entry[key] for key in FIGURES if key in entry} for entry in history]


def train_alike(folder: str, kind: str, stages: tuple[int, ...]) -> None:
    ddp = make(kind, None, folder)
    ddp.train()
    expected, logged = ddp.model.state_dict(), figures(ddp)
    assert len(logged) > STEPS and len({entry.get("loss") for entry in logged}) > 2
    for stage in stages:
        print(kind, stage, flush=True)
        trainer = make(kind, stage, folder)
        trainer.train()
        torch.testing.assert_close(figures(trainer), logged, rtol=1e-4, atol=1e-5)
        values = zerocore.full_state_dict(trainer.model, rank0_only=False)
        torch.testing.assert_close(values, dict(expected), rtol=1e-4, atol=1e-5)


def train_all_alike(folder: str, stages: dict[str, tuple[int, ...]]) -> None:
    for kind, some in stages.items():
        train_alike(folder, kind, some)


FEW: dict[str, tuple[int, ...]] = {"SFT": (3,), "GRPO": (3,)}
MORE: dict[str, tuple[int, ...]] = {
    "SFT": (0, 1, 2),
    "DPO": (0, 3),
    "GRPO": (1,),
    "Reward": (2, 3),
    "SFT-lora": (0, 3),
}


@pytest.mark.parametrize("stages", [pytest.param(MORE, marks=pytest.mark.nightly), FEW])
def test_trainers_train_as_over_ddp(tmp_path: Path, stages: dict[str, tuple[int, ...]]) -> None:
    run_ranks(train_all_alike, 2, str(tmp_path), stages, launch="torchrun", timeout=300)


def generate_elsewhere(folder: str) -> None:
    import os
    import sys

    import trl

    from zerocore.integrations.transformers import ShardedTrainerMixin

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import grpo

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    dist.init_process_group()
    rollout = grpo.Rollout()
    columns = rows("prompt")
    kind: Any = type("Sharded", (ShardedTrainerMixin, trl.GRPOTrainer), {})
    args = trl.GRPOConfig(folder, **OPTIONS, num_generations=2, max_completion_length=grpo.LENGTH)
    trainer = kind(
        grpo.build_model(),
        distinct_words,
        args,
        train_dataset=columns.map(lambda row, at: {"prompt": str(at % 10)}, with_indices=True),
        processing_class=grpo.build_tokenizer(),
        rollout_func=rollout,
        shard={"stage": 3},
    )
    trainer.train()
    assert trainer.state.global_step == STEPS == rollout.step + 1
    trained = zerocore.full_state_dict(trainer.model, rank0_only=False)
    plain = grpo.build_model().state_dict()
    assert any(not torch.equal(trained[name], value) for name, value in plain.items())
    # The process has the weights of now: its log-probabilities are the sharded model's.
    found = rollout(["1", "2", str(3 + dist.get_rank())], trainer)
    pairs = zip(found["prompt_ids"], found["completion_ids"], strict=True)
    tokens = torch.tensor([prompt + completion for prompt, completion in pairs])
    with torch.no_grad():
        scores = trainer.model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
    expected = scores.gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(torch.tensor(found["logprobs"]), expected, rtol=1e-4, atol=1e-5)
    rollout.close()
    dist.destroy_process_group()


@pytest.mark.nightly
def test_another_process_generates(tmp_path: Path) -> None:
    run_ranks(generate_elsewhere, 2, str(tmp_path), launch="torchrun", timeout=250)
