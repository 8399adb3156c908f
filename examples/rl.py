"""Trains a sharded policy by reinforcement learning: GRPO on a task with a computed reward.

    torchrun --nproc-per-node 2 examples/rl.py [--iterations 100] [--out FOLDER]

A prompt is a digit, and a completion is rewarded for each token that counts on from it. In each
iteration the ranks export the policy's weights to a plain model that samples, while policy,
optimizer and reference are parked. An inference engine instead of it takes the same buckets.
The reference scores the completions while the policy is parked, and the policy takes two steps.
It draws `rl.png` in FOLDER, the reward by iteration.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import zerocore

NUM_DIGITS, LENGTH, GROUP, PROMPTS = 10, 8, 16, 8
KL_WEIGHT, CLIP = 0.02, 0.2
CONFIG = Qwen3Config(
    vocab_size=NUM_DIGITS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip


def take_weights(policy: Qwen3ForCausalLM, engine: Qwen3ForCausalLM) -> None:
    """Copies the policy's weights to the engine, a bucket at a time."""
    target = engine.state_dict()
    for bucket in zerocore.export(policy, max_bytes="64MiB"):
        for name, tensor in bucket.items():
            target[name].copy_(tensor)


@torch.no_grad()
def sample(engine: Qwen3ForCausalLM, prompts: Tensor) -> Tensor:
    """Completes the prompts; returns (prompts, 1 + LENGTH) with the prompt's digit first."""
    tokens = prompts[:, None]
    for _ in range(LENGTH):
        logits = engine(input_ids=tokens).logits[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens


def rewards_of(tokens: Tensor) -> Tensor:
    """Returns the share of a completion's tokens that count on from its prompt."""
    steps = torch.arange(1, LENGTH + 1, device=tokens.device)
    return ((tokens[:, :1] + steps) % NUM_DIGITS == tokens[:, 1:]).float().mean(1)


def log_probs(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Returns the log-probability of each completion's tokens, (completions, LENGTH)."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def loss_of(new: Tensor, old: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
    """Returns GRPO's loss: the clipped ratio, and an estimate of the KL from the reference."""
    ratio = (new - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    away = reference - new
    return (KL_WEIGHT * (away.exp() - away - 1) - gain).mean()


class Trainer:
    """The policy, reference and engine of one rank."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.policy = zerocore.shard(Qwen3ForCausalLM(CONFIG).to(device), stage=3)
        self.optimizer = zerocore.optim.AdamW(self.policy.parameters(), lr=2e-3)
        self.reference = zerocore.clone_sharded(self.policy)
        self.engine = Qwen3ForCausalLM(CONFIG).to(device).eval()
        self.device = device
        self.export_s = 0.0
        torch.manual_seed(1 + dist.get_rank())

    def step(self) -> float:
        """Takes one iteration; returns the mean reward of this rank's completions."""
        with zerocore.parked(self.reference):
            begin = time.perf_counter()
            take_weights(self.policy, self.engine)
            self.export_s += time.perf_counter() - begin
            with zerocore.parked(self.policy, self.optimizer):
                prompts = torch.randint(NUM_DIGITS, (PROMPTS,), device=self.device)
                tokens = sample(self.engine, prompts.repeat_interleave(GROUP))
        rewards = rewards_of(tokens)
        groups = rewards.view(PROMPTS, GROUP)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
        with zerocore.parked(self.policy, self.optimizer), torch.no_grad():
            reference = log_probs(self.reference, tokens)
        with zerocore.parked(self.reference):
            old = None
            for _ in range(2):
                new = log_probs(self.policy, tokens)
                old = new.detach() if old is None else old
                loss_of(new, old, reference, advantages).backward()
                zerocore.clip_grad_norm_(self.policy, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return rewards.mean().item()


def draw(rewards: list[float], path: Path) -> None:
    """Draws the reward by iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1))
    axes.set_title("GRPO with a sharded policy: reward of counting on from a digit")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder of rl.png")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    trainer = Trainer(device)
    rewards = []
    for iteration in range(1, options.iterations + 1):
        mean = torch.tensor(trainer.step(), device=device)
        dist.all_reduce(mean)
        rewards.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (iteration == 1 or iteration % 10 == 0):
            print(f"iteration {iteration}: reward {rewards[-1]:.3f}")
    if dist.get_rank() == 0:
        print(f"an export took {1e3 * trainer.export_s / options.iterations:.1f} ms")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            draw(rewards, options.out / "rl.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
