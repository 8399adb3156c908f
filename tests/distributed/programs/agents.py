"""Programs: agents that learn from what they did, and language models from their samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, Words, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

ACTIONS = 3


class World:
    """Four worlds of this rank; an action pushes one of the numbers, and zero is the aim."""

    def __init__(self, run: Run) -> None:
        self.state = run.tensor(4, SIZE)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        push = F.one_hot(action, SIZE).float() if action.ndim == 1 else F.pad(action, (0, 6))
        self.state = 0.9 * self.state + 0.3 * push
        return self.state, -self.state.square().mean(-1)


@torch.no_grad()
def mean_of_ranks(value: Tensor) -> Tensor:
    """The mean over the ranks."""
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


@program("REINFORCE: actions sampled in a loop, returns to go, a baseline that all ranks share")
def reinforce(run: Run) -> None:
    policy = run.shard(Net(1), [Block])
    optimizer = adamw(policy.parameters())
    world, baseline = World(run), torch.zeros(())
    for _ in range(3):
        logs, rewards, state = [], [], world.state
        for _ in range(4):
            chances = torch.distributions.Categorical(logits=policy(state)[:, :ACTIONS])
            action = chances.sample()
            logs.append(chances.log_prob(action))
            state, reward = world.step(action)
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        baseline = 0.9 * baseline + 0.1 * mean_of_ranks(returns.mean())
        update(run, policy, optimizer, -(torch.stack(logs) * (returns - baseline)).mean())


class Acts(nn.Module):
    """A Gaussian squashed to (-1, 1): a reparametrised action and its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Net(1), nn.Linear(SIZE, 4)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.head(torch.relu(self.body(state))).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        logs = normal.log_prob(raw) - 2 * (0.6931 - raw - F.softplus(-2 * raw))
        return raw.tanh(), logs.sum(-1)


class Critics(nn.Module):
    """Two values of a state and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE + 2, SIZE), Block(), nn.Linear(SIZE, 1)) for _ in range(2)
        )

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return torch.stack([c(torch.cat([state, action], -1))[:, 0] for c in self.both])


class Temperature(nn.Module):
    """The log of a weight of entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))

    def forward(self, logs: Tensor) -> Tensor:
        return -(self.log * (logs - 2.0).detach()).mean()


def follow(target: nn.Module, online: nn.Module, share: float) -> None:
    """Polyak averaging."""
    with torch.no_grad():
        for t, p in zip(target.parameters(), online.parameters(), strict=True):
            t.data.copy_(share * p.data + (1.0 - share) * t.data)


def transitions(run: Run, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A replay buffer gives states, actions, rewards, next states, and ends."""
    state, action = run.tensor(6, SIZE, key=step), run.tensor(6, 2, key=10 + step).tanh()
    after = 0.9 * state + 0.3 * F.pad(action, (0, 6))
    return state, action, -after.square().mean(-1), after, run.tokens(2, 6, key=step).float()


@program("SAC: an actor, two critics and their targets, a learned temperature, three optimizers")
def soft_actor_critic(run: Run) -> None:
    critics_net = Critics()
    targets = run.shard(copy.deepcopy(critics_net).requires_grad_(False), [Block])
    actor, critics = run.shard(Acts(), [Block]), run.shard(critics_net, [Block])
    heat = run.shard(Temperature())
    optimizers = [torch.optim.Adam(m.parameters(), 3e-3, eps=1e-4) for m in (actor, critics, heat)]
    for step in range(3):
        state, action, reward, after, end = transitions(run, step)
        alpha = run.module(heat).log.exp().detach()
        with torch.no_grad():
            then, logs = actor(after)
            value = targets(after, then).min(0)[0] - alpha * logs
            aim = reward + 0.9 * (1 - end) * value
        update(run, critics, optimizers[1], F.mse_loss(critics(state, action), aim.expand(2, -1)))
        for param in critics.parameters():
            param.requires_grad_(False)
        now, logs = actor(state)
        update(run, actor, optimizers[0], (alpha * logs - critics(state, now).min(0)[0]).mean())
        for param in critics.parameters():
            param.requires_grad_(True)
        update(run, heat, optimizers[2], heat(logs))
        follow(targets, critics, 0.2)
        run.record(alpha)


@program(
    "TD3: noise on the target's action, a delayed actor that goes through one critic alone",
    unused=True,
)
def delayed_actor(run: Run) -> None:
    actor_net, critics_net = nn.Sequential(Net(1), nn.Linear(SIZE, 2), nn.Tanh()), Critics()
    slow_actor, slow_critics = (
        run.shard(copy.deepcopy(net).requires_grad_(False), [Block])
        for net in (actor_net, critics_net)
    )
    actor, critics = run.shard(actor_net, [Block]), run.shard(critics_net, [Block])
    a_optimizer, c_optimizer = adamw(actor.parameters()), adamw(critics.parameters())
    for step in range(4):
        state, action, reward, after, end = transitions(run, step)
        with torch.no_grad():
            noise = (0.2 * torch.randn(6, 2)).clamp(-0.5, 0.5)
            value = slow_critics(after, (slow_actor(after) + noise).clamp(-1, 1)).min(0)[0]
            aim = reward + 0.9 * (1 - end) * value
        both = critics(state, action)
        update(run, critics, c_optimizer, F.mse_loss(both[0], aim) + F.mse_loss(both[1], aim))
        if step % 2 == 1:
            update(run, actor, a_optimizer, -critics(state, actor(state))[0].mean())
            c_optimizer.zero_grad()
            follow(slow_actor, actor, 0.1)
            follow(slow_critics, critics, 0.1)


class Trunk(nn.Module):
    """Logits and a value from one trunk, with orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = Net(1), nn.Linear(SIZE, ACTIONS), nn.Linear(SIZE, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 0.01 if module is self.policy else 1.4)
                nn.init.zeros_(module.bias)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(state))
        return self.policy(x), self.value(x)[..., 0]


def estimated(rewards: Tensor, values: Tensor, fade: float = 0.855) -> Tensor:
    """Generalised advantages of (time, samples); ``values`` has one time more."""
    last, advantages = torch.zeros_like(rewards[0]), torch.zeros_like(rewards)
    for t in reversed(range(len(rewards))):
        last = rewards[t] + 0.9 * values[t + 1] - values[t] + fade * last
        advantages[t] = last
    return advantages


def whitened(x: Tensor) -> Tensor:
    """With the mean and the spread of all ranks' numbers taken out."""
    mean = mean_of_ranks(x.mean())
    return (x - mean) / (mean_of_ranks((x - mean).square().mean()) + 1e-8).sqrt()


@program("PPO of one trunk: advantages normalised over ranks, clipped values, passes end at a KL")
def ppo_trunk(run: Run) -> None:
    model = run.shard(Trunk(), [Block])
    optimizer = adamw(model.parameters(), lr=0.02)
    world = World(run)
    for _ in range(2):
        steps: list[Any] = []
        with torch.no_grad():
            for _ in range(4):
                state = world.state
                logits, value = model(state)
                chances = torch.distributions.Categorical(logits=logits)
                action = chances.sample()
                steps.append((state, action, chances.log_prob(action), value))
                steps[-1] += (world.step(action)[1],)
            states, actions, old, values, rewards = (
                torch.stack(x) for x in zip(*steps, strict=True)
            )
            last = model(world.state)[1]
        advantages = estimated(rewards, torch.cat([values, last[None]]))
        returns, advantages, passes = advantages + values, whitened(advantages), 0
        while passes < 4:
            passes += 1
            for part in torch.randperm(4).chunk(2):
                logits, value = model(states[part])
                chances = torch.distributions.Categorical(logits=logits)
                ratio = (chances.log_prob(actions[part]) - old[part]).exp()
                gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
                near = values[part] + (value - values[part]).clamp(-0.2, 0.2)
                error = torch.max((value - returns[part]) ** 2, (near - returns[part]) ** 2)
                loss = 0.5 * error.mean() - gain.mean() - 0.01 * chances.entropy().mean()
                update(run, model, optimizer, loss)
            distance = mean_of_ranks((ratio - 1 - ratio.log()).mean())
            if distance > 0.02:
                break
        run.record(passes, distance)


class Returns(nn.Module):
    """Actions from returns to go, states and actions before (a decision transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"r": nn.Linear(1, SIZE), "s": nn.Linear(SIZE, SIZE)})
        self.embed["a"], self.time = nn.Embedding(ACTIONS, SIZE), nn.Embedding(4, SIZE)
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, SIZE, 0.0, batch_first=True)
        self.head = nn.Linear(SIZE, ACTIONS)

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        places = self.time(torch.arange(states.shape[1]))
        kinds = {"r": returns[..., None], "s": states, "a": actions}
        x = torch.stack([self.embed[key](kinds[key]) + places for key in "rsa"], 2).flatten(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(x, src_mask=mask, is_causal=True)[:, 1::3])


@program("a decision transformer: returns, states and actions in turn, played at evaluation")
def decision_transformer(run: Run) -> None:
    model = run.shard(Returns(), [nn.TransformerEncoderLayer])
    optimizer = adamw(model.parameters())
    for step in range(3):
        states, actions = run.tensor(4, 4, SIZE, key=step), run.tokens(ACTIONS, 4, 4, key=step)
        returns = run.tensor(4, 4, key=step)
        answers = model(returns, states, actions)
        update(run, model, optimizer, F.cross_entropy(answers.flatten(0, 1), actions.flatten()))
    model.eval()
    world = World(run)
    states, actions = world.state[:, None], torch.zeros(4, 1, dtype=torch.long)
    goals = torch.ones(4, 1)
    with torch.no_grad():
        for _ in range(3):
            actions[:, -1] = model(goals, states, actions)[:, -1].argmax(-1)
            state, reward = world.step(actions[:, -1])
            states = torch.cat([states, state[:, None]], 1)
            goals = torch.cat([goals, goals[:, -1:] - reward[:, None]], 1)
            actions = F.pad(actions, (0, 1))
    run.record(actions, goals)


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
