"""Hugging Face's Trainer, as it is, over ``zerocore.fsdp``: what it does over torch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.integrations.fully_sharded import (
    ENGINES,
    check_close,
    check_engine,
    engine,
    let_accelerate_shard_on_cpu,
)
from tests.integrations.language_model import TRAINER_OPTIONS, VOCABULARY, build_model, samples

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 5
SAVED = 4  # the checkpoint that training is resumed from
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def arguments(folder: Path, files: str, **changes: Any) -> dict[str, Any]:
    """TRAINER_OPTIONS, and blocks that Accelerate shards."""
    return {
        **TRAINER_OPTIONS,
        "output_dir": str(folder),
        "accelerator_config": {"use_configured_state": True},
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
            "state_dict_type": files,
        },
        "max_steps": STEPS,
        **changes,
    }


def make_plain(options: dict[str, Any], model: Any = None) -> Any:
    import transformers

    args = transformers.TrainingArguments(**options)
    data = {"train_dataset": samples(32), "eval_dataset": samples(6, seed=2)}
    return transformers.Trainer(model or build_model(), args, **data)


def make_adapted(options: dict[str, Any]) -> Any:
    """Over a model with adapters at the attention's projections; all else is frozen."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return make_plain(options, peft.get_peft_model(build_model(), config))


def make_sft(options: dict[str, Any]) -> Any:
    """TRL's, with its own defaults: it recomputes activations."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {str(index): index for index in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0")),
        eos_token="0",
        pad_token="0",
    )
    rows = {
        name: datasets.Dataset.from_list(
            [{"input_ids": row["input_ids"].tolist()} for row in samples(count, seed=seed)]
        )
        for name, count, seed in (("train_dataset", 32, 1), ("eval_dataset", 6, 2))
    }
    args = trl.SFTConfig(**options, bf16=False)
    return trl.SFTTrainer(build_model(), args, processing_class=tokenizer, **rows)


def figures(trainer: Any) -> list[float]:
    """Losses, norms and held-out losses, in their order."""
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def compare(
    directory: str,
    files: str,
    make: Any = make_plain,
    pairs: tuple[tuple[str, str], ...] = (("zerocore", "zerocore"),),
    tolerance: dict[str, float] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The trainers of both after training alike; for each pair the second resumes the first's."""
    trainers = {}
    for name in ENGINES:
        with engine(name):
            let_accelerate_shard_on_cpu()
            trainers[name] = make(arguments(Path(directory, name), files, **changes))
            trainers[name].train()
            check_engine(trainers[name].model, name)
    expected = figures(trainers["torch"])
    check_close(figures(trainers["zerocore"]), expected, **(tolerance or {}))
    for writer, reader in pairs:
        with engine(reader):
            folder = Path(directory, f"{reader}-after-{writer}")
            let_accelerate_shard_on_cpu()
            resumed = make(arguments(folder, files, **changes))
            path = Path(directory, writer, f"checkpoint-{SAVED}")
            resumed.train(resume_from_checkpoint=str(path))
            check_close(figures(resumed), expected, **(tolerance or {}))
    return trainers


def check_values(trainers: dict[str, Any]) -> None:
    """Of the best step, which both have loaded at the end."""
    values = {}
    best = {each.state.best_global_step for each in trainers.values()}
    assert len(best) == 1 and best != {STEPS}
    for name, trainer in trainers.items():
        with engine(name):
            values[name] = trainer.accelerator.get_state_dict(trainer.model)
    torch.testing.assert_close(values["zerocore"], values["torch"], rtol=1e-4, atol=1e-6)


def train_in_float32(directory: str) -> None:
    pairs = (("torch", "zerocore"), ("zerocore", "zerocore"), ("zerocore", "torch"))
    trainers = compare(directory, FULL, pairs=pairs)
    check_values(trainers)
    trainer = trainers["zerocore"]
    prompt = torch.tensor([[1, 2, 3]])
    tokens = {
        name: each.model.generate(prompt, max_new_tokens=4) for name, each in trainers.items()
    }
    torch.testing.assert_close(tokens["zerocore"], tokens["torch"])
    trainer.save_model(directory)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes
    from transformers import Qwen3ForCausalLM

    values = trainer.accelerator.get_state_dict(trainer.model)
    saved = Qwen3ForCausalLM.from_pretrained(directory).state_dict()
    torch.testing.assert_close({name: saved[name] for name in values}, dict(values))


def test_training_evaluation_and_resume_are_those_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(train_in_float32, 2, str(tmp_path), launch="torchrun", timeout=200)


def train_in_bf16(directory: str) -> None:
    # Accelerate reduces in bfloat16 then, and torch's sum is rounded to it where ours is not.
    tolerance = {"rtol": 1e-2, "atol": 1e-3}
    compare(directory, SHARDED, tolerance=tolerance, bf16=True)


@pytest.mark.nightly
def test_bf16_and_checkpoints_of_shards_are_those_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(train_in_bf16, 2, str(tmp_path), launch="torchrun", timeout=200)


def train_adapters(directory: str) -> None:
    trainers = compare(directory, FULL, make_adapted)
    check_values(trainers)
    trainer = trainers["zerocore"]
    trainer.save_model(directory)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes
    from peft import PeftModel

    saved = PeftModel.from_pretrained(build_model(), directory).state_dict()
    values = trainer.accelerator.get_state_dict(trainer.model)
    torch.testing.assert_close({name: saved[name] for name in values}, dict(values))


@pytest.mark.nightly
def test_adapters_of_peft_are_those_of_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_ranks(train_adapters, 2, str(tmp_path), launch="torchrun", timeout=200)


def train_sft(directory: str) -> None:
    compare(directory, FULL, make_sft)


@pytest.mark.nightly
def test_trl_fine_tunes_as_over_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run_ranks(train_sft, 2, str(tmp_path), launch="torchrun", timeout=200)
