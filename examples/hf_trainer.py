"""Trains a sharded Hugging Face model with their Trainer, on two ranks or one per GPU.

The model is a small Qwen3 with random weights that reads bytes; the text is Python's own.
Only the import of `Trainer` and `shard=` are zerocore's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from finetune import read_config
from launch import Rank, add_rank_options, run_parsed
from text_data import evenly_spaced_batches, load_corpus
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainingArguments

from zerocore.integrations.transformers import Trainer

NUM_HELD_OUT = 16


def as_dataset(text: Tensor, count: int, context: int) -> list[dict[str, Tensor]]:
    """Cuts `count` windows spread over `text`; Hugging Face shifts the labels itself."""
    ((windows, _),) = evenly_spaced_batches(text, 1, count, context)
    return [{"input_ids": window, "labels": window} for window in windows]


def work(rank: Rank, options: argparse.Namespace) -> None:
    """Trains on one rank, from the newest checkpoint with --resume."""
    corpus = load_corpus()
    num_windows = options.steps * options.batch_size * options.accumulate * rank.world_size
    args = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=2e-3,
        max_grad_norm=1.0,
        bf16=options.bf16,
        eval_strategy="steps",
        eval_steps=options.every,
        save_strategy="steps",
        save_steps=options.every,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=rank.device.type == "cpu",
    )
    torch.manual_seed(0)
    trainer = Trainer(
        AutoModelForCausalLM.from_config(read_config(None), dtype=torch.float32),
        args,
        shard={"stage": options.stage},
        train_dataset=as_dataset(corpus.train, num_windows, options.context),
        eval_dataset=as_dataset(corpus.held_out, NUM_HELD_OUT, options.context),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    prompt = torch.tensor([list(b"def ")], device=rank.device)
    tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=16, do_sample=False)
    if rank.is_first:
        print(f"generated: {bytes(t % 256 for t in tokens[0].tolist())!r}")
        if options.json:
            options.json.write_text(json.dumps(trainer.state.log_history, indent=1) + "\n")


def main() -> None:
    """Reads the options and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/hf_trainer"), help="folder of checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint there")
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--bf16", action="store_true", help="compute in bfloat16 over float32 weights")
    add("--steps", type=int, default=40, help="updates of the weights")
    add("--every", type=int, default=10, help="steps between evaluations, and checkpoints")
    add("--accumulate", type=int, default=2, help="micro-batches of an update")
    add("--batch-size", type=int, default=8, help="sequences of a micro-batch on a rank")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add_rank_options(parser)
    add("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    run_parsed(work, options, parser)


if __name__ == "__main__":
    main()
