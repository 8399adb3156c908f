"""Programs: several models, or parts of one, that are trained in turn."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import Block, Net, adamw, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Pair(nn.Module):
    """Two parts with parameters each; `part` chooses what the forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, part: str = "both") -> Any:
        if part == "actor":
            return self.actor(x)
        if part == "critic":
            return self.critic(x)
        return self.actor(x), self.critic(x)


class Gan(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Net(), Net()

    def forward(self, x: Tensor, mode: str) -> Tensor:
        fake = self.generator(x)
        return self.discriminator(fake.detach() if mode == "d" else fake)


@program("a GAN of two models")
def gan_two_models(run: Run) -> None:
    generator, critic = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    g_optimizer, d_optimizer = sgd(generator), sgd(critic)
    for x in run.batches():
        fake = generator(x)
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        update(run, critic, d_optimizer, loss)
        update(run, generator, g_optimizer, F.softplus(-critic(fake)).mean())
        critic.zero_grad()


@program("WGAN-GP: two models, a gradient penalty, a critic that steps twice")
def wgan_gp(run: Run) -> None:
    generator, critic = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    g_optimizer, d_optimizer = sgd(generator, 0.01), sgd(critic, 0.01)
    for x in run.batches(2):
        for _ in range(2):
            with torch.no_grad():
                fake = generator(x)
            mixed = (0.5 * x + 0.5 * fake).requires_grad_()
            slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            loss = critic(fake).mean() - critic(x).mean()
            update(run, critic, d_optimizer, loss + (slope.norm(dim=1) - 1).square().mean())
        update(run, generator, g_optimizer, -critic(generator(x)).mean())
        critic.zero_grad()


@program("a GAN of one model with two optimizers", unused=True)
def gan_one_model(run: Run) -> None:
    model = run.shard(Gan(), [Block])
    net = run.module(model)
    g_optimizer, d_optimizer = sgd(net.generator), sgd(net.discriminator)
    for x in run.batches():
        update(run, model, d_optimizer, F.softplus(model(x, "d")).mean())
        net.generator.zero_grad()
        update(run, model, g_optimizer, F.softplus(-model(x, "g")).mean())
        net.discriminator.zero_grad()


@program("a GAN whose discriminator is frozen while the generator trains", unused=True)
def gan_freezing(run: Run) -> None:
    model = run.shard(Gan(), [Block])
    net = run.module(model)
    g_optimizer, d_optimizer = sgd(net.generator), sgd(net.discriminator)
    for x in run.batches():
        net.generator.requires_grad_(False)
        update(run, model, d_optimizer, F.softplus(model(x, "d")).mean())
        net.generator.requires_grad_(True)
        net.discriminator.requires_grad_(False)
        update(run, model, g_optimizer, F.softplus(-model(x, "g")).mean())
        net.discriminator.requires_grad_(True)


@program("actor and critic: one step between two backwards")
def actor_critic(run: Run) -> None:
    model = run.shard(Pair())
    net = run.module(model)
    a_optimizer, c_optimizer = sgd(net.actor), sgd(net.critic)
    for x in run.batches():
        action, value = model(x)
        c_loss = (value - 1).square().mean()
        a_loss = (action * value.detach()).mean()
        c_loss.backward()
        run.average(model)
        c_optimizer.step()
        a_loss.backward()
        run.average(model)
        a_optimizer.step()
        model.zero_grad()
        run.record(c_loss, a_loss)


@program("the same with actor and critic as units")
def actor_critic_units(run: Run) -> None:
    class Deep(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = Block(), Block()

    model = run.shard(Deep(), [Block])
    net = run.module(model)
    a_optimizer, c_optimizer = sgd(net.actor), sgd(net.critic)
    for x in run.batches():
        action, value = model(x)
        c_loss = (value - 1).square().mean()
        a_loss = (action * value.detach()).mean()
        c_loss.backward()
        run.average(model)
        c_optimizer.step()
        a_loss.backward()
        run.average(model)
        a_optimizer.step()
        model.zero_grad()
        run.record(c_loss, a_loss)


@program("the critic's loss goes through the actor's output, two optimizers", unused=True)
def actor_through_critic(run: Run) -> None:
    model = run.shard(Pair())
    net = run.module(model)
    a_optimizer, c_optimizer = sgd(net.actor), sgd(net.critic)
    for x in run.batches():
        update(run, model, c_optimizer, (model(x, "critic") - 1).square().mean())
        loss = model(model(x, "actor"), "critic").mean()
        update(run, model, a_optimizer, loss)
        c_optimizer.zero_grad()


@program("DQN: a frozen target copy, a TD loss")
def dqn(run: Run) -> None:
    import copy

    net = Net()
    target = copy.deepcopy(net).requires_grad_(False)
    model = run.shard(net, [Block])
    optimizer = adamw(model.parameters())
    for x in run.batches():
        aim = 1 + 0.9 * target(x).max(1)[0]
        q = model(x).gather(1, torch.zeros(4, 1, dtype=torch.long)).squeeze(1)
        update(run, model, optimizer, F.smooth_l1_loss(q, aim))


@program("PPO: old log-probabilities kept, several passes over one batch")
def ppo(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    for x in run.batches(2):
        with torch.no_grad():
            old = model(x).log_softmax(-1)[:, 0]
        for _ in range(3):
            ratio = (model(x).log_softmax(-1)[:, 0] - old).exp()
            update(run, model, optimizer, -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean())


@program("two towers, with features gathered from all ranks in the loss (CLIP)")
def two_towers(run: Run) -> None:
    from torch.distributed.nn.functional import all_gather

    first, second = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for x in run.batches():
        a, b = torch.cat(all_gather(first(x))), torch.cat(all_gather(second(x * 0.5)))
        loss = F.cross_entropy(a @ b.t(), torch.arange(len(a)))
        loss.backward()
        run.average(first, second)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("two heads trained in turn, one per step", unused=True)
def heads_in_turn(run: Run) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](self.body(x))

    model = run.shard(Heads(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, x in enumerate(run.batches(4)):
        update(run, model, optimizer, mean_square(model(x, "ab"[step % 2])))


@program("two tasks' gradients taken apart with torch.autograd.grad on shared features")
def gradients_of_features(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        y = model(x)
        first = torch.autograd.grad(y[:, :4].square().mean(), y, retain_graph=True)[0]
        second = torch.autograd.grad(y[:, 4:].abs().mean(), y, retain_graph=True)[0]
        y.backward(first + 0.5 * second)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()


@program("a small plain head beside the sharded body, averaged by hand")
def plain_head_beside(run: Run) -> None:
    body, head = run.shard(Net(), [Block]), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for x in run.batches():
        loss = mean_square(head(body(x)))
        loss.backward()
        run.average(body)
        for p in head.parameters():
            dist.all_reduce(p.grad)
            p.grad /= run.world_size
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("cycle consistency: two models, each called twice in one loss")
def cycle(run: Run) -> None:
    there, back = run.shard(Net(), [Block]), run.shard(Net(), [Block])
    first, second = sgd(there), sgd(back)
    for x in run.batches():
        loss = (back(there(x)) - x).abs().mean() + (there(back(x)) - x).abs().mean()
        loss.backward()
        run.average(there, back)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss)


@program("contrastive loss with a queue of detached features")
def feature_queue(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    queue: list[Tensor] = []
    for x in run.batches():
        y = model(x)
        loss = mean_square(y) + sum((y - old).square().mean() for old in queue)
        queue.append(y.detach())
        update(run, model, optimizer, loss)


@program("SimSiam: two views, stop-gradient on each other")
def simsiam(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        a, b = model(x), model(x + 0.1)
        loss = F.mse_loss(a, b.detach() + 1) + F.mse_loss(b, a.detach() - 1)
        update(run, model, optimizer, loss)


def pipelined(run: Run, schedule: str) -> None:
    """Both stages of a pipeline on each rank; data-parallel over the ranks."""
    from torch.distributed import pipelining

    own = [dist.new_group([rank]) for rank in range(run.world_size)][run.rank]
    models = [run.shard(Net(), [Block]) for _ in range(2)]
    stages = [
        pipelining.PipelineStage(model, index, 2, torch.device("cpu"), group=own)
        for index, model in enumerate(models)
    ]
    plan = getattr(pipelining, schedule)(stages, 2, loss_fn=lambda y, target: mean_square(y))
    optimizers = [sgd(model) for model in models]
    for x in run.batches():
        losses: list[Tensor] = []
        plan.step(x, target=x, losses=losses)
        run.average(*models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.record(losses)


@program("a pipeline schedule, interleaved 1F1B")
def pipeline_interleaved(run: Run) -> None:
    pipelined(run, "ScheduleInterleaved1F1B")


@program("a zero-bubble pipeline schedule")
def pipeline_zero_bubble(run: Run) -> None:
    pipelined(run, "ScheduleInterleavedZeroBubble")
