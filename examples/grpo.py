"""Trains a sharded model with TRL's GRPOTrainer, while another process generates.

    torchrun --nproc-per-node 2 examples/grpo.py [--steps 40]

That process is not a rank. It has a plain model in shared memory, which rank 0 fills with
each step's weights. Like an inference engine, it answers prompts. A completion is rewarded for
each token that counts on from its prompt.
"""

from __future__ import annotations

import argparse
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.multiprocessing import get_context  # its pipes share tensors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import zerocore

NUM_DIGITS, LENGTH, GROUP = 10, 4, 8
VOCABULARY = {**{str(digit): digit for digit in range(NUM_DIGITS)}, "<pad>": 10, "<eos>": 11}
Ids = list[list[int]]


def build_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
        pad_token_id=10, eos_token_id=11, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with a token for each digit."""
    words = Tokenizer(WordLevel(VOCABULARY, "<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: Ids) -> tuple[Ids, list[list[float]]]:
    """Completes prompts of one length; also returns the log-probability of each token."""
    tokens = torch.tensor(prompts)
    chosen = []
    for _ in range(LENGTH):
        scores = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(scores.exp(), 1)
        chosen.append(scores.gather(1, token))
        tokens = torch.cat([tokens, token], 1)
    return tokens[:, -LENGTH:].tolist(), torch.cat(chosen, 1).tolist()


def serve(pipe: Connection) -> None:
    """Generates in a process: shares its weights, then answers prompts until it gets None."""
    torch.set_num_threads(1)
    model = build_model().eval()
    pipe.send(model.share_memory().state_dict())
    while (prompts := pipe.recv()) is not None:
        pipe.send(sample(model, prompts))


class Rollout:
    """A trainer's ``rollout_func``: rank 0 sends all ranks' prompts to the process."""

    def __init__(self) -> None:
        self.step = -1
        if dist.get_rank() == 0:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs,), daemon=True)
            self.process.start()
            self.weights = self.pipe.recv()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step != self.step:  # once for each step's weights
            self.step = trainer.state.global_step
            for bucket in zerocore.export(trainer.model, to=0):  # only rank 0 gets them
                for name, tensor in bucket.items():
                    self.weights[name].copy_(tensor)
        ids = trainer.processing_class(prompts)["input_ids"]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, ids)
        answers: list[Any] = [None] * dist.get_world_size()
        if dist.get_rank() == 0:
            answers = [self.ask(each) for each in gathered]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, answers)
        completions, log_probs = mine[0]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": log_probs}

    def ask(self, prompts: Ids) -> Any:
        self.pipe.send(prompts)
        return self.pipe.recv()

    def close(self) -> None:
        if dist.get_rank() == 0:
            self.pipe.send(None)
            self.process.join()


def counts_on(prompts: list[str], completion_ids: Ids, **_: Any) -> list[float]:
    """Returns the share of a completion's tokens that count on from its prompt's last digit."""
    found = []
    for prompt, tokens in zip(prompts, completion_ids, strict=True):
        first = int(prompt.split()[-1]) + 1
        found.append(sum(t == (first + i) % NUM_DIGITS for i, t in enumerate(tokens)) / LENGTH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # silences a warning that rollout_func may change
    from trl import GRPOConfig, GRPOTrainer

    from zerocore.integrations.transformers import ShardedTrainerMixin

    class ShardedGRPOTrainer(ShardedTrainerMixin, GRPOTrainer):
        """TRL's trainer for a sharded model."""

    dist.init_process_group()
    rollout = Rollout()
    args = GRPOConfig(
        "grpo", max_steps=options.steps, learning_rate=5e-3, num_generations=GROUP,
        per_device_train_batch_size=8 * GROUP, max_completion_length=LENGTH, save_strategy="no",
        logging_steps=1, report_to=[], disable_tqdm=True, bf16=False, lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(), seed=dist.get_rank(),
    )  # fmt: skip
    trainer = ShardedGRPOTrainer(
        build_model(), counts_on, args, rollout_func=rollout, processing_class=build_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": [str(d) for d in range(NUM_DIGITS)] * 16}),
        shard={"stage": 3},
    )  # fmt: skip
    trainer.train()
    if dist.get_rank() == 0:
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"reward {rewards[0]:.3f} -> {sum(rewards[-5:]) / len(rewards[-5:]):.3f}")
    rollout.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
