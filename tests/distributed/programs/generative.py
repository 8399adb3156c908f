"""Programs: flows, energies, codes and dreams, and samples from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Coupling(nn.Module):
    """Half of the numbers is scaled and shifted by the other half, behind a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(SIZE, SIZE))[0])
        self.net = nn.Sequential(nn.Linear(SIZE // 2, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.strength = nn.Parameter(torch.zeros(SIZE // 2))

    def forward(self, x: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        if back:
            first, second = x.chunk(2, -1)
            scale, shift = self.parts(first)
            x = torch.cat([first, (second - shift) * (-scale).exp()], -1)
            return torch.linalg.solve(self.rotation, x, left=False), -scale.sum(-1)
        x = x @ self.rotation
        first, second = x.chunk(2, -1)
        scale, shift = self.parts(first)
        volume = scale.sum(-1) + torch.linalg.slogdet(self.rotation)[1]
        return torch.cat([first, second * scale.exp() + shift], -1), volume

    def parts(self, first: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(first).chunk(2, -1)
        return self.strength * torch.tanh(scale), shift


class Glow(nn.Module):
    """Couplings one after the other, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for layer in reversed(self.layers) if back else self.layers:
            x, more = layer(x, back)
            volume = volume + more
        return x, volume


@program("a normalising flow: log-determinants of rotations, samples by the layers in reverse")
def glow(run: Run) -> None:
    model = run.shard(Glow(), [Coupling])
    optimizer = adamw(model.parameters())
    for step in range(3):
        noise, volume = model(run.tensor(6, SIZE, key=step) * 2 + 1)
        update(run, model, optimizer, (0.5 * noise.square().sum(-1) - volume).mean() / SIZE)
        model.eval()
        with torch.no_grad():
            made, _ = model(run.tensor(3, SIZE, key=10 + step), back=True)
            run.record(made, model(made)[0])
        model.train()


@program("an energy: samples by Langevin steps along gradients of inputs, a buffer of them by rank")
def langevin(run: Run) -> None:
    model = run.shard(nn.Sequential(Net(1), nn.SiLU(), nn.Linear(SIZE, 1)), [Block])
    optimizer = adamw(model.parameters(), betas=(0.0, 0.999))
    buffer = run.tensor(8, SIZE, key=50)
    for step in range(3):
        pick = run.tokens(8, 4, key=step)
        model.eval()
        model.requires_grad_(False)
        x = torch.where(torch.rand(4, 1) < 0.2, torch.randn(4, SIZE), buffer[pick])
        for _ in range(3):
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(model(x).sum(), x)[0]
            x = x - 0.5 * slope.clamp(-0.1, 0.1) + 0.05 * torch.randn_like(x)
        x = buffer[pick] = x.detach()
        model.requires_grad_(True)
        model.train()
        true, false = model(torch.cat([run.tensor(4, SIZE, key=step), x])).chunk(2)
        loss = true.mean() - false.mean() + 0.1 * (true.square() + false.square()).mean()
        update(run, model, optimizer, loss)


@program("denoising scores: a sliced second derivative by vectors of noise, scales annealed")
def sliced_scores(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x = run.tensor(6, SIZE, key=step).requires_grad_()
        vectors = torch.randn(6, SIZE)
        score = model(x)
        along = torch.autograd.grad((score * vectors).sum(), x, create_graph=True)[0]
        loss = ((along * vectors).sum(-1) + 0.5 * score.square().sum(-1)).mean()
        update(run, model, optimizer, loss)
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        for scale in (1.0, 0.5, 0.1):
            x = x + 0.05 * scale * model(x) + (0.1 * scale) ** 0.5 * torch.randn_like(x)
    run.record(x)


class Codes(nn.Module):
    """A codebook whose counts and sums are those of all ranks, moved in each forward."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(6, SIZE)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.cdist(x, self.codes).argmin(-1)
        chosen = F.embedding(index, self.codes)
        if self.training:
            with torch.no_grad():
                which = F.one_hot(index, 6).float()
                counts, sums = which.sum(0), which.t() @ x
                dist.all_reduce(counts)
                dist.all_reduce(sums)
                self.counts.mul_(0.9).add_(counts, alpha=0.1)
                self.sums.mul_(0.9).add_(sums, alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None].clamp(min=1e-3))
        return x + (chosen - x).detach(), F.mse_loss(x, chosen.detach()), index


class Residuals(nn.Module):
    """An encoder, codebooks of what is left, and a decoder (SoundStream)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(1), Net(1)
        self.books = nn.ModuleList(Codes() for _ in range(2))

    def forward(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        left = self.encoder(x)
        total, commitment, indices = torch.zeros_like(left), torch.zeros(()), []
        for book in self.books[:depth]:
            chosen, loss, index = book(left)
            left, total, commitment = left - chosen.detach(), total + chosen, commitment + loss
            indices.append(index)
        return self.decoder(total), commitment, indices


@program(
    "a residual VQ-VAE: counts summed over ranks within the forward, books dropped, use logged"
)
def residual_codes(run: Run) -> None:
    model = run.shard(Residuals(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(4):
        x = run.tensor(8, SIZE, key=step)
        made, commitment, indices = model(x, 1 + step % 2)
        update(run, model, optimizer, F.mse_loss(made, x) + 0.25 * commitment)
        share = torch.bincount(indices[0], minlength=6).float() / 8
        run.record((-(share * (share + 1e-10).log()).sum()).exp())


class Ladder(nn.Module):
    """Latents at two levels, the lower ones given the upper ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.posterior = nn.ModuleList(nn.Linear(SIZE, 8) for _ in range(2))
        self.prior, self.down = nn.Linear(4, 8), nn.ModuleList(nn.Linear(4, SIZE) for _ in range(2))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.up[0](x)
        high = self.up[1](low)
        mean, spread = self.posterior[1](high).chunk(2, -1)
        top = mean + spread.exp() * torch.randn_like(mean)
        first = -0.5 * (1 + 2 * spread - mean.square() - (2 * spread).exp())
        mean, spread = self.posterior[0](low).chunk(2, -1)
        p_mean, p_spread = self.prior(top).chunk(2, -1)
        bottom = mean + spread.exp() * torch.randn_like(mean)
        second = p_spread - spread - 0.5
        second = second + ((2 * spread).exp() + (mean - p_mean).square()) / (
            2 * (2 * p_spread).exp()
        )
        made = self.down[0](bottom) + self.down[1](top)
        error = 0.5 * ((x - made) / self.log_scale.exp()).square() + self.log_scale
        return error.sum(-1).mean(), first.sum(-1).mean(), second.sum(-1).mean()


@program(
    "a ladder VAE: free bits, a KL that cycles, steps left out where the gradient's norm is large"
)
def ladder(run: Run) -> None:
    model = run.shard(Ladder(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(4):
        error, first, second = model(run.tensor(6, SIZE, key=step) * (10 if step == 2 else 1))
        weight = min(1.0, (step % 3) / 2)
        loss = error + weight * (first.clamp(min=0.5) + second.clamp(min=0.5))
        loss.backward()
        run.average(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        if norm < 100:
            optimizer.step()
        optimizer.zero_grad()
        run.record(loss, norm, norm < 100)


def endless(items: list[Tensor]) -> Iterator[Tensor]:
    """Over and over."""
    while True:
        yield from items


@program(
    "StyleGAN: lazy R1 and path-length penalties, style mixing, an average with its own ramp-up"
)
def style_gan(run: Run) -> None:
    generator = run.shard(nn.Sequential(Net(1), nn.LeakyReLU(0.2), nn.Linear(SIZE, 4)), [Block])
    critic = run.shard(nn.Sequential(nn.Linear(4, SIZE), Block(), nn.Linear(SIZE, 1)), [Block])
    g_optimizer, d_optimizer = (
        torch.optim.Adam(m.parameters(), lr=3e-3, betas=(0.0, 0.99), eps=1e-5)
        for m in (generator, critic)
    )
    average = {name: p.detach().clone() for name, p in run.module(generator).named_parameters()}
    mean_length, batches = torch.zeros(()), endless([run.tensor(4, 4, key=k) for k in range(2)])
    for step in range(3):
        true = next(batches).requires_grad_()
        made = generator(run.tensor(4, SIZE, key=10 + step))
        answers = critic(true)
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-answers).mean()
        if step % 2 == 0:
            slope = torch.autograd.grad(answers.sum(), true, create_graph=True)[0]
            loss = loss + 5.0 * slope.square().sum(-1).mean()
        update(run, critic, d_optimizer, loss)
        true = true.detach()
        latent = run.tensor(4, SIZE, key=20 + step).requires_grad_()
        made = generator(latent)
        loss = F.softplus(-critic(made)).mean()
        if step % 2 == 1:
            noise = torch.randn_like(made) / 2
            slope = torch.autograd.grad((made * noise).sum(), latent, create_graph=True)[0]
            lengths = slope.square().sum(-1).sqrt()
            mean_length = mean_length + 0.1 * (lengths.mean().detach() - mean_length)
            loss = loss + (lengths - mean_length).square().mean()
        update(run, generator, g_optimizer, loss)
        critic.zero_grad(set_to_none=True)
        decay = min(0.99, 1 - 1 / (step + 2))
        with torch.no_grad():
            for name, param in run.module(generator).named_parameters():
                average[name] = average[name].lerp(param.detach(), 1 - decay)
        run.record(mean_length)
    run.record(average)


class Dream(nn.Module):
    """A recurrent state with a discrete part, which is sampled straight through (RSSM)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.prior = nn.GRUCell(6 + 2, SIZE), nn.Linear(SIZE, 6)
        self.posterior = nn.Linear(2 * SIZE, 6)
        self.decoder, self.reward = nn.Linear(SIZE + 6, SIZE), nn.Linear(SIZE + 6, 1)

    def forward(self, seen: Tensor | None, action: Tensor, deep: Tensor, flat: Tensor) -> Any:
        deep = self.cell(torch.cat([flat, action], -1), deep)
        prior = self.prior(deep).unflatten(-1, (2, 3))
        posterior = prior
        if seen is not None:
            posterior = self.posterior(torch.cat([deep, seen], -1)).unflatten(-1, (2, 3))
        chances = torch.distributions.OneHotCategoricalStraightThrough(logits=posterior)
        flat = chances.rsample().flatten(1)
        full = torch.cat([deep, flat], -1)
        return deep, flat, prior, posterior, self.decoder(full), self.reward(full)[:, 0]


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Between the categories of both logits."""
    return (first.softmax(-1) * (first.log_softmax(-1) - second.log_softmax(-1))).sum((1, 2)).mean()


@program(
    "Dreamer: an RSSM learns the world, an actor learns within dreams, a critic learns values",
    unused=True,
)
def dreamer(run: Run) -> None:
    world, critic = run.shard(Dream(), [nn.GRUCell]), run.shard(nn.Linear(SIZE + 6, 1))
    actor = run.shard(nn.Sequential(nn.Linear(SIZE + 6, SIZE), nn.ELU(), nn.Linear(SIZE, 2)))
    optimizers = [adamw(m.parameters()) for m in (world, actor, critic)]
    for step in range(3):
        deep, flat, loss = torch.zeros(4, SIZE), torch.zeros(4, 6), torch.zeros(())
        for t in range(3):
            seen, action = run.tensor(4, SIZE, key=10 * step + t), run.tensor(4, 2, key=step).tanh()
            deep, flat, prior, post, made, reward = world(seen, action, deep, flat)
            loss = loss + F.mse_loss(made, seen) + F.mse_loss(reward, seen.mean(-1))
            loss = loss + 0.5 * kl(post.detach(), prior) + 0.1 * kl(post, prior.detach())
        update(run, world, optimizers[0], loss)
        deep, flat = deep.detach(), flat.detach()
        world.requires_grad_(False)
        dreams, rewards = [torch.cat([deep, flat], -1)], []
        for _ in range(3):
            action = torch.tanh(actor(dreams[-1]))
            deep, flat, *_, reward = world(None, action, deep, flat)
            dreams.append(torch.cat([deep, flat], -1))
            rewards.append(reward)
        with torch.no_grad():
            values = critic(torch.stack(dreams))[..., 0]
        last = values[-1]
        returns: list[Tensor] = []
        for reward, value in zip(rewards[::-1], values.flip(0)[:-1], strict=True):
            last = reward + 0.9 * (0.05 * value + 0.95 * last)
            returns.insert(0, last)
        update(run, actor, optimizers[1], -torch.stack(returns).mean())
        world.requires_grad_(True)
        aim = torch.stack(returns).detach()
        value = critic(torch.stack(dreams[:-1]).detach())[..., 0]
        update(run, critic, optimizers[2], F.mse_loss(value, aim))
