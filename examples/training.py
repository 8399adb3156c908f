"""Trains a sharded GPT on random windows of a text, and measures its loss on held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from launch import Rank
from text_data import evenly_spaced_batches, random_batch
from torch import Tensor

import zerocore

NUM_WARMUP_STEPS = 20
NUM_STEPS_PER_CHECK = 20  # between checks of the pace
NUM_HELD_OUT_WINDOWS = 256


@dataclass(frozen=True)
class TrainingConfig:
    """Sizes and rates: `batch_size` is sequences per rank and step."""

    stage: int = 3
    num_steps: int = 400
    batch_size: int = 8
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    seed: int = 0


class Trainer:
    """A sharded GPT, its optimizer, and this rank's stream of batches.

    `losses` holds this rank's loss of every step so far, in nats per byte.
    """

    def __init__(
        self, config: TrainingConfig, gpt_config: GPTConfig, rank: Rank, text: Tensor
    ) -> None:
        self.config = config
        self.rank = rank
        self.text = text
        self.num_steps = config.num_steps
        self.losses: list[float] = []
        torch.manual_seed(config.seed)
        self.model: GPT = zerocore.shard(GPT(gpt_config).to(rank.device), stage=config.stage)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._draw = torch.Generator().manual_seed((config.seed << 16) + rank.rank)
        self.num_resumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state that `Checkpoints` saves besides model and optimizer."""
        return {"losses": list(self.losses), "draw": self._draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.losses = list(state["losses"])
        self.num_resumed = len(self.losses)
        self._draw.set_state(state["draw"])

    @property
    def num_tokens_per_step(self) -> int:
        """The number of tokens of all ranks in a step."""
        return self.config.batch_size * self.model.config.context * self.rank.world_size

    def step(self) -> None:
        """Takes one training step; its gradients stay until the next one."""
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * self._rate_factor(len(self.losses))
        tokens, targets = random_batch(
            self.text, self.config.batch_size, self.model.config.context, self._draw
        )
        loss = self.model(tokens.to(self.rank.device), targets.to(self.rank.device))
        loss.backward()
        zerocore.clip_grad_norm_(self.model, self.config.max_grad_norm)
        self.optimizer.step()
        self.losses.append(loss.item())

    def run(self, num_steps: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Takes `num_steps` steps, with a call of `on_step` after each."""
        for _ in range(num_steps):
            self.step()
            on_step()

    def run_within(
        self, seconds: float, num_left: int, on_step: Callable[[], None] = lambda: None
    ) -> None:
        """Trains until `num_left` of the steps that fit into `seconds` at this pace are left.

        If not all of the configured steps fit, it lowers `num_steps`, alike on all ranks.
        """
        started = time.perf_counter()
        while len(self.losses) < self.num_steps - num_left:
            self.run(1, on_step)
            if len(self.losses) % NUM_STEPS_PER_CHECK == 0:
                self._fit_num_steps(seconds, time.perf_counter() - started, num_left)

    def _fit_num_steps(self, seconds: float, elapsed: float, num_left: int) -> None:
        slowest = torch.tensor(elapsed, device=self.rank.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        num_done = len(self.losses)
        num_here = num_done - self.num_resumed
        affordable = self.num_resumed + int(seconds / slowest.item() * num_here)
        self.num_steps = min(self.config.num_steps, max(affordable, num_done + num_left))

    def mean_losses(self) -> list[float]:
        """Returns the loss of every step so far, averaged over the ranks; all ranks must call."""
        losses = torch.tensor(self.losses, device=self.rank.device)
        dist.all_reduce(losses)
        return (losses / self.rank.world_size).tolist()

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> float:
        """Returns the mean loss in nats per byte on windows of `text`; all ranks must call."""
        size, batch_size = self.rank.world_size, 16
        num_batches = math.ceil(NUM_HELD_OUT_WINDOWS / batch_size / size)  # per rank, all alike
        batches = evenly_spaced_batches(
            text, num_batches * size, batch_size, self.model.config.context
        )
        total = torch.zeros((), device=self.rank.device)
        for tokens, targets in batches[self.rank.rank :: size]:
            total += self.model(tokens.to(self.rank.device), targets.to(self.rank.device))
        dist.all_reduce(total)
        return total.item() / (num_batches * size)

    def _rate_factor(self, step: int) -> float:
        """Returns the learning rate's factor: a linear warm-up, then a cosine from 1 to 0.05."""
        warm = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
        done = min(1.0, step / self.num_steps)
        return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
