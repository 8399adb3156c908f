"""Fine-tunes a Hugging Face model, all of it or LoRA adapters, in bfloat16 over several ranks.

Run it directly (two ranks on the CPU, or one per GPU), or under torchrun.
The text is Python's own. --model takes a folder of save_pretrained, with or without a tokenizer;
without one, text is read and written as bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import Rank, add_rank_options, run_parsed
from text_data import Corpus, evenly_spaced_batches, load_corpus, random_batch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import zerocore

# The model without --config has 0.85 M parameters, because it reads bytes.
SMALL_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
NUM_BYTE_VALUES = 256
NUM_HELD_OUT_BATCHES = 8
NUM_ENCODED_BYTES = 1 << 20  # the most bytes of text that a tokenizer encodes
PROMPT = b"def "
NUM_NEW_TOKENS = 100


def build_model(options: argparse.Namespace, rank: Rank) -> Any:
    """Makes a sharded model with float32 main weights."""
    torch.manual_seed(options.seed)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        config = read_config(options.config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if options.load and rank.is_first:  # shard() broadcasts rank 0's values
        model.load_state_dict(torch.load(options.load))
    if options.lora:
        import peft

        adapters = peft.LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear"
        )
        model = peft.get_peft_model(model, adapters)  # parameters are added before shard()
    mixed = None
    if options.dtype != "float32":
        mixed = zerocore.MixedPrecision(
            param_dtype=getattr(torch, options.dtype),  # the dtype of layers and of gathers
            reduce_dtype=torch.float32,  # the dtype of reductions
        )
    return zerocore.shard(model.to(rank.device), stage=options.stage, mixed_precision=mixed)


def read_config(path: Path | None) -> PreTrainedConfig:
    """Reads a model's configuration from a file such as `config.json`; None makes a small one."""
    values = dict(SMALL_QWEN3) if path is None else json.loads(path.read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if config.vocab_size < NUM_BYTE_VALUES:
        raise ValueError(f"vocab_size is {config.vocab_size}; bytes need {NUM_BYTE_VALUES} or more")
    return config


def read_tokenizer(folder: Path | None) -> Any:
    """Returns the tokenizer in the model's folder, or None: tokens are then bytes."""
    has_one = folder is not None and any(folder.glob("tokenizer*"))
    return AutoTokenizer.from_pretrained(folder) if has_one else None


def read_corpus(tokenizer: Any) -> Corpus:
    """Reads the text as tokens."""
    corpus = load_corpus()
    if tokenizer is None:
        return corpus

    def encode(text: Tensor) -> Tensor:
        part = bytes(text[:NUM_ENCODED_BYTES].tolist()).decode(errors="replace")
        return torch.tensor(tokenizer(part, add_special_tokens=False, verbose=False).input_ids)

    return replace(corpus, train=encode(corpus.train), held_out=encode(corpus.held_out))


def cosine_with_warmup(step: int, num_warmup: int, num_steps: int) -> float:
    """Returns the learning rate's factor: a linear warm-up to 1, then half a cosine to 0.1."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def language_loss(model: Any, tokens: Tensor) -> Tensor:
    """Returns the mean loss in nats per byte; Hugging Face shifts the labels itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor], max_norm: float
) -> tuple[float, float]:
    """Takes a step of several micro-batches; returns this rank's loss and the gradients' norm."""
    total = 0.0
    for index, tokens in enumerate(batches):
        is_last = index == len(batches) - 1
        # Stages 0 and 1 reduce once. Stages 2 and 3 reduce each micro-batch, so that no rank holds
        # full gradients; with Communication(accumulate="full") they reduce once, too.
        with nullcontext() if is_last else zerocore.no_sync(model):
            loss = language_loss(model, tokens) / len(batches)
            loss.backward()
        total += loss.item()
    norm = zerocore.clip_grad_norm_(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.item()


@torch.no_grad()
def evaluate(model: Any, text: Tensor, options: argparse.Namespace, rank: Rank) -> float:
    """Returns the mean loss on windows spread over `text`; each rank takes a part of them."""
    model.eval()
    batches = evenly_spaced_batches(
        text, NUM_HELD_OUT_BATCHES * rank.world_size, options.batch_size, options.context
    )
    total = torch.zeros((), device=rank.device)
    for tokens, _ in batches[rank.rank :: rank.world_size]:
        total += language_loss(model, tokens.to(rank.device))
    dist.all_reduce(total)
    model.train()
    return total.item() / len(batches)


@torch.no_grad()
def generate(model: Any, tokenizer: Any, rank: Rank, seed: int) -> list[int]:
    """Continues PROMPT; returns all tokens. All ranks take part and draw the same tokens."""
    model.eval()
    torch.manual_seed(seed)
    prompt = list(PROMPT) if tokenizer is None else tokenizer(PROMPT.decode()).input_ids
    tokens = torch.tensor([prompt], device=rank.device)
    # Gathers all parameters once. A model that is too large works without this line, too,
    # but gathers its layers for every token.
    with zerocore.unsharded(model):
        tokens = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=NUM_NEW_TOKENS,
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=True,
            pad_token_id=0,
        )
    return tokens[0].tolist()


def as_text(tokens: list[int], tokenizer: Any) -> str:
    """Decodes tokens to text."""
    if tokenizer is not None:
        return str(tokenizer.decode(tokens))
    return bytes(token % NUM_BYTE_VALUES for token in tokens).decode(errors="replace")


def save_pretrained(model: Any, tokenizer: Any, folder: Path, rank: Rank) -> None:
    """Saves for from_pretrained; each rank writes its part of the weights."""
    zerocore.save_safetensors(model, folder)
    if rank.is_first:
        model.config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def make_optimizer(
    model: Any, options: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Makes AdamW over this rank's trainable shards, which shard() has made, and its schedule."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = zerocore.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    num_warmup = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, num_warmup, options.steps)
    )
    return optimizer, schedule


class Progress:
    """The state that a resumed run needs besides model, optimizer and schedule."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.figures: dict[str, list[float]] = {"held_out": [], "losses": [], "norms": []}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, which `Checkpoints` saves for each rank."""
        return {"draw": self.draw.get_state(), "figures": self.figures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.draw.set_state(state["draw"])
        self.figures = state["figures"]


def fit(model: Any, corpus: Corpus, options: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """Trains, then loads the weights with the lowest held-out loss; returns the figures."""
    optimizer, schedule = make_optimizer(model, options)
    progress = Progress((options.seed << 16) + rank.rank)
    checkpoints = None
    if options.checkpoint:
        state = {"schedule": schedule, "progress": progress}
        checkpoints = zerocore.Checkpoints(options.checkpoint, model, optimizer, stateful=state)
    if checkpoints is None or not options.resume or checkpoints.load() is None:
        progress.figures["held_out"].append(evaluate(model, corpus.held_out, options, rank))
    best = zerocore.full_state_dict(model)  # on the CPU of rank 0
    held_out, losses, norms = (progress.figures[key] for key in ("held_out", "losses", "norms"))
    started = time.perf_counter()
    for step in range(len(losses) + 1, options.steps + 1):
        batches = [
            random_batch(corpus.train, options.batch_size, options.context, progress.draw)[0]
            for _ in range(options.accumulate)
        ]
        batches = [tokens.to(rank.device) for tokens in batches]
        loss, norm = train_step(model, optimizer, batches, options.clip)
        schedule.step()
        losses.append(loss)
        norms.append(norm)
        if step % options.eval_every == 0 or step == options.steps:
            held_out.append(evaluate(model, corpus.held_out, options, rank))
            if held_out[-1] == min(held_out):
                best = zerocore.full_state_dict(model)
            say(rank, f"step {step}  loss {loss:.3f}  norm {norm:.2f}  held out {held_out[-1]:.3f}")
            if checkpoints is not None:
                checkpoints.save(step)  # a thread writes it while training continues
    seconds = time.perf_counter() - started
    if checkpoints is not None:
        checkpoints.wait()
    zerocore.load_full_state_dict(model, best)  # rank 0's values, to all ranks
    if options.save and rank.is_first:
        torch.save(best, options.save)
    return {**progress.figures, "seconds": seconds}


def say(rank: Rank, line: str) -> None:
    """Prints on the first rank."""
    if rank.is_first:
        print(line, flush=True)


def work(rank: Rank, options: argparse.Namespace) -> None:
    """Trains on one rank."""
    model = build_model(options, rank)
    tokenizer = read_tokenizer(options.model)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    say(
        rank,
        f"{sum(numel for numel, _ in counts):,} parameters, "
        f"{sum(numel for numel, trained in counts if trained):,} of them trained, in "
        f"{options.dtype} at stage {options.stage} on {rank.world_size} ranks",
    )
    figures = fit(model, read_corpus(tokenizer), options, rank)
    tokens = generate(model, tokenizer, rank, options.seed)
    if options.out:
        save_pretrained(model, tokenizer, options.out, rank)
    first, best = figures["held_out"][0], min(figures["held_out"])
    say(rank, f"held-out loss {first:.3f} -> {best:.3f} in {figures['seconds']:.0f} s")
    say(rank, f"generated: {as_text(tokens, tokenizer)!r}")
    if options.json and rank.is_first:
        record = {**figures, "generated": tokens}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Reads the options and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a folder of save_pretrained to start from")
    add("--config", type=Path, help="or a Hugging Face config.json; default: a small Qwen3")
    add("--out", type=Path, help="folder that from_pretrained can read, with the best weights")
    add("--load", type=Path, help="full state dict to start from, without adapters")
    add("--save", type=Path, help="where the best full state dict goes")
    add("--checkpoint", type=Path, help="folder of checkpoints, one for each evaluation")
    add("--resume", action="store_true", help="continue from the newest checkpoint there")
    add("--lora", type=int, default=0, metavar="R", help="train adapters of rank R only")
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="computed in")
    add("--steps", type=int, default=100, help="updates of the weights")
    add("--accumulate", type=int, default=2, help="micro-batches of an update")
    add("--batch-size", type=int, default=8, help="sequences of a micro-batch on a rank")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--weight-decay", type=float, default=0.01, help="for matrices; biases and norms have none")
    add("--clip", type=float, default=1.0, help="bound of the gradients' global norm")
    add("--eval-every", type=int, default=25, help="steps between evaluations on held-out text")
    add("--seed", type=int, default=0)
    add_rank_options(parser)
    add("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to resume from")
    if options.lora and options.out:
        parser.error("--out saves whole models; use --save with --lora")
    if options.lora and importlib.util.find_spec("peft") is None:
        parser.error("--lora needs PEFT: pip install peft, or train all parameters without --lora")
    run_parsed(work, options, parser)


if __name__ == "__main__":
    main()
