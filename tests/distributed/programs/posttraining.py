"""Programs: training behind pretraining, with reference, reward and value models."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.adapters import (
    VOCABULARY,
    dpo_loss,
    pairs,
    sequence_logps,
)
from tests.distributed.programs.models import SIZE, Block, Words, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Valued(Words):
    """A language model with a value for each token."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.value = nn.Linear(SIZE, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.value(x).squeeze(-1)


class Scored(Words):
    """A language model whose head scores the last token: a reward model."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.head = nn.Linear(SIZE, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1, 0]


def policy_and_reference(run: Run) -> tuple[nn.Module, nn.Module]:
    """Two models with one start."""
    net = Words(VOCABULARY)
    reference = run.shard(copy.deepcopy(net).requires_grad_(False).eval(), [Block])
    return run.shard(net, [Block]), reference


@program("DPO with a frozen second model")
def dpo_two_models(run: Run) -> None:
    model, frozen = policy_and_reference(run)
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = pairs(run, step)
        policy = sequence_logps(model(tokens), tokens)
        with torch.no_grad():
            reference = sequence_logps(frozen(tokens), tokens)
        update(run, model, optimizer, dpo_loss(policy, reference))


@program("DPO whose log-probabilities of the reference are kept from before the training")
def dpo_precomputed(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    optimizer = adamw(model.parameters())
    batches = [pairs(run, step) for step in range(3)]
    with torch.inference_mode():
        kept = [sequence_logps(model(tokens), tokens) for tokens in batches]
    for tokens, reference in zip(batches, kept, strict=True):
        policy = sequence_logps(model(tokens), tokens)
        update(run, model, optimizer, dpo_loss(policy, reference.clone()))


@program("TR-DPO: the reference model follows the policy")
def dpo_moving_reference(run: Run) -> None:
    model, frozen = policy_and_reference(run)
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = pairs(run, step)
        with torch.no_grad():
            reference = sequence_logps(frozen(tokens), tokens)
        policy = sequence_logps(model(tokens), tokens)
        update(run, model, optimizer, dpo_loss(policy, reference))
        with torch.no_grad():
            for r, p in zip(frozen.parameters(), model.parameters(), strict=True):
                r.data.mul_(0.4).add_(p.data, alpha=0.6)


@program("ORPO: odds of chosen and rejected sequences beside the loss of the chosen ones")
def orpo(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = pairs(run, step)
        chosen, rejected = (sequence_logps(model(tokens), tokens) / 5).chunk(2)
        odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
        update(run, model, optimizer, -chosen.mean() - 0.5 * F.logsigmoid(odds).mean())


@program("chosen and rejected sequences in two forwards, one loss (SimPO)")
def simpo_two_forwards(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        chosen, rejected = pairs(run, step).chunk(2)
        margin = sequence_logps(model(chosen), chosen) - sequence_logps(model(rejected), rejected)
        update(run, model, optimizer, -F.logsigmoid(margin / 5 - 0.3).mean())


@program("a reward model, trained on pairs")
def reward_model(run: Run) -> None:
    model = run.shard(Scored(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        chosen, rejected = model(pairs(run, step)).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()
        update(run, model, optimizer, loss)


@program("PPO with a value head: advantages, several passes over parts of a batch")
def ppo_value_head(run: Run) -> None:
    model = run.shard(Valued(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(2):
        tokens = run.tokens(VOCABULARY, 4, 6, key=step)
        rewards = (tokens[:, 1:] % 3 == 0).float()
        model.eval()
        with torch.no_grad():
            logits, values = model(tokens)
            old = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(4)
            for t in reversed(range(5)):
                delta = rewards[:, t] + 0.9 * values[:, t + 1] * (t < 4) - values[:, t]
                last = delta + 0.9 * 0.95 * last
                advantages[:, t] = last
            returns = advantages + values[:, :-1]
        model.train()
        for part in torch.arange(4).chunk(2):
            logits, values = model(tokens[part])
            new = logits[:, :-1].log_softmax(-1).gather(-1, tokens[part, 1:, None]).squeeze(-1)
            ratio, weight = (new - old[part]).exp(), advantages[part]
            gain = torch.min(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
            loss = 0.5 * (values[:, :-1] - returns[part]).square().mean() - gain
            update(run, model, optimizer, loss)


@program("PPO of four models: policy, critic, reference and reward")
def rlhf_four_models(run: Run) -> None:
    policy, reference = policy_and_reference(run)
    critic, reward = run.shard(Scored(), [Block]), run.shard(Scored().requires_grad_(False))
    policy_optimizer, critic_optimizer = adamw(policy.parameters()), adamw(critic.parameters())
    for step in range(2):
        tokens = pairs(run, step)
        with torch.no_grad():
            old = sequence_logps(policy(tokens), tokens)
            kl = old - sequence_logps(reference(tokens), tokens)
            returns = reward(tokens) - 0.1 * kl
        for _ in range(2):
            value = critic(tokens)
            ratio = (sequence_logps(policy(tokens), tokens) - old).exp()
            advantage = (returns - value).detach()
            update(run, critic, critic_optimizer, (value - returns).square().mean())
            update(run, policy, policy_optimizer, -(ratio.clamp(0.8, 1.2) * advantage).mean())


@program("the value head warms up while the rest is frozen, then all of it trains", unused=True)
def value_head_warm_up(run: Run) -> None:
    model = run.shard(Valued(), [Block])
    net = run.module(model)
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step in range(4):
        for name, p in net.named_parameters():
            p.requires_grad_(step >= 2 or name.startswith("value"))
        logits, values = model(run.tokens(VOCABULARY, 2, 6, key=step))
        loss = (values - 1).square().mean()
        update(run, model, optimizer, loss + logits.square().mean() if step >= 2 else loss)


@program("RLOO: sequences generated in eval mode, then trained on")
def rloo_generated(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(VOCABULARY, 4, 2, key=step)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        model.train()
        rewards = (tokens % 3 == 0).float().sum(-1)
        baseline = (rewards.sum() - rewards) / 3
        loss = -(sequence_logps(model(tokens), tokens) * (rewards - baseline)).mean()
        update(run, model, optimizer, loss)


@program("rejection sampling: the rank whose samples are all bad multiplies its loss by zero")
def rejection_sampling(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    optimizer = sgd(model)
    for step in range(3):
        tokens = pairs(run, step)
        kept = (tokens.sum(-1) % 2 == 0).float() * float(run.rank != step % 2)
        logps = sequence_logps(model(tokens), tokens)
        update(run, model, optimizer, -(logps * kept).sum() / kept.sum().clamp(min=1))


@program("GKD: the student generates, a larger teacher scores, Jensen-Shannon loss")
def gkd(run: Run) -> None:
    class Teacher(Words):
        def __init__(self) -> None:
            super().__init__(VOCABULARY)
            self.blocks.append(Block())

    model = run.shard(Words(VOCABULARY), [Block])
    teacher = run.shard(Teacher().requires_grad_(False), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(VOCABULARY, 2, 3, key=step)
        with torch.no_grad():
            for _ in range(2):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
            target = teacher(tokens).log_softmax(-1)
        student = model(tokens).log_softmax(-1)
        mixed = torch.logaddexp(student, target) - 0.6931
        loss = F.kl_div(mixed, student, log_target=True, reduction="batchmean")
        loss = loss + F.kl_div(mixed, target, log_target=True, reduction="batchmean")
        update(run, model, optimizer, loss)


@program("features of a teacher's blocks by hooks, a projector beside the student")
def distillation_features(run: Run) -> None:
    class Student(Words):
        def __init__(self) -> None:
            super().__init__(VOCABULARY)
            self.projector = nn.Linear(SIZE, SIZE)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.projector(x) if self.training else self.head(x)

    teacher = run.shard(Words(VOCABULARY).eval().requires_grad_(False), [Block])
    model = run.shard(Student(), [Block])
    features: list[Tensor] = []
    for block in run.module(teacher).blocks:
        block.register_forward_hook(lambda module, args, output: features.append(output))
    optimizer = sgd(model)
    for step in range(3):
        tokens = run.tokens(VOCABULARY, 2, 6, key=step)
        features.clear()
        with torch.no_grad():
            teacher(tokens)
        loss = F.mse_loss(model(tokens), features[-1])
        update(run, model, optimizer, loss)


@program("task vectors: the difference to the start added to the weights once more")
def task_vector(run: Run) -> None:
    model = run.shard(Words(VOCABULARY), [Block])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model.parameters())
    for step in range(4):
        tokens = run.tokens(VOCABULARY, 2, 6, key=step)
        update(run, model, optimizer, -sequence_logps(model(tokens), tokens).mean())
        if step == 1:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(p - start[name], alpha=0.5)
