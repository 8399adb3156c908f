"""Programs: language models that learn from their own samples."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.agents import estimated, mean_of_ranks, whitened
from tests.distributed.programs.models import SIZE, Block, Words, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def log_chances(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token but the first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def continued(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Samples tokens behind what is given."""
    for _ in range(count):
        chosen = torch.distributions.Categorical(logits=model(tokens)[:, -1]).sample()
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return tokens


class ValueOf(Words):
    """A value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[..., 0]


@program(
    "RLHF: four models, sampled answers, a KL in each token's reward, GAE, an adaptive KL weight"
)
def rlhf_sampled(run: Run) -> None:
    net = Words()
    reference = run.shard(copy.deepcopy(net).requires_grad_(False).eval(), [Block])
    reward = run.shard(ValueOf().requires_grad_(False).eval(), [Block])
    policy, critic = run.shard(net, [Block]), run.shard(ValueOf(), [Block])
    optimizers = [adamw(model.parameters()) for model in (policy, critic)]
    weight = 0.1
    for step in range(2):
        policy.eval()
        tokens = continued(policy, run.tokens(11, 4, 2, key=step), 3)
        with torch.no_grad():
            old, values = log_chances(policy(tokens), tokens)[:, 1:], critic(tokens)[:, 1:]
            distance = old - log_chances(reference(tokens), tokens)[:, 1:]
            rewards = -weight * distance
            rewards[:, -1] += reward(tokens)[:, -1].clamp(-5, 5)
        advantages = estimated(rewards.t(), values.t()).t()
        returns = advantages + values[:, :-1]
        advantages = whitened(advantages)
        policy.train()
        for part in torch.randperm(4).split(2) if step == 0 else torch.arange(4).split(4):
            ratio = (log_chances(policy(tokens[part]), tokens[part])[:, 1:] - old[part]).exp()
            gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
            update(run, policy, optimizers[0], -gain.mean())
            value = critic(tokens[part])[:, 1:-1]
            update(run, critic, optimizers[1], 0.5 * F.mse_loss(value, returns[part]))
        far = float(mean_of_ranks(distance.sum(1).mean()))
        weight *= 1 + 0.1 * max(-0.2, min(0.2, far / 0.5 - 1))
        run.record(weight)


@program("DAPO: groups that all succeed or fail are left out, tokens counted over all ranks")
def dapo(run: Run) -> None:
    model = run.shard(Words(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        model.eval()
        tokens = continued(model, run.tokens(11, 3, 2, key=step).repeat_interleave(4, 0), 3)
        with torch.no_grad():
            old = log_chances(model(tokens), tokens)[:, 1:]
        model.train()
        ends = (tokens[:, 2:] == 0).long().cumsum(1)
        mask = (ends <= 1).float()
        rewards = (tokens[:, 2:].sum(1) % 2 == 0).float().view(3, 4)
        spread = rewards.std(1, keepdim=True)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1, 1)
        kept = mask * (spread > 0).float().repeat_interleave(4, 0)
        count = mean_of_ranks(kept.sum()).clamp(min=1)
        for _ in range(2):
            ratio = (log_chances(model(tokens), tokens)[:, 1:] - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            update(run, model, optimizer, -(gain * kept).sum() / count)
